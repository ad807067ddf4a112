"""What the FSDP2 modules of one world share: their buffers, and the sums over them."""

from __future__ import annotations

from typing import Any

import torch

from tpspan.distributed import counts
from tpspan.distributed.cuda_reduce import sum_on_device
from tpspan.distributed.fsdp_buffers import GatherBuffers, ReduceBuffers
from tpspan.distributed.groups import resolve
from tpspan.distributed.host_reduce import reducer
from tpspan.distributed.journal import Journal
from tpspan.distributed.lines import Buffer, CudaLine, HostLine, Line
from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Operation, Reduction, words
from tpspan.distributed.work import HostWork, StreamWork
from tpspan.kernels.compile import prepare
from tpspan.kernels.stream_reduce import REDUCE_KERNELS
from tpspan.launch.world import World
from tpspan.spans.reads import Read
from tpspan.spans.signals import Signals


class FsdpMemory:
    """Buffers for gathers and for reductions, and the lines on which they happen.

    Made by ``FsdpMemory.among``, collectively. On CUDA gathers and reductions have lines of their
    own, since FSDP2 runs them on streams of their own.

    Args:
        is_staged: gathers bring the other ranks' parts into this rank's memory.

    Attributes:
        gathers, reduces: the buffers.
        num_users: handles that have not been closed.
    """

    def __init__(self, world: World, *, is_staged: bool) -> None:
        self.world = world
        self.num_users = 0
        self._is_staged = is_staged
        self._journal: Journal | None = None
        self._side: torch.cuda.Stream | None = None
        guard: Line
        self._gathering: Line
        self._reducing: Line
        if world.backend == "host":
            guard = self._gathering = self._reducing = HostLine(world)
        else:
            prepare(world.device.index, REDUCE_KERNELS)
            journal = self._journal = Journal(world)
            gathered: list[Buffer] = []
            self._gathering = CudaLine(world, journal, gathered)
            guard = CudaLine(world, journal, gathered)
            self._reducing = CudaLine(world, journal, [])
        self.gathers = GatherBuffers(world, self._gathering, guard, is_staged=is_staged)
        reduce_guard = guard if world.backend == "host" else self._reducing
        self.reduces = ReduceBuffers(world, self._reducing, reduce_guard)

    @staticmethod
    def among(group: Any, device: torch.device, read: Read = "auto") -> FsdpMemory | None:
        """The memory of a world's or a group's ranks, made at its first use. Collective then.

        None if there is one rank only, or if not all of them are in one domain.

        Args:
            read: ``"auto"`` is staged where every rank has a GPU of its own.
        """
        found = resolve(group)
        world = None if found is None or found.size == 1 else found.span_world(device)
        if world is None:
            return None
        if read == "auto":
            is_near = world.backend == "host" or Signals.of(world).shares_device
            read = "in_place" if is_near else "staged"
        is_staged = read == "staged"
        return world.resource(f"fsdp {read}", lambda made: FsdpMemory(made, is_staged=is_staged))

    def serves(self, numel: int, device: torch.device) -> bool:
        """Whether a buffer of this size can be one of the world's; the same on all ranks."""
        is_here = device.type == self.world.device.type
        return is_here and numel > 0 and numel % self.world.world_size == 0

    def whole(self, buffer: Buffer, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The gathered tensor in a buffer, (numel,)."""
        return buffer.tensor(numel, dtype, self.world.rank * buffer.region_nbytes)

    def gather(self, buffer: Buffer, output: torch.Tensor, async_op: bool) -> Any:
        """The all-gather of what every rank has copied into its part. Collective.

        A meeting; staged, copies from the peers behind it.

        Returns:
            A work if ``async_op``; on the host it is complete.
        """
        nbytes = output.numel() * output.element_size()
        request = words(Operation.ALL_GATHER_IN_PLACE, output.dtype, nbytes, buffer=buffer.number)
        counts.count("all_gather: staged" if self._is_staged else "all_gather: in place")
        if not async_op or self.world.backend == "host":
            self._gathering.meet(request)
            self._bring(buffer, nbytes)
            return HostWork([], is_done=True) if async_op else None
        if self._side is None:
            self._side = torch.cuda.Stream(self.world.device)
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._side):
            self._gathering.meet(request)
            self._bring(buffer, nbytes)
            return StreamWork([], self._side, self._side.record_event())

    def reduce_scatter(self, buffer: Buffer, output: torch.Tensor, reduction: Reduction) -> None:
        """Reduce the slices of this rank in every rank's region into the output. Collective."""
        nbytes = output.numel() * output.element_size()
        request = words(
            Operation.REDUCE_SCATTER_IN_PLACE,
            output.dtype,
            nbytes,
            reduction=reduction,
            buffer=buffer.number,
        )
        counts.count("reduce_scatter: in place")
        self._reducing.meet(request)
        if self.world.backend == "host":
            self._on_host(buffer, output, reduction)
            return
        self._on_device(buffer, output, reduction)
        # The host has nothing to wait for here, and the next input is copied in on another stream,
        # which waits for this one: behind this meeting the peers have read this one.
        self._reducing.meet(words(Operation.BARRIER))
        buffer.is_free = True

    def refuse_if_in_use(self) -> None:
        """Say so if FSDP2 still holds a buffer.

        Raises:
            InUseError: it does.
        """
        for pool in (self.gathers, self.reduces):
            pool.refuse_if_in_use()

    def close_buffers(self) -> None:
        """Give all buffers back; they are made anew when asked for. Collective."""
        for pool in (self.gathers, self.reduces):
            pool.close()

    def close(self) -> None:
        """Unmap; waits for no other rank. The world calls it."""
        if self.world.backend == "cuda":
            torch.cuda.synchronize(self.world.device)
        for pool in (self.gathers, self.reduces):
            pool.forget()
        self._gathering.close()
        if self._journal is not None:
            self._journal.close()

    def _bring(self, buffer: Buffer, nbytes: int) -> None:
        """Copy the other ranks' parts from their regions into this rank's, if there are any."""
        if not self._is_staged:
            return
        world, region_nbytes, base = self.world, buffer.region_nbytes, buffer.span.base_address
        rank, size, part = world.rank, world.world_size, nbytes // world.world_size
        stream = 0
        if world.backend == "cuda":
            stream = torch.cuda.current_stream(world.device).cuda_stream
        for distance in range(1, size):  # each begins with its right neighbour
            peer = (rank + distance) % size
            source, target = (base + owner * region_nbytes + peer * part for owner in (peer, rank))
            world.driver.copy(target, source, part, stream)

    def _on_host(self, buffer: Buffer, output: torch.Tensor, reduction: Reduction) -> None:
        size, numel = self.world.world_size, output.numel()
        first = buffer.span.base_address + self.world.rank * numel * output.element_size()
        sources = [first + peer * buffer.region_nbytes for peer in range(size)]
        reducer(output.dtype, reduction, size)(output.data_ptr(), sources, numel, 0)

    def _on_device(self, buffer: Buffer, output: torch.Tensor, reduction: Reduction) -> None:
        rank, size, numel = self.world.rank, self.world.world_size, output.numel()
        offset = rank * numel * output.element_size()
        first = buffer.span.base_address + offset
        own = first + rank * buffer.region_nbytes
        places = (output.data_ptr(), 0, first, buffer.region_nbytes, own)
        index = self.world.device.index
        stream = torch.cuda.current_stream(index).cuda_stream
        if sum_on_device(output.dtype, places, numel, rank, size, reduction, index, stream):
            return
        sources = [
            buffer.tensor(numel, output.dtype, offset + peer * buffer.region_nbytes)
            for peer in range(size)
        ]
        combine(output, sources, reduction)
