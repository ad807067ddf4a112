"""One side of a channel on one rank: its addresses, its tensors, and its account of turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpspan.memory import Driver, Right
from tpspan.memory.cuda import CudaDriver
from tpspan.parallel.packing import Packed, Placed, Spec, strides_of
from tpspan.parallel.ring import Ring
from tpspan.parallel.turns import Turns
from tpspan.spans.fence import Fence, StreamsInUse, Waits
from tpspan.spans.remapper import Lane, Remapper
from tpspan.spans.stream_gate import StreamGate
from tpspan.spans.table import SpanBlock, Table
from tpspan.spans.tensors import TensorRange

MOST_AHEAD = 64
"""Turns by which the host may be ahead of remaps. A queue of the driver holds 1024 launches."""
_NAP_S = 20e-6
_MOST_PACKED = 1024


@dataclass(frozen=True)
class SidePlace:
    """Where a side stands (``tpspan.spans.fence.Place``)."""

    backend: str
    device: torch.device
    driver: Driver
    rank: int
    timeout_s: float


class Side:
    """The producer's or a consumer's end of a channel.

    Args:
        place: its device and driver.
        waits: knows what streams ran into.
        block_nbytes, depth: of the channel.
        remaps: one address behind which the blocks take turns, instead of one for each.

    Attributes:
        is_producer, place, ring, streams, table: what it is made of.
        turns: how it waits; set once both ends exist.
        lane: of its remaps, if it remaps.
        lock: held by who acquires.
        num_waits: how often the host had to wait for the other side.
    """

    turns: Turns

    def __init__(
        self,
        is_producer: bool,
        place: SidePlace,
        waits: Waits,
        block_nbytes: int,
        depth: int,
        *,
        remaps: bool,
    ) -> None:
        name = "producer" if is_producer else "consumer"
        self.is_producer = is_producer
        self.place = place
        self.ring = Ring(depth, most_held=1 if remaps else None, side=name)
        self.streams = StreamsInUse(place, waits)
        # Where blocks can trade places quickly, those whose turn it is not are kept mapped, too.
        self._parks = remaps and place.backend == "host"
        self._num_mapped = 1 if remaps and not self._parks else depth
        # Without remaps the blocks are pieces of one, which ends with a page of the driver.
        page_nbytes = place.driver.page_nbytes
        num_pages = -(-block_nbytes * self._num_mapped // page_nbytes)
        self.table = Table(place.driver, num_pages * page_nbytes)
        self.lane: Lane | None = None
        self.lock = threading.Lock()
        self.num_waits = 0
        self._block_nbytes = block_nbytes
        self._remaps = remaps
        self._blocks: tuple[SpanBlock, ...] = ()
        self._ranges: tuple[TensorRange, ...] = ()
        # Making a tensor over an address takes longer than a view of one.
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._packed: dict[tuple[int, tuple[Spec, ...]], list[torch.Tensor]] = {}

    def map(self, blocks: Sequence[SpanBlock], right: Right) -> None:
        """Put blocks behind the addresses: one for each turn of the ring, or one that is all."""
        self._blocks = tuple(blocks)
        offset = 0
        for block in blocks[: self._num_mapped]:
            self.table.place(offset, block)
            offset += block.nbytes
        self.table.reservation.protect(right)
        address, nbytes = self.table.reservation.address, self._block_nbytes
        self._ranges = tuple(
            TensorRange(address + index * nbytes, nbytes, self.place.device)
            for index in range(self._num_mapped)
        )

    def begin_remaps(self, remapper: Remapper) -> None:
        """Have the remaps made by a helper; a first one, which takes the longest, is made now."""
        driver = self.place.driver
        gate = StreamGate(driver) if isinstance(driver, CudaDriver) else None
        self._put(1)
        self._put(0)
        self.lane = remapper.lane(
            self.streams.refuse_capture,
            gate=gate,
            rank=self.place.rank,
            timeout_s=self.place.timeout_s,
        )

    def hold(self, stream: int, turn: int) -> None:
        """Hold a stream, or without a GPU the caller, until a turn's block is behind the address.

        The host may be ahead of its remaps, but not by so much that launches fill their queue: the
        next one would wait inside the driver, which the helper needs to remap.

        Raises:
            As ``Lane.hold``.
        """
        assert self.lane is not None
        while turn - self.lane.num_done > MOST_AHEAD:
            self.lane.check()
            time.sleep(_NAP_S)
        self.lane.hold(stream, turn)

    def remap_after(self, fence: Fence, turn: int) -> None:
        """Bring the block of the turn after this one behind the address, once the fence is done."""
        assert self.lane is not None
        index = self.ring.block_of(turn + 1)
        self.lane.submit(fence, lambda: self._put(index), turn + 1)

    def view(self, turn: int, placed: Placed) -> torch.Tensor:
        """A tensor of a turn's block: no view as far as autograd can tell."""
        self.streams.use()
        index = 0 if self._remaps else self.ring.block_of(turn)
        return self._base(index, placed).data

    def views(self, turn: int, packed: Packed) -> list[torch.Tensor]:
        """The same of all tensors that were placed beforehand; the second time it is quick."""
        self.streams.use()
        index = 0 if self._remaps else self.ring.block_of(turn)
        bases = self._packed.get((index, packed.specs))
        if bases is None:
            if len(self._packed) == _MOST_PACKED:
                self._packed.clear()
            bases = [self._base(index, placed) for placed in packed.places]
            self._packed[index, packed.specs] = bases
        return [base.data for base in bases]

    def _base(self, index: int, placed: Placed) -> torch.Tensor:
        dtype = placed.dtype
        base = self._bases.get((index, dtype))
        if base is None:
            whole = self._ranges[index].tensor((self._block_nbytes,), torch.uint8, keep=None)
            base = self._bases[index, dtype] = whole.view(dtype)
        strides = strides_of(placed.shape)
        return base.as_strided(placed.shape, strides, placed.offset_bytes // dtype.itemsize)

    @property
    def num_live(self) -> int:
        """Tensors, or views of them, that are still alive outside."""
        self._packed.clear()
        self._bases.clear()
        return sum(each.num_live for each in self._ranges)

    def settle(self) -> None:
        """Take back what this side's slots of signals hold, before other channels get them."""
        self.turns.settle(self.streams.use())
        self.streams.fence().wait()

    def end_remaps(self, remapper: Remapper) -> None:
        """Wait until no remap is on its way."""
        if self.lane is not None:
            remapper.end(self.lane)

    def _put(self, index: int) -> None:
        block = self._blocks[index]
        if self._parks:
            self.table.exchange(0, self.table.offset_of(block))
        else:
            self.table.replace([(0, block)])
