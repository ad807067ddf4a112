"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``). The values
are constants, so that a captured graph may be replayed any number of times: a flag is 0 or 1. The
sender waits until the receiver's flag is 0, then sets it; the receiver waits until it is 1, then
clears it. Both are always in step, whatever was replayed or launched in between.

A wait of this kind has no deadline of its own. The flags lie in host memory, which streams reach as
fast here, so that a thread can watch every stream. When one has not come any further for the time
allowed, and one of the flags is waited for, the thread moves the flags itself: the stream goes on,
and the ranks that were missing are remembered. Flags that were moved say nothing true any more, so
a rank first writes whom it missed where the others, whose deadlines come later, will read it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import Any

from cuda.bindings import driver as cu

from tpspan.errors import PeerError
from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.pages import Pages

_LOOK_S = 0.1
_MARK_S = 0.5
_PATIENCE_S = 10.0
_FREE, _SET = 0, 1


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
        self._timeout_s = world.timeout_s
        self._batches: dict[tuple[int, int, str], list[Any]] = {}
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
        batch = self._batches.get((slot, -1, "barrier"))
        if batch is None:
            peers = [(self._rank + k) % self._world_size for k in range(1, self._world_size)]
            batch = [op for peer in peers for op in self._posting(slot, peer)]
            taking = [self._taking(slot, peer) for peer in peers]
            # No flag is cleared before all are set: a flag that is not shows who is missing.
            batch += [wait for wait, _ in taking] + [clear for _, clear in taking]
            self._batches[slot, -1, "barrier"] = batch
        self._submit(stream, batch)

    def post(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "post"))
        if batch is None:
            batch = self._batches[slot, peer, "post"] = self._posting(slot, peer)
        self._submit(stream, batch)

    def wait(self, slot: int, peer: int, stream: int) -> None:
        batch = self._batches.get((slot, peer, "wait"))
        if batch is None:
            batch = self._batches[slot, peer, "wait"] = self._taking(slot, peer)
            self._waits.add((slot, peer))
        self._submit(stream, batch)

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

    def _posting(self, slot: int, peer: int) -> list[Any]:
        flag = self._pages.counter(slot, peer, self._rank)
        return [_wait_op(flag, _FREE), _write_op(flag, _SET)]

    def _taking(self, slot: int, peer: int) -> list[Any]:
        flag = self._pages.counter(slot, self._rank, peer)
        return [_wait_op(flag, _SET), _write_op(flag, _FREE)]

    def _submit(self, stream: int, batch: list[Any]) -> None:
        with self._driver.current():
            result = cu.cuStreamBatchMemOp(stream, len(batch), batch, 0)
            check("cuStreamBatchMemOp", result, num_operations=len(batch))
            if self._driver.is_capturing(stream):
                return
            with self._lock:
                queue = self._queues.get(stream)
                if queue is None:
                    queue = self._queues[stream] = _Queue()
                queue.submitted(stream)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="tpspan-stream-watch", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        with self._driver.current():
            while not self._stop.wait(_LOOK_S):
                with self._lock:
                    queues = tuple(self._queues.values())
                    late = [queue for queue in queues if queue.stuck_s() > self._timeout_s]
                for queue in late:
                    self._release(queue)

    def _release(self, queue: _Queue) -> None:
        """Move the flags until the stream goes on; note who was missing.

        A stream that is merely busy with something else has no flag of ours waiting: it is left
        alone.
        """
        flags = [
            (slot, peer, self._word(slot, self._rank, peer), self._word(slot, peer, self._rank))
            for slot in sorted({slot for slot, _, _ in tuple(self._batches)})
            for peer in range(self._world_size)
            if peer != self._rank
        ]
        missing = self._absent(flags)
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
            for _, _, own, theirs in flags:
                own.value = _SET
                theirs.value = _FREE
            time.sleep(0.001)

    def _absent(self, flags: list[tuple[int, int, Any, Any]]) -> set[int]:
        """Who is missing, as long as nobody but the streams has moved a flag."""
        barriers = {slot for slot, _, kind in tuple(self._batches) if kind == "barrier"}
        absent = [(slot, peer, theirs) for slot, peer, own, theirs in flags if own.value == _FREE]
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


def _wait_op(address: int, value: int) -> Any:
    params = cu.CUstreamBatchMemOpParams()
    kind = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    params.operation = kind
    params.waitValue.operation = kind
    params.waitValue.address = cu.CUdeviceptr(address)
    params.waitValue.value = cu.cuuint32_t(value)
    params.waitValue.flags = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    return params


def _write_op(address: int, value: int) -> Any:
    params = cu.CUstreamBatchMemOpParams()
    kind = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    params.operation = kind
    params.writeValue.operation = kind
    params.writeValue.address = cu.CUdeviceptr(address)
    params.writeValue.value = cu.cuuint32_t(value)
    params.writeValue.flags = 0
    return params
