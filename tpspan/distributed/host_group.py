"""The collectives of ranks on one host, over staging memory that all of them map.

Staging. Each rank brings one region of a span, cut into three buffers, used in turn. In a step a
rank writes into the next buffer of its own region, meets all others (``Steps.step``), and then
reads theirs. A large call is many steps over pieces that stay in the cache: a piece is read by the
peers while it is still warm, and the memory does not grow with the call.

Why no byte is overwritten while it is read (invariant 6). What was staged in step k is read before
meeting k + 2 at the latest: a two-shot reduction pulls its results after meeting k + 1, every other
call reads at once. The buffer is written again in step k + 3, after meeting k + 2, and every peer
entered that meeting only after its reads of step k, since a rank does one thing after the other.
So one meeting a step is enough, whatever calls the steps belong to.

Who reads in which order: the right neighbour first, then on around, so that ranks do not read
from the same owner at the same time. The own piece goes directly from input to output, while
waiting for the others.

Reductions. One-shot, for small ones: each rank stages all of its vector, and each adds up all
vectors, in the order of the ranks. Two-shot: each rank adds up its slice of all vectors, stages
the result where nobody reads its input, and pulls the others' results. It stages its next piece
before that, so that one meeting serves the results of one piece and the inputs of the next. In
both, every element is added in the order of the ranks by somebody who rounds once, so all ranks
get the same bits.

Failure: requests are compared in the first step of a call, before anybody reads; see ``Steps``.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Sequence

import torch

from tpspan.distributed import counts
from tpspan.distributed.host_reduce import Reducer, reducer
from tpspan.distributed.requests import Operation, Reduction, words
from tpspan.distributed.steps import NUM_BUFFERS, Steps
from tpspan.distributed.work import HostWork, Worker
from tpspan.kernels.host_exchange import host_pull
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans.board import Board
from tpspan.spans.layout import Layout
from tpspan.spans.span import Span

# What a rank stages in a step: it stays in the second cache of a core. Ranks that share cores pay
# more for each meeting, and take twice as much.
_STEP_NBYTES = 512 << 10
# Below this each rank's extra reads cost less than a second meeting.
ONE_SHOT_NBYTES = 32 << 10
# An output of this size would drive all else out of the caches.
LARGE_NBYTES = 8 << 20
_LINE = 64


class HostGroup:
    """The collectives of one world on the host backend; tensors are contiguous and checked.

    Every method is collective, and returns when this rank's output is complete.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.world_size = world.world_size
        self._steps = Steps(world)
        self._worker = Worker(world.rank, world.timeout_s)
        self._lock = threading.RLock()
        shares_cores = world.world_size > Board.of(world).num_cores
        self._step_nbytes = 2 * _STEP_NBYTES if shares_cores else _STEP_NBYTES
        needed = NUM_BUFFERS * self._step_nbytes
        self._region_nbytes = -(-needed // PAGE_NBYTES) * PAGE_NBYTES
        sizes = [self._region_nbytes] * world.world_size
        layout = Layout.blocked(sizes, page_nbytes=PAGE_NBYTES)
        self._span = Span.allocate_bytes(world, layout)
        self._base = self._span.base_address
        self._own = self._base + world.rank * self._region_nbytes
        self._slices = self._step_nbytes // world.world_size // _LINE * _LINE

    def run(
        self,
        call: Callable[[], object],
        outputs: list[torch.Tensor],
        async_op: bool,
        *used: torch.Tensor,
    ) -> HostWork | None:
        """Carry a call out after all those before it: here and now, or in the group's thread.

        A callback of a future that runs in that thread has it to itself: its calls are carried out
        at once, before those that wait.
        """
        self._steps.check()
        if self._worker.is_this_thread():
            return self._worker.at_once(outputs, call, async_op)
        with self._lock:
            if async_op:
                return self._worker.submit(outputs, call)
            self._worker.drain()
            call()
        return None

    def refuse(self, operation: Operation) -> None:
        """Let the other ranks' call fail as well: this rank's arguments are wrong."""
        self._steps.ask(words(Operation.REFUSED, digest=operation))
        self._steps.step()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._steps.ask(words(Operation.BARRIER))
        self._steps.step()
        counts.count("barrier: host")

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's bytes, of any lengths, by rank."""
        self._steps.ask(words(Operation.ALL_GATHER_OBJECT))
        self._steps.step()
        counts.count("all_gather_object: host")
        return Board.of(self.world).all_gather_bytes(message)

    def all_gather_in_place(self, request: tuple[int, ...]) -> None:
        """Every rank's input lies in the span that the output is a view of: only meet.

        Args:
            request: words of what is asked for, which are the same at every such call.
        """
        self._steps.ask(request)
        self._steps.step()
        counts.count("all_gather: in place")

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of one size, one after another."""
        nbytes = piece.numel() * piece.element_size()
        source, target = piece.data_ptr(), output.data_ptr()
        self._steps.ask(words(Operation.ALL_GATHER, piece.dtype, nbytes))
        rank, size = self.rank, self.world_size
        own_target = target + rank * nbytes
        keep = own_target if own_target != source else 0
        is_large = nbytes * size >= LARGE_NBYTES
        at = 0
        while True:
            part = min(nbytes - at, self._step_nbytes)
            offset = self._next_buffer()
            # Nothing is done before the first step has compared what the ranks ask for.
            keep_at = keep + at if at and keep else 0
            self._steps.step(self._own + offset, source + at, part, 0, 0, keep_at, is_large)
            if not at and keep:
                ctypes.memmove(keep, source, part)
            if part:
                staged = self._base + offset
                self._pull(
                    target + at, nbytes, staged, self._region_nbytes, part, part * size, is_large
                )
            at += part
            if at >= nbytes:
                break
        counts.count("all_gather: staged")

    def all_gather_list(self, outputs: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of any sizes, into tensors of their sizes."""
        sizes = [output.numel() * output.element_size() for output in outputs]
        digest = zlib.crc32(repr(sizes).encode())
        request = words(Operation.ALL_GATHER_LIST, piece.dtype, sum(sizes), digest=digest)
        self._steps.ask(request)
        targets = [output.data_ptr() for output in outputs]
        source, nbytes = piece.data_ptr(), sizes[self.rank]
        keep = targets[self.rank] if targets[self.rank] != source else 0
        order = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        for at in range(0, max(*sizes, 1), self._step_nbytes):
            part = max(min(nbytes - at, self._step_nbytes), 0)
            offset = self._next_buffer()
            self._steps.step(self._own + offset, source + at, part, 0, 0, at and keep and keep + at)
            if not at and keep:
                ctypes.memmove(keep, source, part)
            for peer in order:
                size = min(sizes[peer] - at, self._step_nbytes)
                if size > 0:
                    staged = self._base + peer * self._region_nbytes + offset
                    ctypes.memmove(targets[peer] + at, staged, size)
        counts.count("all_gather: list")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Give the root's tensor to all."""
        nbytes = tensor.numel() * tensor.element_size()
        self._steps.ask(words(Operation.BROADCAST, tensor.dtype, nbytes, root=root))
        address = tensor.data_ptr()
        is_root = self.rank == root
        for at in range(0, max(nbytes, 1), self._step_nbytes):
            part = min(nbytes - at, self._step_nbytes)
            offset = self._next_buffer()
            self._steps.step(self._own + offset, address + at, part if is_root else 0)
            if not is_root and part:
                staged = self._base + root * self._region_nbytes + offset
                ctypes.memmove(address + at, staged, part)
        counts.count("broadcast: staged")

    def reduce_scatter(
        self, output: torch.Tensor, whole: torch.Tensor, reduction: Reduction, digest: int = 0
    ) -> None:
        """Reduce the ranks' inputs and give each rank its part of the result.

        Args:
            digest: stands for what else must be the same on all ranks.
        """
        itemsize = output.element_size()
        nbytes = output.numel() * itemsize
        operation = Operation.REDUCE_SCATTER
        request = words(operation, output.dtype, nbytes, reduction=reduction, digest=digest)
        self._steps.ask(request)
        reduce = reducer(output.dtype, reduction, self.world_size)
        rank, size, slot = self.rank, self.world_size, self._slices
        source, target = whole.data_ptr(), output.data_ptr()
        for at in range(0, max(nbytes, 1), slot):
            part = min(nbytes - at, slot)
            offset = self._next_buffer()
            if part:
                self._pull(self._own + offset, slot, source + at, nbytes, part, part * size)
            self._steps.step()
            if part:
                staged = self._base + offset + rank * slot
                sources = [staged + peer * self._region_nbytes for peer in range(size)]
                sources[rank] = source + rank * nbytes + at
                reduce(target + at, sources, part // itemsize, 0)
        counts.count("reduce_scatter: staged")

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce the ranks' tensors, in place and on every rank."""
        itemsize = tensor.element_size()
        nbytes = tensor.numel() * itemsize
        self._steps.ask(words(Operation.ALL_REDUCE, tensor.dtype, nbytes, reduction=reduction))
        reduce = reducer(tensor.dtype, reduction, self.world_size)
        if nbytes <= ONE_SHOT_NBYTES:
            self._one_shot(tensor.data_ptr(), nbytes, itemsize, reduce)
            counts.count("all_reduce: one-shot")
            return
        self._two_shot(tensor.data_ptr(), nbytes, itemsize, reduce)
        counts.count("all_reduce: two-shot")

    def close(self) -> None:
        """Unmap; waits for no other rank."""
        self._worker.close()
        with contextlib.suppress(Exception):
            self._span.close(force=True)
        self._steps.close()

    def _one_shot(self, address: int, nbytes: int, itemsize: int, reduce: Reducer) -> None:
        offset = self._next_buffer()
        self._steps.step(self._own + offset, address, nbytes)
        if nbytes:
            staged = self._base + offset
            sources = [staged + peer * self._region_nbytes for peer in range(self.world_size)]
            sources[self.rank] = address
            reduce(address, sources, nbytes // itemsize, 0)

    def _two_shot(self, address: int, nbytes: int, itemsize: int, reduce: Reducer) -> None:
        rank, size = self.rank, self.world_size
        parts = [
            (address + at, min(nbytes - at, self._step_nbytes))
            for at in range(0, nbytes, self._step_nbytes)
        ]
        offset = self._stage_for_others(*parts[0])
        for number, (begin, part) in enumerate(parts, start=1):
            slot, start, end = self._slice(part)
            if start < end:
                staged = self._base + offset + start
                sources = [staged + peer * self._region_nbytes for peer in range(size)]
                sources[rank] = begin + start
                result = self._own + offset + start  # where no peer reads this rank's input
                reduce(begin + start, sources, (end - start) // itemsize, result)
            following = 0
            if number < len(parts):
                following = self._stage_for_others(*parts[number])
            else:
                self._steps.step()
            self._pull(begin, slot, self._base + offset, self._region_nbytes + slot, slot, part)
            offset = following

    def _stage_for_others(self, address: int, nbytes: int) -> int:
        """Stage all but this rank's slice of a piece and meet; return the buffer's offset."""
        _, start, end = self._slice(nbytes)
        offset = self._next_buffer()
        self._steps.step(self._own + offset, address, start, end, nbytes - end)
        return offset

    def _slice(self, nbytes: int) -> tuple[int, int, int]:
        """How long a slice of a piece is, and where this rank's begins and ends."""
        slot = -(-nbytes // self.world_size // _LINE) * _LINE
        start = min(self.rank * slot, nbytes)
        return slot, start, min(start + slot, nbytes)

    def _pull(
        self,
        target: int,
        target_stride: int,
        source: int,
        source_stride: int,
        piece_nbytes: int,
        nbytes: int,
        past_caches: bool = False,
    ) -> None:
        """Copy a piece of every other rank, the right neighbour's first: see ``host_pull``."""
        host_pull(
            target,
            target_stride,
            source,
            source_stride,
            piece_nbytes,
            nbytes,
            self.rank,
            self.world_size,
            past_caches,
        )

    def _next_buffer(self) -> int:
        """Where in a region the next step that stages something writes."""
        return self._steps.next_buffer() * self._step_nbytes
