"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``).

A barrier outside a graph counts, and spreads by dissemination (Hensgen, Finkel, Manber, "Two
algorithms for barrier synchronization", 1988): in round k each rank writes the barrier's number to
the rank 2**k further on and waits for that of the rank 2**k before. Each write costs the stream
some 3 µs, so that few of them are better than one to every peer.

In a graph the values are frozen, and it may be replayed any number of times; there, and for posts,
a flag is 0 or 1. The sender waits until the receiver's flag is 0, then sets it; the receiver waits
until it is 1, then clears it. Both are in step, whatever was replayed or launched in between. A
barrier is captured on all ranks or on none.

A wait of this kind has no deadline of its own. The words lie in host memory, which streams reach as
fast here, so that a thread can watch every stream. When one has not come any further for the time
allowed, and one of the words is waited for, the thread moves the words itself: the stream goes on,
and the ranks that were missing are remembered. Words that were moved say nothing true any more, so
a rank first writes whom it missed where the others, whose deadlines come later, will read it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import Any

import torch
from cuda.bindings import driver as cu

from tpspan.errors import PeerError
from tpspan.kernels.board import COUNT_MASK
from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.pages import Pages

_LOOK_S = 0.1
_MARK_S = 0.5
_PATIENCE_S = 10.0
_FREE, _SET = 0, 1
_COUNT_AT = 8  # the counter stands beside the flag of the same pair of ranks

# An operation as the driver wants it, 48 bytes: kind, address, value, flags, and an alias.
_NUM_WORDS = 6
_WAIT = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32.value
_WRITE = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32.value
_EQUAL = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
_AT_LEAST = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value  # cyclic, as has_arrived


class StreamOps:
    """``SignalOps`` by stream memory operations, with a watch for deadlines.

    Args:
        pages: hold the flags, in host memory that the GPU maps.
        driver: of the GPU.
        world: the ranks, and how long a stream may wait for them.
    """

    def __init__(self, pages: Pages, driver: CudaDriver, world: World) -> None:
        self._pages = pages
        self._driver = driver
        self._rank, self._world_size = world.rank, world.world_size
        self._peers = [(world.rank + k) % world.world_size for k in range(1, world.world_size)]
        self._distances = [1 << k for k in range((world.world_size - 1).bit_length())]
        self._timeout_s = world.timeout_s
        self._index = driver.device.index
        # The binding converts every operation at every call; here they are kept as the driver
        # wants them.
        library = ctypes.CDLL("libcuda.so.1")
        self._batch_mem_op = library.cuStreamBatchMemOp_v2
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._batch_mem_op.argtypes = (pointer, number, pointer, number)
        self._batches: dict[tuple[int, int, str], _Batch] = {}
        self._epochs: dict[int, int] = {}
        self._queues: dict[int, _Queue] = {}
        self._waits: set[tuple[int, int]] = set()
        self._missing: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        ctypes.memset(pages.address_of(self._rank), 0, pages.page_nbytes)

    def barrier(self, slot: int, stream: int) -> None:
        if self._world_size == 1:
            return
        is_captured = self._driver.is_capturing(stream)
        key = (slot, -1, "captured barrier" if is_captured else "barrier")
        batch = self._batches.get(key)
        if batch is None:
            batch = self._captured_barrier(slot) if is_captured else self._barrier(slot)
            self._batches[key] = batch
        with self._lock:
            if is_captured:
                self._submit(stream, batch, is_captured)
                return
            epoch = (self._epochs.get(slot, 0) + 1) & COUNT_MASK
            batch.set_values(epoch)
            self._submit(stream, batch, is_captured)
            self._epochs[slot] = epoch

    def post(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "post"))
        if batch is None:
            batch = self._batches[slot, peer, "post"] = _Batch(self._posting(slot, peer))
        is_captured = self._driver.is_capturing(stream)
        with self._lock:
            self._submit(stream, batch, is_captured)

    def wait(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "wait"))
        if batch is None:
            batch = self._batches[slot, peer, "wait"] = _Batch(self._taking(slot, peer))
            self._waits.add((slot, peer))
        is_captured = self._driver.is_capturing(stream)
        with self._lock:
            self._submit(stream, batch, is_captured)

    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._missing)) if self._missing else ()

    def close(self) -> None:
        """Wait for what still waits (the watch ends that at its deadline), then stop the watch.

        Raises:
            PeerError: a stream is held by something else.
        """
        deadline = time.monotonic() + self._timeout_s + _PATIENCE_S
        with self._driver.current():
            queues = tuple(self._queues.values())
            while not (done := all(_is_done(queue.last) for queue in queues)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            self._stop.set()
            if self._watcher is not None:
                self._watcher.join()
            if not done:
                raise PeerError([self._rank], "a stream with a barrier in it does not come to rest")
            for queue in queues:
                queue.close()
            self._queues.clear()

    def _barrier(self, slot: int) -> _Batch:
        operations = []
        for distance in self._distances:
            to, of = (self._rank + distance) % self._world_size, self._rank - distance
            operations.append((_WRITE, self._counter(slot, to, self._rank), 0, 0))
            operations.append((_WAIT, self._counter(slot, self._rank, of), 0, _AT_LEAST))
        return _Batch(operations)

    def _captured_barrier(self, slot: int) -> _Batch:
        posting = [op for peer in self._peers for op in self._posting(slot, peer)]
        taking = [self._taking(slot, peer) for peer in self._peers]
        # No flag is cleared before all are set: a flag that is not shows who is missing.
        return _Batch(posting + [wait for wait, _ in taking] + [clear for _, clear in taking])

    def _posting(self, slot: int, peer: int) -> list[_Operation]:
        flag = self._pages.counter(slot, peer, self._rank)
        return [(_WAIT, flag, _FREE, _EQUAL), (_WRITE, flag, _SET, 0)]

    def _taking(self, slot: int, peer: int) -> list[_Operation]:
        flag = self._pages.counter(slot, self._rank, peer)
        return [(_WAIT, flag, _SET, _EQUAL), (_WRITE, flag, _FREE, 0)]

    def _counter(self, slot: int, receiver: int, sender: int) -> int:
        return self._pages.counter(slot, receiver, sender % self._world_size) + _COUNT_AT

    def _submit(self, stream: int, batch: _Batch, is_captured: bool) -> None:
        # The default stream is that of whatever context is current; other streams have one.
        is_there = stream or torch._C._cuda_getDevice() == self._index  # type: ignore[attr-defined]
        if not is_there or self._batch_mem_op(stream, batch.num, batch.address, 0):
            with self._driver.current():
                code = cu.CUresult(self._batch_mem_op(stream, batch.num, batch.address, 0))
                check("cuStreamBatchMemOp", (code,), num_operations=batch.num)
                self._note(stream, is_captured)
            return
        self._note(stream, is_captured)

    def _note(self, stream: int, is_captured: bool) -> None:
        if is_captured:
            return
        queue = self._queues.get(stream)
        if queue is None:
            with self._driver.current():
                queue = self._queues[stream] = _Queue()
        queue.submitted(stream)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="tpspan-stream-watch", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        with self._driver.current():
            # Or a look at an event would end a capture that goes on in another thread.
            relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            result = cu.cuThreadExchangeStreamCaptureMode(relaxed)
            check("cuThreadExchangeStreamCaptureMode", result)
            while not self._stop.wait(_LOOK_S):
                with self._lock:
                    queues = tuple(self._queues.values())
                    late = [queue for queue in queues if queue.stuck_s() > self._timeout_s]
                for queue in late:
                    self._release(queue)

    def _release(self, queue: _Queue) -> None:
        """Move the words until the stream goes on; note who was missing.

        A stream that is merely busy with something else has no word of ours waiting: it is left
        alone.
        """
        flags = [
            (slot, peer, self._word(slot, self._rank, peer), self._word(slot, peer, self._rank))
            for slot in sorted({slot for slot, _, _ in tuple(self._batches)})
            for peer in self._peers
        ]
        with self._lock:
            epochs = tuple(self._epochs.items())
        missing = self._behind(epochs) or self._absent(flags)
        reports = {peer: self._report(peer) for peer in range(self._world_size)}
        came = {self._rank, *(peer for peer, report in reports.items() if any(report))}
        reported = {peer for report in reports.values() for peer, late in enumerate(report) if late}
        missing = ((missing - came) | reported) - {self._rank} or missing
        if not missing:
            return
        for peer in missing:
            self._report(self._rank)[peer] = 1
        self._missing |= missing
        end = time.monotonic() + _PATIENCE_S
        while not _is_done(queue.last) and time.monotonic() < end:
            for slot, epoch in epochs:
                for distance in self._distances:
                    awaited = self._counter(slot, self._rank, self._rank - distance)
                    ctypes.c_uint32.from_address(awaited).value = epoch
            for _, _, own_flag, their_flag in flags:
                own_flag.value = _SET
                their_flag.value = _FREE
            time.sleep(0.001)

    def _behind(self, epochs: tuple[tuple[int, int], ...]) -> set[int]:
        """Who has not come to a barrier to which this rank's stream has, or will: the last ones."""
        missing = set()
        for slot, epoch in epochs:
            left = {}
            for peer in self._peers:  # whoever has come has written to the next rank
                count = self._counter(slot, (peer + 1) % self._world_size, peer)
                left[peer] = (epoch - ctypes.c_uint32.from_address(count).value) & COUNT_MASK
            # A peer may be ahead, which a cyclic difference shows as a very large number.
            left = {peer: num for peer, num in left.items() if 0 < num <= COUNT_MASK // 2}
            missing |= {peer for peer, num in left.items() if num == max(left.values())}
        return missing

    def _absent(self, flags: list[tuple[int, int, Any, Any]]) -> set[int]:
        """Who has not moved a flag that is waited for, if nobody but the streams has moved any."""
        absent = [(slot, peer, theirs) for slot, peer, own, theirs in flags if own.value == _FREE]
        barriers = {slot for slot, _, kind in tuple(self._batches) if kind == "captured barrier"}
        # A barrier that holds the stream is one to which this rank has posted.
        missing = {peer for slot, peer, to in absent if slot in barriers and to.value == _SET}
        missing = missing or {peer for slot, peer, _ in absent if (slot, peer) in self._waits}
        return missing or {peer for _, peer, _, theirs in flags if theirs.value == _SET}

    def _report(self, rank: int) -> ctypes.Array[ctypes.c_uint8]:
        """Whom a rank has missed, a byte for each rank, behind its flags."""
        address = self._pages.address_of(rank) + self._pages.page_nbytes - self._world_size
        return (ctypes.c_uint8 * self._world_size).from_address(address)

    def _word(self, slot: int, receiver: int, sender: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._pages.counter(slot, receiver, sender))


_Operation = tuple[int, int, int, int]  # kind, address, value, flags


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


class _Queue:
    """How far a stream has come: its last operation, and marks between that show progress."""

    def __init__(self) -> None:
        self.last = _new_event()
        self._marks: deque[Any] = deque()
        self._marked = 0.0
        self._progress = 0.0
        self._is_idle = True

    def submitted(self, stream: int) -> None:
        """Note that something of ours was put on the stream just now."""
        now = time.monotonic()
        check("cuEventRecord", cu.cuEventRecord(self.last, stream))
        if self._is_idle:
            self._is_idle, self._progress = False, now
        if now - self._marked > _MARK_S:
            mark = _new_event()
            check("cuEventRecord", cu.cuEventRecord(mark, stream))
            self._marks.append(mark)
            self._marked = now

    def stuck_s(self) -> float:
        """Seconds since the stream was last seen to have come any further."""
        if _is_done(self.last):
            self._is_idle = True
        while self._marks and _is_done(self._marks[0]):
            check("cuEventDestroy", cu.cuEventDestroy(self._marks.popleft()))
            self._progress = time.monotonic()
        return 0.0 if self._is_idle else time.monotonic() - self._progress

    def close(self) -> None:
        """Give the events back."""
        for event in (self.last, *self._marks):
            check("cuEventDestroy", cu.cuEventDestroy(event))


def _new_event() -> Any:
    flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
    return check("cuEventCreate", cu.cuEventCreate(flags))


def _is_done(event: Any) -> bool:
    (code,) = cu.cuEventQuery(event)
    if code == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    check("cuEventQuery", (code,))
    return True
