"""The staging memory of a group of GPUs, and the barriers between its steps.

Each rank brings one region, of a span or of host memory, cut into three buffers. A step writes into
one of them, holds the stream until all ranks have written (``Signals.barrier``), and reads the
peers'.

Why no byte is overwritten while it is read (invariant 6). Steps outside a graph use buffers 0 and 1
in turn. A rank writes a buffer again two steps later, behind the barrier of the step between, which
a peer's stream reaches only after its reads of the first: so one barrier a step is enough. Large
calls put their parts into halves of the two, see ``StagedAhead``; like any step they leave only the
buffer that was used last to be read still.

Graphs. A captured step cannot take turns: its buffer is frozen, and the graph may be replayed with
nothing in between. It uses buffer 2, which no other step writes, and a second barrier behind its
reads, so that whatever comes next finds the buffer free. Its barriers have a slot of their own.
Nothing is allocated during a capture: a call larger than the buffers is made in several steps.

Host memory serves ranks that share a GPU. There whatever runs on the GPU's processors, a copy from
the device to the device among them, waits for the time slice of its process: 290 µs for any step in
which every rank launches something. Copies to and from the host are made by copy engines, which
change from one process to the next at once: a whole gather of 128 KiB takes 42 µs.
"""

from __future__ import annotations

import contextlib

import torch

from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans.board import Board
from tpspan.spans.layout import Layout
from tpspan.spans.pages import Pages
from tpspan.spans.signals import Signals
from tpspan.spans.span import Span
from tpspan.spans.tensors import TensorRange

_NUM_BUFFERS = 3
_CAPTURED = 2
_SMALLEST_NBYTES = 8 << 20
_LARGEST_NBYTES = 64 << 20
HOST_NBYTES = 2 << 20


class Buffers:
    """Three buffers of every rank of a world. Collective to make and to grow.

    Args:
        world: the ranks.
        on_host: take host memory, which does not grow.

    Attributes:
        rank, world_size, device_index: of this rank.
        on_host: where they lie.
        capturing: whether the current stream is being captured; set by the group before each call.
        nbytes: of one buffer.
        region_nbytes: from one rank's buffer to the same one of the next rank.
    """

    def __init__(self, world: World, *, on_host: bool = False) -> None:
        self.on_host = on_host
        self.capturing = False
        self.rank, self.world_size = world.rank, world.world_size
        self.device_index = world.device.index
        self._world = world
        self._driver = world.driver
        self._signals = Signals.of(world)
        self._slots = (self._signals.acquire(), self._signals.acquire())
        self._turn = 0
        self._is_in_graphs = False
        self._kept: list[Span | Pages] = []
        self._memory: Span | Pages
        self._allocate(HOST_NBYTES if on_host else _SMALLEST_NBYTES)

    def stage(self, source: int, nbytes: int, stream: int) -> int:
        """Take the next buffer and write this rank's bytes; return the address of rank 0's."""
        first = self.take()
        self.fill(first, source, nbytes, stream)
        return first

    def take(self, half: int = 0) -> int:
        """The address of rank 0's next buffer; with ``half=1`` of the second half of the last."""
        buffer = _CAPTURED
        if self.capturing:
            self._is_in_graphs = True
        else:
            if not half:
                self._turn = 1 - self._turn
            buffer = self._turn
        return self._range.address + buffer * self.nbytes + half * (self.nbytes // 2)

    def fill(self, first: int, source: int, nbytes: int, stream: int) -> None:
        """Write this rank's bytes in the step for which ``take`` returned ``first``."""
        self.copy(self.staged(first, self.rank), source, nbytes, stream)

    def staged(self, first: int, rank: int) -> int:
        """Where a rank's bytes are in the step for which ``take`` returned ``first``."""
        return first + rank * self.region_nbytes

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes by copy engine."""
        if not nbytes:
            return
        if self.on_host and not self._is_staged(target):
            self._driver.copy_up(target, source, nbytes, stream)
        else:
            self._driver.copy(target, source, nbytes, stream)

    def meet(self, stream: int) -> None:
        """Hold the stream until the streams of all ranks have come."""
        self._signals.barrier(self._slots[self.capturing], stream, self.capturing)

    def leave(self, stream: int) -> None:
        """Behind a step's reads: in a graph nothing else says that all have read, so all say it."""
        if self.capturing:
            self.meet(stream)

    def check(self) -> None:
        """Raise what a wait of a stream ran into.

        Raises:
            PeerError: ranks did not come before the deadline.
        """
        self._signals.check()

    def parts(self, nbytes: int, limit: int = 0) -> list[tuple[int, int]]:
        """The pieces (offset, nbytes) of a call; one empty piece if the call is empty."""
        limit = limit or self.nbytes
        return [(at, min(nbytes - at, limit)) for at in range(0, max(nbytes, 1), limit)]

    def fit(self, nbytes: int) -> None:
        """Grow for calls of this size, within bounds and not in a capture. Collective.

        What graphs have captured stays where it is until ``close``.
        """
        is_fixed = self.on_host or self.capturing
        if is_fixed or nbytes <= self.nbytes or self.nbytes == _LARGEST_NBYTES:
            return
        torch.cuda.synchronize(self._world.device)
        if self._is_in_graphs:  # on all ranks or on none
            self._kept.append(self._memory)
            self._is_in_graphs = False
        else:
            self._memory.close()
        self._allocate(min(1 << (nbytes - 1).bit_length(), _LARGEST_NBYTES))

    def view(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor over staged bytes; None if the address is not here. To be dropped soon."""
        if not self._is_staged(address):
            return None
        offset = address - self._range.address
        return self._range.tensor((numel,), dtype, offset, keep=self)

    def close(self) -> None:
        """Unmap; waits for no other rank."""
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self._world.device)
        for memory in (self._memory, *self._kept):
            with contextlib.suppress(Exception):
                if isinstance(memory, Span):
                    memory.close(force=True)
                else:
                    memory.close()

    def _is_staged(self, address: int) -> bool:
        return 0 <= address - self._range.address < self._range.nbytes

    def _allocate(self, nbytes: int) -> None:
        world = self._world
        self.nbytes = nbytes
        self.region_nbytes = _NUM_BUFFERS * nbytes
        if self.on_host:
            exchange = Board.of(world).exchange
            self._memory = Pages(exchange, world.driver, on_host=True, nbytes=self.region_nbytes)
        else:
            sizes = [self.region_nbytes] * world.world_size
            layout = Layout.blocked(sizes, page_nbytes=PAGE_NBYTES)
            self._memory = Span.allocate_bytes(world, layout)
        base, total = self._memory.base_address, self.region_nbytes * world.world_size
        self._range = TensorRange(base, total, world.device)
