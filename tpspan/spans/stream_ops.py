"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``).

A barrier outside a graph counts: each rank writes the barrier's number into a word of its own, and
waits until the words of all others say as much. A write costs a stream more than a wait for what is
there already, and going on to the stream of the next rank more than either: this way each stream is
gone to once. Posts are counted likewise. A rank whose deadline lets its stream go on lets others go
on as well, and they are told.

In a graph the values are frozen, and it may be replayed any number of times; there a barrier uses
flags, which are 0 or 1. The sender waits until the receiver's flag is 0, then sets it; the receiver
waits until it is 1, then clears it. Both are in step, whatever was replayed or launched in between.
A barrier is captured on all ranks or on none; a post is not captured.

A wait of this kind has no deadline of its own: a thread watches every stream (``stream_watch``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy
import torch
from cuda.bindings import driver as cu

from tpspan.kernels.board import COUNT_MASK
from tpspan.memory.closing import close_each
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.stream_watch import StreamWatch
from tpspan.spans.stream_words import FREE, SET, StreamWords

# An operation as the driver wants it, six words: kind, address, value, flags, and an alias.
_WAIT = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32.value
_WRITE = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32.value
_EQUAL = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
_AT_LEAST = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value  # cyclic, as has_arrived

_Operation = tuple[int, int, int, int]  # kind, address, value, flags


class StreamOps:
    """``SignalOps`` by stream memory operations, with a watch for deadlines.

    Args:
        words: what streams write and wait for.
        driver: of the GPU.
        watch: of these words; closed with this, as they are.
    """

    def __init__(self, words: StreamWords, driver: CudaDriver, watch: StreamWatch) -> None:
        self._driver = driver
        self._words = words
        self._watch = watch
        self._index = driver.device.index
        # The binding converts every operation at every call; here they are kept as the driver
        # wants them.
        library = ctypes.CDLL("libcuda.so.1")
        self._batch_mem_op = library.cuStreamBatchMemOp_v2
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._batch_mem_op.argtypes = (pointer, number, pointer, number)
        self._batches: dict[tuple[int, int, str], _Batch] = {}

    def barrier(self, slot: int, stream: int, capturing: bool | None = None) -> None:
        if self._words.world_size == 1:
            return
        if capturing is None:
            capturing = self._driver.is_capturing(stream)
        if capturing:
            batch = self._batches.get((slot, -1, "captured barrier"))
            if batch is None:
                batch = self._keep((slot, -1, "captured barrier"), self._captured_barrier(slot))
                self._watch.captured.add(slot)
            self._submit(stream, batch)
            return
        batch = self._batches.get((slot, -1, "barrier"))
        if batch is None:
            batch = self._keep((slot, -1, "barrier"), self._barrier(slot))
        self._put(stream, batch, self._watch.note_barrier, slot)

    def post(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "post"))
        if batch is None:
            place = self._words.posted(slot, peer, self._words.rank)
            batch = self._keep((slot, peer, "post"), [(_WRITE, place, 0, 0)])
        self._put(stream, batch, self._watch.note_post)

    def wait(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "wait"))
        if batch is None:
            place = self._words.posted(slot, self._words.rank, peer)
            batch = self._keep((slot, peer, "wait"), [(_WAIT, place, 0, _AT_LEAST)])
        self._put(stream, batch, self._watch.note_wait, slot, peer)

    def missing(self) -> tuple[int, ...]:
        return () if self._words.is_well() else tuple(sorted(self._words.told()[0]))

    def close(self) -> None:
        """Wait for what still waits, then stop the watch.

        Raises:
            PeerError: a stream is held by something else.
        """
        close_each([self._watch.close, self._words.close])

    def _barrier(self, slot: int) -> list[_Operation]:
        words = self._words
        coming = (_WRITE, words.arrived(slot, words.rank), 0, 0)
        return [coming] + [(_WAIT, words.arrived(slot, p), 0, _AT_LEAST) for p in words.peers]

    def _captured_barrier(self, slot: int) -> list[_Operation]:
        flag, rank, peers = self._words.flag, self._words.rank, self._words.peers
        setting = [
            operation
            for place in (flag(slot, peer, rank) for peer in peers)
            for operation in ((_WAIT, place, FREE, _EQUAL), (_WRITE, place, SET, 0))
        ]
        # No flag is cleared before all are set: a flag that is not shows who is missing.
        own = [flag(slot, rank, peer) for peer in peers]
        waiting = [(_WAIT, place, SET, _EQUAL) for place in own]
        return setting + waiting + [(_WRITE, place, FREE, 0) for place in own]

    def _keep(self, key: tuple[int, int, str], operations: list[_Operation]) -> _Batch:
        return self._batches.setdefault(key, _Batch(operations))

    def _put(self, stream: int, batch: _Batch, note: Callable[..., None], *key: int) -> None:
        """Put the operations on the stream when it has room, and note them with their number."""
        queue = self._watch.queue(stream)
        with queue.order:
            self._watch.make_room(queue)
            with batch.order:
                note(queue, *key, self._submit_next(stream, batch))

    def _submit_next(self, stream: int, batch: _Batch) -> int:
        """Put the operations on the stream with their next number, and return it."""
        number = (batch.number + 1) & COUNT_MASK
        batch.set_values(number)
        self._submit(stream, batch)
        batch.number = number
        return number

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
        number: what they carried when they were last put on a stream, if they count.
        order: held while they get a number and are put on a stream.
    """

    def __init__(self, operations: list[_Operation]) -> None:
        self.num = len(operations)
        self.number = 0
        self.order = threading.Lock()
        rows = [(*operation, 0, 0) for operation in operations]
        self._words = numpy.array(rows, numpy.uint64)
        self._values = self._words[:, 2]
        self.address = self._words.ctypes.data

    def set_values(self, value: int) -> None:
        """Let all operations write, or wait for, this value."""
        self._values.fill(value)
