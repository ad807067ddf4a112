"""A gate on a stream that the host opens: the stream waits for a word of pinned host memory.

Source: CUDA driver API reference, ``cuStreamWaitValue32``. On the host backend there is nothing to
hold: who comes to the gate does the work behind it himself (``tpspan.spans.remapper``).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from cuda.bindings import driver as cu

from tpspan.kernels.board import COUNT_MASK, has_arrived
from tpspan.memory import Driver
from tpspan.memory.cuda import CudaDriver, check

_AT_LEAST = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value  # cyclic, as has_arrived


class StreamGate:
    """A count that the host writes and streams of one GPU wait for."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._index = driver.device.index
        # The binding takes three times as long to call, and making a context current longer still.
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._address = self._word.data_ptr()
        self._value = ctypes.c_uint32.from_address(self._address)

    def open(self, count: int) -> None:
        """Let everybody through who waits for this count or a smaller one."""
        self._value.value = count & COUNT_MASK

    def hold(self, stream: int, count: int) -> None:
        """Hold a stream until the gate was opened for ``count``; nothing is put there if it was."""
        count &= COUNT_MASK
        if has_arrived(self._value.value, count):
            return
        call = (stream, self._address, count, _AT_LEAST)
        # The default stream is that of whatever context is current; other streams have one.
        is_there = stream or torch._C._cuda_getDevice() == self._index
        if is_there and not self._wait(*call):
            return
        with self._driver.current():
            code = cu.CUresult(self._wait(*call))
        check("cuStreamWaitValue32", (code,), stream=stream, count=count)


@contextlib.contextmanager
def beside_captures(driver: Driver) -> Iterator[None]:
    """Let a thread look at events although another thread captures; nothing without a GPU."""
    if not isinstance(driver, CudaDriver):
        yield
        return
    with driver.current():
        # Or a look at an event would end a capture that goes on in another thread.
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(
            "cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed)
        )
        try:
            yield
        finally:
            check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(before))
