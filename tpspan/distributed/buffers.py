"""The staging memory of a group of GPUs, and the barriers between its steps.

Each rank brings one region of a span, cut into three buffers. A step writes into one of them, holds
the stream until all ranks have written (``Signals.barrier``), and reads the peers'.

Why no byte is overwritten while it is read (invariant 6). Steps outside a graph use buffers 0 and 1
in turn. A rank writes a buffer again two steps later, behind the barrier of the step between, which
a peer's stream reaches only after its reads of the first: so one barrier a step is enough.

Graphs. A captured step cannot take turns: its buffer is frozen, and the graph may be replayed with
nothing in between. It uses buffer 2, which no other step writes, and a second barrier behind its
reads, so that whatever comes next finds the buffer free. Its barriers have a slot of their own.
Nothing is allocated during a capture: a call larger than the buffers is made in several steps.
"""

from __future__ import annotations

import contextlib

import torch

from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans.layout import Layout
from tpspan.spans.signals import Signals
from tpspan.spans.span import Span

_NUM_BUFFERS = 3
_CAPTURED = 2
_SMALLEST_NBYTES = 8 << 20
_LARGEST_NBYTES = 64 << 20


class Buffers:
    """Three buffers of every rank of a world. Collective to make and to grow.

    Attributes:
        capturing: whether the current stream is being captured; set by the group before each call.
        nbytes: of one buffer.
        region_nbytes: from one rank's buffer to the same one of the next rank.
    """

    def __init__(self, world: World) -> None:
        self.capturing = False
        self._world = world
        self._driver = world.driver
        self._signals = Signals.of(world)
        self._slots = (self._signals.acquire(), self._signals.acquire())
        self._turn = 0
        self._span = self._allocate(_SMALLEST_NBYTES)

    def stage(self, source: int, nbytes: int, stream: int) -> int:
        """Take the next buffer and write this rank's bytes; return the address of rank 0's."""
        buffer = _CAPTURED
        if not self.capturing:
            buffer = self._turn = 1 - self._turn
        first = self._base + buffer * self.nbytes
        self.copy(first + self._world.rank * self.region_nbytes, source, nbytes, stream)
        return first

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes by copy engine."""
        if nbytes:
            self._driver.copy(target, source, nbytes, stream)

    def meet(self, stream: int) -> None:
        """Hold the stream until the streams of all ranks have come."""
        self._signals.barrier(self._slots[self.capturing], stream)

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
        """Grow for calls of this size, within bounds and not in a capture. Collective."""
        if nbytes <= self.nbytes or self.nbytes == _LARGEST_NBYTES or self.capturing:
            return
        torch.cuda.synchronize(self._world.device)
        self._span.close()
        self._span = self._allocate(min(1 << (nbytes - 1).bit_length(), _LARGEST_NBYTES))

    def view(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor over staged bytes; None if the address is not here. To be dropped soon."""
        offset = address - self._base
        if not 0 <= offset < self._span.nbytes:
            return None
        return self._span.tensor((numel,), dtype, offset)

    def close(self) -> None:
        """Unmap; waits for no other rank."""
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self._world.device)
        with contextlib.suppress(Exception):
            self._span.close(force=True)

    def _allocate(self, nbytes: int) -> Span:
        self.nbytes = nbytes
        self.region_nbytes = _NUM_BUFFERS * nbytes
        sizes = [self.region_nbytes] * self._world.world_size
        span = Span.allocate_bytes(self._world, Layout.blocked(sizes, page_nbytes=PAGE_NBYTES))
        self._base = span.base_address
        return span
