"""Signals by the stream's own write and wait for a value, for ranks that share a GPU.

Source: CUDA driver API reference, "Stream Memory Operations" (``cuStreamBatchMemOp``). The values
are constants, so that a captured graph may be replayed any number of times: a flag is 0 or 1. The
sender waits until the receiver's flag is 0, then sets it; the receiver waits until it is 1, then
clears it. Both are always in step, whatever was replayed or launched in between.

A wait of this kind has no deadline of its own. A thread watches the last operation of every stream
and, when it is late, moves the flags itself: the stream goes on, and the ranks that were missing are
remembered. The hardware is never left waiting.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from cuda.bindings import driver as cu

from tpspan import kernels
from tpspan.launch.world import World
from tpspan.memory.cuda import check
from tpspan.spans.pages import Pages

_LOOK_S = 0.1
_FREE, _SET = 0, 1


class StreamOps:
    """``SignalOps`` by stream memory operations, with a watch for deadlines."""

    def __init__(self, pages: Pages, world: World) -> None:
        self._pages = pages
        self._rank, self._world_size = world.rank, world.world_size
        self._driver = world.driver
        self._device = world.device
        self._timeout_s = world.timeout_s
        self._batches: dict[tuple[str, int, int], list[Any]] = {}
        self._last: dict[int, tuple[torch.cuda.Event, float]] = {}
        self._waits: set[tuple[int, int]] = set()
        self._slots: set[int] = set()
        self._missing: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._side = torch.cuda.Stream(world.device)
        self._flags = torch.zeros(world.world_size, dtype=torch.int32).pin_memory()
        self._constants = torch.tensor([_FREE, _SET], dtype=torch.int32).pin_memory()
        self._watcher: threading.Thread | None = None
        self._clear()

    def barrier(self, slot: int, stream: int) -> None:
        if self._world_size == 1:
            return
        batch = self._batches.get(("barrier", slot, 0))
        if batch is None:
            # The right neighbour first: the ranks do not all write to one page at once.
            peers = [(self._rank + k) % self._world_size for k in range(1, self._world_size)]
            batch = [op for peer in peers for op in self._posting(slot, peer)]
            batch += [op for peer in peers for op in self._taking(slot, peer)]
            self._batches["barrier", slot, 0] = batch
        self._submit(slot, stream, batch)

    def post(self, slot: int, peer: int, stream: int) -> None:
        self._submit(slot, stream, self._posting(slot, peer))

    def wait(self, slot: int, peer: int, stream: int) -> None:
        self._waits.add((slot, peer))
        self._submit(slot, stream, self._taking(slot, peer))

    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._missing)) if self._missing else ()

    def close(self) -> None:
        while any(not event.query() for event, _ in tuple(self._last.values())):
            time.sleep(0.001)  # the watch ends every wait at its deadline
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()

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

    def _submit(self, slot: int, stream: int, batch: list[Any]) -> None:
        check(
            "cuStreamBatchMemOp",
            cu.cuStreamBatchMemOp(stream, len(batch), batch, 0),
            slot=slot,
            num_operations=len(batch),
        )
        self._slots.add(slot)
        if self._driver.is_capturing(stream):
            return
        with self._lock:
            known = self._last.get(stream)
            event = known[0] if known else torch.cuda.Event()
            event.record(torch.cuda.ExternalStream(stream, self._device))
            self._last[stream] = (event, time.monotonic())
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="tpspan-stream-watch", daemon=True
                )
                self._watcher.start()

    def _watch(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._stop.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                late = [
                    event
                    for event, since in self._last.values()
                    if now - since > self._timeout_s and not event.query()
                ]
            for event in late:
                self.release(event)

    def release(self, event: torch.cuda.Event) -> None:
        """Move the flags of every slot until the event has happened; note who was missing."""
        flags = [
            (slot, peer, self._flag(slot, self._rank, peer), self._flag(slot, peer, self._rank))
            for slot in tuple(self._slots)
            for peer in range(self._world_size)
            if peer != self._rank
        ]
        absent = [(slot, peer, theirs) for slot, peer, own, theirs in flags if not self._read(own)]
        # In a barrier a missing peer has not taken our flag either.
        missing = {peer for _, peer, theirs in absent if self._read(theirs)}
        missing = missing or {peer for slot, peer, _ in absent if (slot, peer) in self._waits}
        self._missing |= missing or {self._rank}
        while not event.query():
            for _, _, own, theirs in flags:
                self._write(own, _SET)
                self._write(theirs, _FREE)
            time.sleep(0.001)

    def _read(self, flag: int) -> int:
        self._driver.copy(self._flags.data_ptr(), flag, 4, self._side.cuda_stream)
        self._side.synchronize()
        return int(self._flags[0])

    def _write(self, flag: int, value: int) -> None:
        source = self._constants.data_ptr() + 4 * value
        self._driver.copy(flag, source, 4, self._side.cuda_stream)
        self._side.synchronize()

    def _clear(self) -> None:
        zeros = torch.zeros(self._pages.page_nbytes, dtype=torch.uint8, device=self._device)
        own = self._pages.base_address + self._rank * self._pages.page_nbytes
        torch.cuda.current_stream(self._device).synchronize()
        self._driver.copy(own, zeros.data_ptr(), zeros.numel(), self._side.cuda_stream)
        self._side.synchronize()


def _wait_op(address: int, value: int) -> Any:
    params = cu.CUstreamBatchMemOpParams()
    params.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    params.waitValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    params.waitValue.address = cu.CUdeviceptr(address)
    params.waitValue.value = cu.cuuint32_t(value)
    params.waitValue.flags = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    return params


def _write_op(address: int, value: int) -> Any:
    params = cu.CUstreamBatchMemOpParams()
    params.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    params.writeValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    params.writeValue.address = cu.CUdeviceptr(address)
    params.writeValue.value = cu.cuuint32_t(value)
    params.writeValue.flags = 0
    return params
