"""The collectives of ranks on GPUs, in the order of a stream; the host goes on at once.

Where bytes are staged and why nothing is overwritten too early: see ``Buffers``.

Streams. Calls of a group use its buffers in turn, so a stream waits for the stream of the call
before. ``async_op`` runs on a side stream that first waits for the current one; the work's ``wait``
makes the current stream wait for it.

Who reads in which order: the right neighbour first, then on around. Where every rank has a GPU,
gathers and most sums are one launch (``Fused``), and large calls are made in parts, each staged
while the one before is read (``StagedAhead``); where ranks share one, small calls go through host
memory by copy engines (``Buffers``). Otherwise pieces are pulled by one kernel, or, if they are
large and ranks share a GPU, by the copy engine, and no kernel waits for another rank: how a stream
waits is the affair of ``tpspan.spans.signals``.

Reductions: see ``cuda_reduce``.

Arguments are compared through ``Journal``, without waiting: by then the barrier may be queued
already, so a call that does not fit ends at the deadline on the ranks that came first, and at once
on the rank that finds it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpspan.distributed import counts
from tpspan.distributed.ahead import LARGE_NBYTES, StagedAhead
from tpspan.distributed.buffers import Buffers
from tpspan.distributed.cuda_reduce import at_root, one_shot, reduce_over, two_shot
from tpspan.distributed.fused import Fused
from tpspan.distributed.journal import Journal
from tpspan.distributed.requests import Operation, Reduction, words
from tpspan.distributed.work import StreamWork
from tpspan.errors import CaptureError
from tpspan.kernels.compile import prepare
from tpspan.kernels.stream_reduce import REDUCE_KERNELS, pull
from tpspan.launch.world import World
from tpspan.spans.board import Board
from tpspan.spans.signals import Signals

ONE_SHOT_NBYTES = 256 << 10
# Of all ranks together: from here on two switches of the time slice cost less than the bus.
THROUGH_HOST_NBYTES = 4 << 20
_ENGINE_NBYTES = 4 << 20
_ALIGNMENT = 256
_FEW_RANKS = 2

# What torch.cuda's functions ask, without what they check: a tenth of a µs instead of one.
_C: Any = torch._C


class CudaGroup:
    """The collectives of one world on CUDA; tensors are contiguous and checked.

    Every method is collective and puts its work on the current stream.
    """

    def __init__(self, world: World) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("make one collective call of the group before the first capture")
        self.world = world
        self.rank, self.world_size = world.rank, world.world_size
        self._device = world.device
        self._index = world.device.index
        self._buffers = Buffers(world)
        prepare(self._index, REDUCE_KERNELS)
        self._journal = Journal(world)
        shares_device = Signals.of(world).shares_device
        is_alone = world.world_size == 1
        self._host_buffers = Buffers(world, on_host=True) if shares_device else None
        has_own_gpus = not shares_device and not is_alone
        self._fused = Fused(world) if has_own_gpus else None
        self._ahead = StagedAhead(self._buffers, world.device) if has_own_gpus else None
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        self._last_handle = -1
        self._side: torch.cuda.Stream | None = None
        self._others = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]

    def run(
        self,
        call: Callable[[], object],
        outputs: list[torch.Tensor],
        async_op: bool,
        *used: torch.Tensor,
    ) -> StreamWork | None:
        """Put a call on the current stream, or on the group's side stream behind it."""
        self._journal.check()  # before CUDA is asked, which a forked child must not do
        with self._lock:
            if _C._cuda_getDevice() != self._index:
                with torch.cuda.device(self._index):
                    return self.run(call, outputs, async_op, *used)
            if not async_op:
                self._in_order(call)
                return None
            if self._side is None:
                self._side = torch.cuda.Stream(self._device)
            side = self._side
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._in_order(call)
                event = side.record_event()
            for tensor in (*outputs, *used):
                tensor.record_stream(side)
            return StreamWork(outputs, side, event)

    def refuse(self, operation: Operation) -> None:
        """Let the other ranks' call fail as well: this rank's arguments are wrong."""
        self._journal.note(words(Operation.REFUSED, digest=operation), compare=False)

    def barrier(self) -> None:
        """Hold the stream, and then the host, until all ranks have come."""
        self._journal.note(words(Operation.BARRIER))
        self._buffers.meet(_stream(self._index))
        if not self._buffers.capturing:
            torch.cuda.current_stream().synchronize()
            self._buffers.check()
        counts.count("barrier: stream")

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's bytes, of any lengths, by rank; on the host."""
        self._journal.note(words(Operation.ALL_GATHER_OBJECT))
        counts.count("all_gather_object: host")
        return Board.of(self.world).all_gather_bytes(message)

    def all_gather_in_place(self, request: tuple[int, ...]) -> None:
        """As ``HostGroup.all_gather_in_place``."""
        self._journal.note(request)
        self._buffers.meet(_stream(self._index))
        counts.count("all_gather: in place")

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of one size, one after another."""
        nbytes = piece.nbytes
        self._journal.note(words(Operation.ALL_GATHER, piece.dtype, nbytes))
        stream = _stream(self._index)
        source, target, size = piece.data_ptr(), output.data_ptr(), self.world_size
        ahead = self._ahead_for(nbytes)
        if ahead is not None:
            self._gather_ahead(ahead, target, source, nbytes)
            return
        if self._fused is not None and self._fused.serves_gather(nbytes):
            self._fused.gather(target, source, nbytes, stream)
            counts.count("all_gather: fused")
            return
        own = target + self.rank * nbytes
        buffers = self._buffers_for(nbytes * size)
        is_large = self.world.shares_device and nbytes >= _ENGINE_NBYTES
        by_engine = buffers.on_host or is_large
        buffers.fit(nbytes)
        for at, part in buffers.parts(nbytes):
            first = buffers.stage(source + at, part, stream)
            buffers.meet(stream)
            if by_engine:
                for peer in self._others:
                    staged = buffers.staged(first, peer)
                    buffers.copy(target + peer * nbytes + at, staged, part, stream)
                self._keep_own(buffers, first, own + at, source + at, part, stream)
            else:
                num_pieces = size if own != source else size - 1
                stride = buffers.region_nbytes
                self._pull(target + at, nbytes, first, stride, part, num_pieces, stream)
            buffers.leave(stream)
        way = "through host" if buffers.on_host else "engine" if by_engine else "kernel"
        counts.count(f"all_gather: {way}")

    def all_gather_list(self, outputs: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of any sizes, into tensors of their sizes."""
        sizes = [output.nbytes for output in outputs]
        digest = zlib.crc32(repr(sizes).encode())
        operation = Operation.ALL_GATHER_LIST
        self._journal.note(words(operation, piece.dtype, sum(sizes), digest=digest))
        buffers, stream = self._buffers_for(sum(sizes)), _stream(self._index)
        targets = [output.data_ptr() for output in outputs]
        source, nbytes = piece.data_ptr(), sizes[self.rank]
        buffers.fit(max(sizes))
        for at, longest in buffers.parts(max(sizes)):
            part = max(min(nbytes - at, longest), 0)
            first = buffers.stage(source + at, part, stream)
            buffers.meet(stream)
            for peer in self._others:
                size = max(min(sizes[peer] - at, longest), 0)
                buffers.copy(targets[peer] + at, buffers.staged(first, peer), size, stream)
            self._keep_own(buffers, first, targets[self.rank] + at, source + at, part, stream)
            buffers.leave(stream)
        counts.count("all_gather: list")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Give the root's tensor to all."""
        nbytes = tensor.nbytes
        self._journal.note(words(Operation.BROADCAST, tensor.dtype, nbytes, root=root))
        buffers, stream = self._buffers_for(nbytes * self.world_size), _stream(self._index)
        address, is_root = tensor.data_ptr(), self.rank == root
        buffers.fit(nbytes)
        for at, part in buffers.parts(nbytes):
            first = buffers.stage(address + at, part if is_root else 0, stream)
            buffers.meet(stream)
            if not is_root:
                buffers.copy(address + at, buffers.staged(first, root), part, stream)
            buffers.leave(stream)
        counts.count("broadcast: staged")

    def reduce_scatter(
        self, output: torch.Tensor, whole: torch.Tensor, reduction: Reduction, digest: int = 0
    ) -> None:
        """Reduce the ranks' inputs and give each rank its part of the result.

        Args:
            digest: stands for what else must be the same on all ranks.
        """
        nbytes = output.nbytes
        operation = Operation.REDUCE_SCATTER
        request = words(operation, output.dtype, nbytes, reduction=reduction, digest=digest)
        self._journal.note(request)
        stream = _stream(self._index)
        source, target = whole.data_ptr(), output.data_ptr()
        rank, size = self.rank, self.world_size
        fused = self._fused
        if fused is not None and reduction.is_sum and fused.serves_scatter(nbytes, output.dtype):
            fused.scatter(output, whole, reduction.divisor(size), stream)
            counts.count("reduce_scatter: fused")
            return
        buffers = self._buffers_for(whole.nbytes)
        if buffers.on_host:
            at_root(buffers, whole, target, rank * nbytes, nbytes, reduction, stream)
            counts.count("reduce_scatter: at the root")
            return

        def slot(part: int) -> int:
            """From one rank's piece of a part to the next rank's."""
            return -(-part // _ALIGNMENT) * _ALIGNMENT

        def stage(first: int, at: int, part: int, stream: int) -> None:
            mine = buffers.staged(first, rank)
            self._pull(mine, slot(part), source + at, nbytes, part, size - 1, stream)

        def use(first: int, at: int, part: int, stream: int) -> None:
            own = source + rank * nbytes + at
            numel = part // output.element_size()
            slices, pair = first + rank * slot(part), (output, whole)
            reduce_over(buffers, target + at, 0, slices, own, numel, reduction, stream, pair)

        ahead = self._ahead_for(whole.nbytes)
        if ahead is not None:
            ahead.run(nbytes, stage, use, num_pieces=size)
            counts.count("reduce_scatter: staged ahead")
            return
        buffers.fit(whole.nbytes)
        for at, part in buffers.parts(nbytes, buffers.nbytes // size // _ALIGNMENT * _ALIGNMENT):
            first = buffers.take()
            stage(first, at, part, stream)
            buffers.meet(stream)
            use(first, at, part, stream)
            buffers.leave(stream)
        counts.count("reduce_scatter: staged")

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce the ranks' tensors, in place and on every rank."""
        nbytes = tensor.nbytes
        operation = Operation.ALL_REDUCE
        self._journal.note(words(operation, tensor.dtype, nbytes, reduction=reduction))
        buffers, stream = self._buffers_for(nbytes * self.world_size), _stream(self._index)
        address = tensor.data_ptr()
        fused = self._fused if reduction.is_sum else None
        if fused is not None and fused.serves_sum(nbytes, tensor.dtype):
            fused.sum(tensor, reduction.divisor(self.world_size), stream)
            counts.count("all_reduce: fused")
        elif fused is not None and fused.serves_sum_in_parts(nbytes, tensor.dtype):
            fused.sum_in_parts(tensor, reduction.divisor(self.world_size), stream)
            counts.count("all_reduce: fused in parts")
        elif buffers.on_host:
            at_root(buffers, tensor, address, 0, nbytes, reduction, stream)
            counts.count("all_reduce: at the root")
        elif self._ahead is not None and self.world_size == _FEW_RANKS:
            self._one_shot_of_two(tensor, reduction, stream)
        elif nbytes <= ONE_SHOT_NBYTES:
            one_shot(buffers, tensor, address, nbytes, reduction, stream)
            counts.count("all_reduce: one-shot")
        else:
            buffers.fit(nbytes)
            for at, part in buffers.parts(nbytes):
                two_shot(buffers, tensor, address + at, part, reduction, stream)
            counts.count("all_reduce: two-shot")

    def _ahead_for(self, nbytes: int) -> StagedAhead | None:
        """What stages a call of so many bytes ahead; None if it is not worth that, or captured."""
        return None if nbytes < LARGE_NBYTES or self._buffers.capturing else self._ahead

    def _gather_ahead(self, ahead: StagedAhead, target: int, source: int, nbytes: int) -> None:
        """Gather by copy engine, parts crossing the link one behind the other."""
        buffers, own = self._buffers, target + self.rank * nbytes

        def stage(first: int, at: int, part: int, stream: int) -> None:
            buffers.fill(first, source + at, part, stream)

        def use(first: int, at: int, part: int, stream: int) -> None:
            for peer in self._others:
                staged = buffers.staged(first, peer)
                buffers.copy(target + peer * nbytes + at, staged, part, stream)

        def keep_own(at: int, part: int, stream: int) -> None:
            buffers.copy(own + at, source + at, part, stream)

        ahead.run(nbytes, stage, use, keep_own if own != source else None)
        counts.count("all_gather: staged ahead")

    def _one_shot_of_two(self, tensor: torch.Tensor, reduction: Reduction, stream: int) -> None:
        """Two ranks: each reads all of the other's vector, which is what two shots read as well."""
        buffers, address, nbytes = self._buffers, tensor.data_ptr(), tensor.nbytes

        def stage(first: int, at: int, part: int, stream: int) -> None:
            buffers.fill(first, address + at, part, stream)

        def use(first: int, at: int, part: int, stream: int) -> None:
            here, numel = address + at, part // tensor.element_size()
            reduce_over(buffers, here, 0, first, here, numel, reduction, stream, (tensor,))

        ahead = self._ahead_for(nbytes)
        if ahead is not None:
            ahead.run(nbytes, stage, use)
            counts.count("all_reduce: staged ahead")
            return
        buffers.fit(nbytes)
        for at, part in buffers.parts(nbytes):
            one_shot(buffers, tensor, address + at, part, reduction, stream)
        counts.count("all_reduce: one-shot")

    def close(self) -> None:
        """Unmap; waits for no other rank."""
        self._buffers.close()
        if self._host_buffers is not None:
            self._host_buffers.close()
        if self._fused is not None:
            self._fused.close()
        self._journal.close()

    def _buffers_for(self, nbytes: int) -> Buffers:
        """Where a call is staged that moves so many bytes of all ranks together."""
        if self._host_buffers is not None and nbytes <= THROUGH_HOST_NBYTES:
            return self._host_buffers
        return self._buffers

    def _keep_own(
        self, buffers: Buffers, first: int, target: int, source: int, nbytes: int, stream: int
    ) -> None:
        """Copy this rank's own piece, unless it is there: from the host if that is where it is."""
        if target != source:
            nearest = buffers.staged(first, self.rank) if buffers.on_host else source
            buffers.copy(target, nearest, nbytes, stream)

    def _pull(
        self,
        target: int,
        target_stride: int,
        source: int,
        source_stride: int,
        piece_nbytes: int,
        num_pieces: int,
        stream: int,
    ) -> None:
        """Copy pieces of the ranks by one kernel; none if they are empty."""
        pull(
            target,
            target_stride,
            source,
            source_stride,
            piece_nbytes,
            piece_nbytes * self.world_size,
            self.rank,
            self.world_size,
            num_pieces,
            device=self._index,
            stream=stream,
        )

    def _in_order(self, call: Callable[[], object]) -> None:
        """Behind the group's call before, if that was on another stream; not in a capture."""
        capturing = self._buffers.capturing = _C._cuda_isCurrentStreamCapturing()
        if self._host_buffers is not None:
            self._host_buffers.capturing = capturing
        if not capturing:
            handle = _stream(self._index)
            if self._last_handle != handle:
                current = torch.cuda.current_stream()
                if self._last is not None:
                    current.wait_stream(self._last)
                self._last, self._last_handle = current, handle
        call()


def _stream(index: int) -> int:
    """The current stream's handle: 0.2 µs, where a Stream object takes 6."""
    return int(_C._cuda_getCurrentRawStream(index))
