"""The collectives of ranks on one host, over staging memory that all of them map.

Staging. Each rank brings one region of a span, cut into two halves. A call is a row of steps; in
step k a rank writes into half k % 2 of its own region, meets all others (``Steps.step``), and then
reads theirs; a two-shot reduction meets a second time within a step. A large call is many steps
over pieces that stay in the cache: a piece is read by the peers while it is still warm, and the
memory does not grow with the call.

Why no byte is overwritten while it is read (invariant 6): a rank writes half k % 2 again in step
k + 2. Before that it has passed the meeting of step k + 1. Every peer entered that meeting only
after its reads of step k, since a rank does one thing after the other. So one meeting a step is
enough, whatever calls the steps belong to.

Who reads in which order: the right neighbour first, then on around, so that ranks do not read
from the same owner at the same time. The own piece goes directly from input to output, while
waiting for the others.

Reductions. One-shot, for small ones: each rank stages all of its vector, and each adds up all
vectors, in the order of the ranks. Two-shot: each rank adds up its slice of all vectors, stages the
result where nobody reads its input, and pulls the others' results. In both, every element is added
in the order of the ranks by somebody who rounds once, so all ranks get the same bits.

Failure: requests are compared in the first step of a call, before anybody reads; see ``Steps``.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpspan.distributed import counts
from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Operation, Reduction, words
from tpspan.distributed.steps import Steps
from tpspan.distributed.work import HostWork, Worker
from tpspan.kernels.host_exchange import host_pull
from tpspan.kernels.host_reduce import HOST_SUM_DTYPES, host_sum
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans.board import Board
from tpspan.spans.layout import Layout
from tpspan.spans.span import Span

REGION_NBYTES = PAGE_NBYTES
HALF_NBYTES = REGION_NBYTES // 2
# What a rank stages in a step: it stays in the second cache of a core. Ranks that share cores pay
# more for each meeting, and take twice as much.
_STEP_NBYTES = HALF_NBYTES // 2
# Below this each rank's extra reads cost less than a second meeting.
ONE_SHOT_NBYTES = 32 << 10
# An output of this size would drive all else out of the caches.
LARGE_NBYTES = 8 << 20
_LINE = 64

Reducer = Callable[[int, list[int], int], None]
_FAST = {getattr(torch, name): name for name in HOST_SUM_DTYPES}
_NO_WORDS = words(Operation.REFUSED)


class HostGroup:
    """The collectives of one world on the host backend; tensors are contiguous and checked.

    Every method is collective, and returns when this rank's output is complete.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.world_size = world.world_size
        self._steps = Steps(world)
        self._worker = Worker()
        self._lock = threading.RLock()
        layout = Layout.blocked([REGION_NBYTES] * world.world_size, page_nbytes=PAGE_NBYTES)
        self._span = Span.allocate_bytes(world, layout)
        self._base = self._span.base_address
        self._own = self._base + world.rank * REGION_NBYTES
        self._sources = (ctypes.c_int64 * world.world_size)()
        self._sources_address = ctypes.addressof(self._sources)
        shares_cores = world.world_size > Board.of(world).num_cores
        self._step_nbytes = HALF_NBYTES if shares_cores else _STEP_NBYTES
        self._slices = self._step_nbytes // world.world_size // _LINE * _LINE

    def run(
        self,
        call: Callable[[], object],
        outputs: list[torch.Tensor],
        async_op: bool,
        *used: torch.Tensor,
    ) -> HostWork | None:
        """Carry a call out after all those before it: here and now, or in the group's thread."""
        with self._lock:
            if async_op:
                return self._worker.submit(outputs, call)
            self._worker.drain()
            call()
        return None

    def refuse(self) -> None:
        """Let the other ranks' call fail as well: this rank's arguments are wrong."""
        self._steps.ask(_NO_WORDS)
        self._steps.step()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._steps.ask(words(Operation.BARRIER))
        self._steps.step()
        counts.count("barrier: host")

    def all_gather_object(self, value: object) -> list[Any]:
        """Every rank's object, by rank."""
        self._steps.ask(words(Operation.ALL_GATHER_OBJECT))
        self._steps.step()
        counts.count("all_gather_object: host")
        return Board.of(self.world).all_gather(value)

    def all_gather_in_place(self, output: torch.Tensor, offset_bytes: int) -> None:
        """Every rank's input lies in the span that the output is a view of: only meet."""
        nbytes = output.numel() * output.element_size()
        operation = Operation.ALL_GATHER_IN_PLACE
        self._steps.ask(words(operation, output.dtype, nbytes, digest=offset_bytes))
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
            offset = self._next_half()
            # Nothing is done before the first step has compared what the ranks ask for.
            keep_at = keep + at if at and keep else 0
            self._steps.step(self._own + offset, source + at, part, 0, 0, keep_at, is_large)
            if not at and keep:
                ctypes.memmove(keep, source, part)
            if part:
                staged = self._base + offset
                self._pull(target + at, nbytes, staged, REGION_NBYTES, part, part * size, is_large)
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
            offset = self._next_half()
            self._steps.step(self._own + offset, source + at, part, 0, 0, at and keep and keep + at)
            if not at and keep:
                ctypes.memmove(keep, source, part)
            for peer in order:
                size = min(sizes[peer] - at, self._step_nbytes)
                if size > 0:
                    staged = self._base + peer * REGION_NBYTES + offset
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
            offset = self._next_half()
            self._steps.step(self._own + offset, address + at, part if is_root else 0)
            if not is_root and part:
                staged = self._base + root * REGION_NBYTES + offset
                ctypes.memmove(address + at, staged, part)
        counts.count("broadcast: staged")

    def reduce_scatter(
        self, output: torch.Tensor, whole: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce the ranks' inputs and give each rank its part of the result."""
        itemsize = output.element_size()
        nbytes = output.numel() * itemsize
        request = words(Operation.REDUCE_SCATTER, output.dtype, nbytes, reduction=int(reduction))
        self._steps.ask(request)
        reducer = self._reducer(output.dtype, reduction)
        rank, size, slot = self.rank, self.world_size, self._slices
        source, target = whole.data_ptr(), output.data_ptr()
        for at in range(0, max(nbytes, 1), slot):
            part = min(nbytes - at, slot)
            offset = self._next_half()
            if part:
                self._pull(self._own + offset, slot, source + at, nbytes, part, part * size)
            self._steps.step()
            if part:
                staged = self._base + offset + rank * slot
                sources = [staged + peer * REGION_NBYTES for peer in range(size)]
                sources[rank] = source + rank * nbytes + at
                reducer(target + at, sources, part // itemsize)
        counts.count("reduce_scatter: staged")

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce the ranks' tensors, in place and on every rank."""
        itemsize = tensor.element_size()
        nbytes = tensor.numel() * itemsize
        self._steps.ask(words(Operation.ALL_REDUCE, tensor.dtype, nbytes, reduction=int(reduction)))
        reducer = self._reducer(tensor.dtype, reduction)
        if nbytes <= ONE_SHOT_NBYTES:
            self._one_shot(tensor.data_ptr(), nbytes, itemsize, reducer)
            counts.count("all_reduce: one-shot")
            return
        for at in range(0, nbytes, self._step_nbytes):
            part = min(nbytes - at, self._step_nbytes)
            self._two_shot(tensor.data_ptr() + at, part, itemsize, reducer)
        counts.count("all_reduce: two-shot")

    def close(self) -> None:
        """Unmap; waits for no other rank."""
        self._worker.close()
        with contextlib.suppress(Exception):
            self._span.close(force=True)
        self._steps.close()

    def _one_shot(self, address: int, nbytes: int, itemsize: int, reducer: Reducer) -> None:
        offset = self._next_half()
        self._steps.step(self._own + offset, address, nbytes)
        if nbytes:
            staged = self._base + offset
            sources = [staged + peer * REGION_NBYTES for peer in range(self.world_size)]
            sources[self.rank] = address
            reducer(address, sources, nbytes // itemsize)

    def _two_shot(self, address: int, nbytes: int, itemsize: int, reducer: Reducer) -> None:
        rank, size = self.rank, self.world_size
        slot = -(-nbytes // size // _LINE) * _LINE  # of every rank but the last ones
        start = min(rank * slot, nbytes)
        own_nbytes = min(nbytes - start, slot)
        end = start + own_nbytes
        offset = self._next_half()
        self._steps.step(self._own + offset, address, start, end, nbytes - end)
        if own_nbytes:
            staged = self._base + offset + start
            sources = [staged + peer * REGION_NBYTES for peer in range(size)]
            sources[rank] = address + start
            reducer(address + start, sources, own_nbytes // itemsize)
            ctypes.memmove(self._own + offset + start, address + start, own_nbytes)
        self._steps.step()
        staged = self._base + offset
        self._pull(address, slot, staged, REGION_NBYTES + slot, slot, nbytes)

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

    def _next_half(self) -> int:
        """Where in a region the next step that stages something writes."""
        return self._steps.next_half() * HALF_NBYTES

    def _reducer(self, dtype: torch.dtype, reduction: Reduction) -> Reducer:
        name = _FAST.get(dtype)
        if name is None or reduction not in (Reduction.SUM, Reduction.AVG):
            return _combining(dtype, reduction)
        divisor = float(self.world_size) if reduction is Reduction.AVG else 1.0
        table, address, size = self._sources, self._sources_address, self.world_size

        def reduce(target: int, sources: list[int], numel: int) -> None:
            table[:] = sources  # type: ignore[assignment]
            host_sum(name, target, address, size, numel, divisor)

        return reduce


def _combining(dtype: torch.dtype, reduction: Reduction) -> Reducer:
    def reduce(target: int, sources: list[int], numel: int) -> None:
        tensors = [_over(address, numel, dtype) for address in (target, *sources)]
        combine(tensors[0], tensors[1:], reduction)

    return reduce


def _over(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
