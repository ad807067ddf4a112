"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``).

A barrier outside a graph counts, and spreads by dissemination (Hensgen, Finkel, Manber, "Two
algorithms for barrier synchronization", 1988): in round k each rank writes the barrier's number to
the rank 2**k further on and waits for that of the rank 2**k before. Each write costs the stream
some 3 µs, so that few of them are better than one to every peer. A rank whose deadline lets its
stream go on lets others go on as well, and they are told.

In a graph the values are frozen, and it may be replayed any number of times; there, and for posts,
a flag is 0 or 1. The sender waits until the receiver's flag is 0, then sets it; the receiver waits
until it is 1, then clears it. Both are in step, whatever was replayed or launched in between. A
barrier is captured on all ranks or on none.

A wait of this kind has no deadline of its own. The words lie in host memory, which streams reach as
fast here, so that a thread can watch every stream: see ``stream_watch``.
"""

from __future__ import annotations

import ctypes

import torch
from cuda.bindings import driver as cu

from tpspan.kernels.board import COUNT_MASK
from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.pages import Pages
from tpspan.spans.stream_watch import StreamWatch
from tpspan.spans.stream_words import FREE, SET, StreamWords

# An operation as the driver wants it, 48 bytes: kind, address, value, flags, and an alias.
_NUM_WORDS = 6
_WAIT = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32.value
_WRITE = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32.value
_EQUAL = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
_AT_LEAST = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value  # cyclic, as has_arrived

_Operation = tuple[int, int, int, int]  # kind, address, value, flags


class StreamOps:
    """``SignalOps`` by stream memory operations, with a watch for deadlines.

    Args:
        pages: hold the words, in host memory that the GPU maps.
        driver: of the GPU.
        world: the ranks, and how long a stream may wait for them.
    """

    def __init__(self, pages: Pages, driver: CudaDriver, world: World) -> None:
        self._driver = driver
        self._words = StreamWords(pages, world)
        self._watch = StreamWatch(self._words, driver, world.timeout_s)
        self._index = driver.device.index
        # The binding converts every operation at every call; here they are kept as the driver
        # wants them.
        library = ctypes.CDLL("libcuda.so.1")
        self._batch_mem_op = library.cuStreamBatchMemOp_v2
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._batch_mem_op.argtypes = (pointer, number, pointer, number)
        self._batches: dict[tuple[int, int, str], _Batch] = {}

    def barrier(self, slot: int, stream: int) -> None:
        if self._words.world_size == 1:
            return
        if self._driver.is_capturing(stream):
            batch = self._batches.get((slot, -1, "captured barrier"))
            if batch is None:
                batch = self._keep((slot, -1, "captured barrier"), self._captured_barrier(slot))
                self._watch.captured.add(slot)
            self._submit(stream, batch)
            return
        batch = self._batches.get((slot, -1, "barrier"))
        if batch is None:
            batch = self._keep((slot, -1, "barrier"), self._barrier(slot))
        epochs = self._watch.epochs
        with self._watch.lock:
            epoch = (epochs.get(slot, 0) + 1) & COUNT_MASK
            batch.set_values(epoch)
            self._submit(stream, batch)
            epochs[slot] = epoch
            self._watch.note(stream)

    def post(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "post"))
        if batch is None:
            batch = self._keep((slot, peer, "post"), self._posting(slot, peer))
        self._submit_noted(stream, batch)

    def wait(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "wait"))
        if batch is None:
            batch = self._keep((slot, peer, "wait"), self._taking(slot, peer))
            self._watch.waits.add((slot, peer))
        self._submit_noted(stream, batch)

    def missing(self) -> tuple[int, ...]:
        return () if self._words.is_well() else tuple(sorted(self._words.told()[0]))

    def close(self) -> None:
        """Wait for what still waits, then stop the watch.

        Raises:
            PeerError: a stream is held by something else.
        """
        self._watch.close()

    def _barrier(self, slot: int) -> list[_Operation]:
        words, rank = self._words, self._words.rank
        operations = []
        for distance in words.distances:
            operations.append((_WRITE, words.counter(slot, rank + distance, rank), 0, 0))
            operations.append((_WAIT, words.counter(slot, rank, rank - distance), 0, _AT_LEAST))
        return operations

    def _captured_barrier(self, slot: int) -> list[_Operation]:
        posting = [op for peer in self._words.peers for op in self._posting(slot, peer)]
        taking = [self._taking(slot, peer) for peer in self._words.peers]
        # No flag is cleared before all are set: a flag that is not shows who is missing.
        return posting + [wait for wait, _ in taking] + [clear for _, clear in taking]

    def _posting(self, slot: int, peer: int) -> list[_Operation]:
        flag = self._words.flag(slot, peer, self._words.rank)
        return [(_WAIT, flag, FREE, _EQUAL), (_WRITE, flag, SET, 0)]

    def _taking(self, slot: int, peer: int) -> list[_Operation]:
        flag = self._words.flag(slot, self._words.rank, peer)
        return [(_WAIT, flag, SET, _EQUAL), (_WRITE, flag, FREE, 0)]

    def _keep(self, key: tuple[int, int, str], operations: list[_Operation]) -> _Batch:
        batch = self._batches[key] = _Batch(operations)
        self._watch.slots.add(key[0])
        return batch

    def _submit_noted(self, stream: int, batch: _Batch) -> None:
        is_captured = self._driver.is_capturing(stream)
        with self._watch.lock:
            self._submit(stream, batch)
            if not is_captured:
                self._watch.note(stream)

    def _submit(self, stream: int, batch: _Batch) -> None:
        # The default stream is that of whatever context is current; other streams have one.
        is_there = stream or torch._C._cuda_getDevice() == self._index  # type: ignore[attr-defined]
        if is_there and not self._batch_mem_op(stream, batch.num, batch.address, 0):
            return
        with self._driver.current():
            code = cu.CUresult(self._batch_mem_op(stream, batch.num, batch.address, 0))
        check("cuStreamBatchMemOp", (code,), num_operations=batch.num)


class _Batch:
    """Operations in the driver's own form, kept for every use.

    Attributes:
        num, address: how many, and where they lie.
    """

    def __init__(self, operations: list[_Operation]) -> None:
        self.num = len(operations)
        self._words = (ctypes.c_uint64 * (_NUM_WORDS * self.num))()
        self.address = ctypes.addressof(self._words)
        for index, (kind, address, value, flags) in enumerate(operations):
            words: list[ctypes.c_uint64 | int] = [kind, address, value, flags, 0, 0]
            self._words[_NUM_WORDS * index : _NUM_WORDS * (index + 1)] = words

    def set_values(self, value: int) -> None:
        """Let all operations write, or wait for, this value."""
        words = self._words
        for at in range(2, _NUM_WORDS * self.num, _NUM_WORDS):
            words[at] = value
