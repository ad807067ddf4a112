"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``). The values
are constants, so that a captured graph may be replayed any number of times: a flag is 0 or 1. The
sender waits until the receiver's flag is 0, then sets it; the receiver waits until it is 1, then
clears it. Both are always in step, whatever was replayed or launched in between.

A wait of this kind has no deadline of its own. The flags lie in host memory, which streams reach as
fast here, so that a thread can watch the last operation of every stream and, when it is late, move
the flags itself: the stream goes on, and the ranks that were missing are remembered.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from cuda.bindings import driver as cu

from tpspan import kernels
from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.pages import Pages

_LOOK_S = 0.1
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
        self._last: dict[int, tuple[Any, float]] = {}
        self._waits: set[tuple[int, int]] = set()
        self._missing: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        ctypes.memset(pages.base_address + self._rank * pages.page_nbytes, 0, pages.page_nbytes)

    def barrier(self, slot: int, stream: int) -> None:
        if self._world_size == 1:
            return
        batch = self._batches.get((slot, -1, "barrier"))
        if batch is None:
            peers = [(self._rank + k) % self._world_size for k in range(1, self._world_size)]
            batch = [op for peer in peers for op in self._posting(slot, peer)]
            batch += [op for peer in peers for op in self._taking(slot, peer)]
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
        with self._driver.current():
            while not all(_is_done(event) for event, _ in tuple(self._last.values())):
                time.sleep(0.001)  # the watch ends every wait at its deadline
            self._stop.set()
            if self._watcher is not None:
                self._watcher.join()
            for event, _ in self._last.values():
                check("cuEventDestroy", cu.cuEventDestroy(event))
            self._last.clear()

    def _posting(self, slot: int, peer: int) -> list[Any]:
        flag = self._flag(slot, peer, self._rank)
        return [_wait_op(flag, _FREE), _write_op(flag, _SET)]

    def _taking(self, slot: int, peer: int) -> list[Any]:
        flag = self._flag(slot, self._rank, peer)
        return [_wait_op(flag, _SET), _write_op(flag, _FREE)]

    def _flag(self, slot: int, receiver: int, sender: int) -> int:
        pages = self._pages
        return kernels.counter_address(
            pages.base_address, pages.page_nbytes, self._world_size, slot, receiver, sender
        )

    def _submit(self, stream: int, batch: list[Any]) -> None:
        with self._driver.current():
            result = cu.cuStreamBatchMemOp(stream, len(batch), batch, 0)
            check("cuStreamBatchMemOp", result, num_operations=len(batch))
            if self._driver.is_capturing(stream):
                return
            with self._lock:
                known = self._last.get(stream)
                event = known[0] if known else _new_event()
                check("cuEventRecord", cu.cuEventRecord(event, stream))
                self._last[stream] = (event, time.monotonic())
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="tpspan-stream-watch", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        with self._driver.current():
            while not self._stop.wait(_LOOK_S):
                now = time.monotonic()
                with self._lock:
                    late = [e for e, since in self._last.values() if now - since > self._timeout_s]
                for event in late:
                    if not _is_done(event):
                        self._release(event)

    def _release(self, event: Any) -> None:
        """Move the flags of all slots in use until the event has happened; note who is missing."""
        flags = [
            (slot, peer, self._word(slot, self._rank, peer), self._word(slot, peer, self._rank))
            for slot in sorted({slot for slot, _, _ in tuple(self._batches)})
            for peer in range(self._world_size)
            if peer != self._rank
        ]
        absent = [(slot, peer, theirs) for slot, peer, own, theirs in flags if own.value == _FREE]
        # In a barrier a missing peer has not taken our flag either.
        missing = {peer for _, peer, theirs in absent if theirs.value == _SET}
        missing = missing or {peer for slot, peer, _ in absent if (slot, peer) in self._waits}
        missing = missing or {peer for _, peer, _, theirs in flags if theirs.value == _SET}
        self._missing |= missing or {self._rank}
        while not _is_done(event):
            for _, _, own, theirs in flags:
                own.value = _SET
                theirs.value = _FREE
            time.sleep(0.001)

    def _word(self, slot: int, receiver: int, sender: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._flag(slot, receiver, sender))


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
