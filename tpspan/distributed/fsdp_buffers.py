"""The span memory that FSDP2 gathers in and reduces from, and the rules for using it again.

Gathering. FSDP2 copies a rank's shards into that rank's part of the gathered tensor, then calls the
all-gather on part and whole. The gathered tensor is a span, blocked by rank, so the copy lies where
the peers read it, and the all-gather is a meeting. A rank holds only its own part. Or, *staged*,
every rank has a region for the whole tensor: a meeting, and then copy engines bring the other
parts from where their owners wrote them. That takes as much memory as FSDP2 itself, and crosses
the link beside the computation: in place, it is crossed when FSDP2 copies out, which is between
two computations.

Reducing. FSDP2 copies the whole gradients into one input. Every rank brings a region of a span for
it, so the peers read their slices where they were written: a meeting, then a sum over all regions.

How much is kept. FSDP2 itself allocates a gathered tensor of all ranks' bytes for every all-gather
and has two of them in forward; ``GatherBuffers`` never keeps more than its most so far. Within that
it keeps up to three buffers of a size, for with three the meetings of the gathers free each in
time, but no more than would make up one gathered tensor. A size that does not fit any more is
served from a larger idle buffer, and only then are others given back; staged, such a buffer can
take it above that most by its own size. For reducing there is one region, of the largest input, as
long as FSDP2 holds one input at a time.

Every decision follows from the order of requests and from what this rank has let go; both are the
same on all ranks, and each meeting compares the buffer's number.
"""

from __future__ import annotations

import torch

from tpspan.distributed.lines import Buffer, Line
from tpspan.distributed.requests import Operation, words
from tpspan.errors import InUseError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans.allocation import pool_of
from tpspan.spans.layout import Layout
from tpspan.spans.span import Span

_ENOUGH = 3


class _Buffers:
    """Buffers of one world.

    Args:
        world: the ranks; every method is collective among them, except where it says otherwise.
        line: whose meetings, made for FSDP2's calls, free buffers.
        guard: for meetings with no other purpose than to free a buffer; may be the same.

    Attributes:
        num_guards: how many of those there have been.
        most_nbytes: the most that this rank has held at a time.
    """

    def __init__(self, world: World, line: Line, guard: Line) -> None:
        self.world = world
        self.buffers: list[Buffer] = []
        self.num_guards = 0
        self.most_nbytes = 0
        self._line, self._guard = line, guard
        self._num_made = self._num_requests = 0

    @property
    def held_nbytes(self) -> int:
        """Physical memory that this rank brings."""
        return sum(buffer.span.stats().own_nbytes for buffer in self.buffers)

    def find(self, tensor: torch.Tensor) -> Buffer | None:
        """The buffer whose memory a tensor begins in; None if it is an ordinary tensor."""
        address = tensor.data_ptr()
        for buffer in self.buffers:
            if 0 <= address - buffer.span.base_address < buffer.span.nbytes:
                return buffer
        return None

    def refuse_if_in_use(self) -> None:
        """Say so if FSDP2 still holds some of it.

        Raises:
            InUseError: it does.
        """
        live = sum(not buffer.is_idle for buffer in self.buffers)
        if live:
            raise InUseError(
                f"{live} buffers of FSDP2 are in use: finish the step, and wait for unshard() "
                "handles, before closing"
            )

    def close(self) -> None:
        """Give everything back; nothing is in use. Collective."""
        self._give_back(list(self.buffers))

    def forget(self) -> None:
        """Unmap what is idle, without the other ranks: the world is closing."""
        idle = self._idle()
        for buffer in idle:
            buffer.span.close(force=True)
        self._drop(idle)

    def _idle(self) -> list[Buffer]:
        return sorted((b for b in self.buffers if b.is_idle), key=lambda b: b.used_at)

    def _hand_out(self, buffer: Buffer, nbytes: int) -> Buffer:
        """Mark as used from now on; the caller's stream may write it then (invariant 6)."""
        if not buffer.is_free:
            self._line.follow()  # staged reads are made there
            self._guard.meet(words(Operation.BARRIER))
            self.num_guards += 1
        self._line.follow()
        self._guard.follow()
        buffer.is_free = False
        buffer.asked_nbytes = nbytes
        buffer.used_at = self._num_requests
        return buffer

    def _make(self, part_nbytes: int, capacity: int, region_nbytes: int = 0) -> Buffer:
        """A buffer to which every rank brings as much."""
        layout = Layout.blocked([part_nbytes] * self.world.world_size, page_nbytes=PAGE_NBYTES)
        self._num_made += 1
        span = Span.allocate_bytes(self.world, layout)
        buffer = Buffer(span, self._num_made, capacity, region_nbytes)
        self.buffers.append(buffer)
        self._line.buffers.append(buffer)
        self.most_nbytes = max(self.most_nbytes, self.held_nbytes)
        return buffer

    def _give_back(self, buffers: list[Buffer]) -> None:
        if not buffers:
            return
        if self.world.backend == "cuda":
            torch.cuda.synchronize(self.world.device)
        for buffer in buffers:
            buffer.span.close()
        self._drop(buffers)
        # Not for others of their size, of which there may be none, but for the allocator of torch.
        self.world.resource("pool", pool_of).trim()

    def _drop(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self.buffers.remove(buffer)
            self._line.buffers.remove(buffer)


class GatherBuffers(_Buffers):
    """Gathered tensors, of which every rank holds its own part, or all of it.

    Args:
        is_staged: all of it.
    """

    def __init__(self, world: World, line: Line, guard: Line, *, is_staged: bool) -> None:
        super().__init__(world, line, guard)
        self._is_staged = is_staged
        self._allowed_nbytes = 0
        self._num_of_a_size = min(_ENOUGH, world.world_size)

    def take(self, nbytes: int) -> Buffer:
        """A buffer for a gathered tensor, ready to be written. Collective.

        Args:
            nbytes: of all ranks together, a multiple of their number.

        Raises:
            OutOfMemoryError: there is no memory for another one, on this or another rank.
            PeerError: other ranks did not come.
        """
        self._num_requests += 1
        in_use = sum(buffer.asked_nbytes for buffer in self.buffers if not buffer.is_idle)
        self._allowed_nbytes = max(self._allowed_nbytes, in_use + nbytes)
        return self._hand_out(self._choose(nbytes), nbytes)

    def _choose(self, nbytes: int) -> Buffer:
        idle = self._idle()
        fitting = [buffer for buffer in idle if buffer.capacity == nbytes]
        for buffer in fitting:
            if buffer.is_free:
                return buffer
        num = sum(buffer.capacity == nbytes for buffer in self.buffers)
        if fitting and (num >= self._num_of_a_size or not self._has_room(nbytes)):
            return fitting[0]
        if not self._has_room(nbytes):
            used = sum(b.span.layout.span_nbytes for b in self.buffers if not b.is_idle)
            most = self._allowed_nbytes * self.world.world_size - used
            larger = [b for b in idle if b.capacity > nbytes and b.span.layout.span_nbytes <= most]
            if larger:
                return min(larger, key=lambda b: (b.capacity, not b.is_free, b.used_at))
            while idle and not self._has_room(nbytes):
                self._give_back([idle.pop(0)])
        if self._is_staged:
            region_nbytes = _in_pages(nbytes)
            return self._make(region_nbytes, nbytes, region_nbytes)
        return self._make(nbytes // self.world.world_size, nbytes)

    def _has_room(self, nbytes: int) -> bool:
        """Whether another one keeps all ranks together within what FSDP2 would have had."""
        held = sum(buffer.span.layout.span_nbytes for buffer in self.buffers)
        size = self.world.world_size
        added = _in_pages(nbytes) * size if self._is_staged else nbytes
        return held + added <= self._allowed_nbytes * size


class ReduceBuffers(_Buffers):
    """Inputs of reduce-scatters: a region of every rank, in which the peers read their slices."""

    def take(self, nbytes: int) -> Buffer:
        """A buffer whose regions have room for an input, ready to be written. Collective.

        Raises:
            As ``GatherBuffers.take``.
        """
        self._num_requests += 1
        idle = self._idle()
        fitting = [buffer for buffer in idle if buffer.capacity >= nbytes]
        if fitting:
            return self._hand_out(min(fitting, key=lambda b: (not b.is_free, b.used_at)), nbytes)
        self._give_back(idle)
        capacity = _in_pages(nbytes)
        return self._hand_out(self._make(capacity, capacity, capacity), nbytes)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
