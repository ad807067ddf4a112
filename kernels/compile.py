"""Device kernels: compiled once per device by numba to PTX, loaded and launched by cuda.core.

numba's own dispatcher costs 30 to 100 µs a launch and makes a context of its own; here numba only
turns a function into PTX. A launch of ours takes 5 to 8 µs of the host.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tpspan.errors import DriverError

# Where each kernel's body is, and how many 64-bit integers it takes.
_BODIES: dict[str, tuple[str, int]] = {
    "post": ("tpspan.kernels.device_signals", 2),
    "wait": ("tpspan.kernels.device_signals", 4),
    "barrier": ("tpspan.kernels.device_signals", 8),
    "gather_copy": ("tpspan.kernels.device_copy", 6),
    "rotated_copy": ("tpspan.kernels.device_copy", 6),
    "pull": ("tpspan.kernels.device_reduce", 10),
    "sum_f32": ("tpspan.kernels.device_reduce", 9),
    "sum_bf16": ("tpspan.kernels.device_reduce", 9),
    "sum_f16": ("tpspan.kernels.device_reduce", 9),
    "fused_gather": ("tpspan.kernels.device_fused", 13),
    "fused_sum_f32": ("tpspan.kernels.device_fused", 14),
    "fused_sum_bf16": ("tpspan.kernels.device_fused", 14),
    "fused_sum_f16": ("tpspan.kernels.device_fused", 14),
}
_OF_SPANS = ("post", "wait", "barrier", "gather_copy", "rotated_copy")
_COMPILE_ADVICE = (
    "numba compiles with libnvvm and libnvrtc of a CUDA toolkit: install one, or the package's "
    "extra cuda, or set CUDA_HOME."
)
_LOAD_ADVICE = "The driver must be at least as new as the CUDA toolkit that compiled the kernel."

_loaded: dict[tuple[str, int], DeviceKernel] = {}
_contexts: dict[int, Any] = {}
_lock = threading.Lock()


def kernel_names() -> tuple[str, ...]:
    """The names of all device kernels."""
    return tuple(_BODIES)


def compile_ptx(name: str, compute_capability: tuple[int, int]) -> tuple[str, str]:
    """PTX of a kernel and the symbol of its entry; needs libnvvm and libnvrtc, but no GPU."""
    from numba import cuda  # a second to import: only who compiles pays for it

    module_name, num_arguments = _BODIES[name]
    body = getattr(importlib.import_module(module_name), name)
    signature = cuda.types.void(*[cuda.types.int64] * num_arguments)
    ptx, _ = cuda.compile_ptx(body, signature, cc=compute_capability, device=False, abi="numba")
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx)
    assert entry is not None, "numba's PTX has no entry"
    return ptx, entry.group(1)


def kernel(name: str, device_index: int) -> DeviceKernel:
    """The kernel, compiled and loaded on its first use on this device. Any thread may call."""
    found = _loaded.get((name, device_index))
    if found is None:
        with _lock:
            found = _loaded.get((name, device_index))
            if found is None:
                found = DeviceKernel(name, device_index)
                _loaded[name, device_index] = found
    return found


def prepare(device_index: int, names: Iterable[str] = _OF_SPANS) -> None:
    """Compile and load kernels now: loading one while a stream is captured would fail.

    Args:
        names: by default those that every span needs; the others are seconds of work that only
            collective calls have a use for.
    """
    for name in names:
        kernel(name, device_index)


class DeviceKernel:
    """One kernel on one device; calling it launches it."""

    def __init__(self, name: str, device_index: int) -> None:
        from cuda.bindings import driver  # absent where there is no CUDA
        from cuda.core import (
            LEGACY_DEFAULT_STREAM,
            Device,
            LaunchConfig,
            ObjectCode,
            Stream,
            launch,
        )

        self.name = name
        self.device_index = device_index
        self._driver = driver
        self._launch = launch
        self._stream_of = Stream.from_handle
        self._config_of = LaunchConfig
        self._default_stream = LEGACY_DEFAULT_STREAM
        self._ready: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        with _device_context(driver, device_index):
            capability = Device(device_index).compute_capability
            with _advised("compile", name, _COMPILE_ADVICE):
                ptx, symbol = compile_ptx(name, (capability.major, capability.minor))
            with _advised("load", name, _LOAD_ADVICE):
                self._code = ObjectCode.from_ptx(ptx.encode(), name=name)
                self._kernel = self._code.get_kernel(symbol)
        self._context = int(_contexts[device_index])

    def __call__(self, stream: int, num_blocks: int, num_threads: int, *arguments: int) -> None:
        """Launch on a stream given by its handle; the arguments are 64-bit integers.

        Raises:
            DriverError: the launch was refused.
        """
        # A stream has a context, but the default stream is that of whatever device is current.
        if stream == 0 and not self._is_current():
            self._launch_in_context(stream, num_blocks, num_threads, arguments)
            return
        try:
            on, config = self._ready[stream, num_blocks, num_threads]
            self._launch(on, config, self._kernel, *arguments)
        except Exception:  # the first launch of this kind, a thread without a context, or refused
            self._launch_in_context(stream, num_blocks, num_threads, arguments)

    def _is_current(self) -> bool:
        code, current = self._driver.cuCtxGetCurrent()
        return code == 0 and int(current) == self._context

    def _launch_in_context(
        self, stream: int, num_blocks: int, num_threads: int, arguments: tuple[int, ...]
    ) -> None:
        try:
            with _device_context(self._driver, self.device_index):
                on = self._stream_of(stream) if stream else self._default_stream
                config = self._config_of(grid=num_blocks, block=num_threads)
                self._launch(on, config, self._kernel, *arguments)
        except Exception as error:
            named = re.match(r"CUDA_ERROR_\w+", str(error))
            raise DriverError(
                "cuLaunchKernel",
                -1,
                named.group() if named else type(error).__name__,
                {"kernel": self.name, "num_blocks": num_blocks, "num_threads": num_threads},
                "An earlier kernel may have failed: errors of a device show at the next call.",
            ) from error
        self._ready[stream, num_blocks, num_threads] = on, config


@contextmanager
def _device_context(driver: Any, device_index: int) -> Iterator[None]:
    """The device's primary context, current in this thread meanwhile."""
    context = _contexts.get(device_index)
    if context is None:
        _check(driver.cuInit(0), "cuInit")
        device = _check(driver.cuDeviceGet(device_index), "cuDeviceGet")
        context = _check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        _contexts[device_index] = context
    _check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        _check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextmanager
def _advised(step: str, name: str, advice: str) -> Iterator[None]:
    """Other libraries' failures as one of ours that says what to do."""
    try:
        yield
    except Exception as error:
        arguments = {"kernel": name, "error": str(error)}
        raise DriverError(step, -1, type(error).__name__, arguments, advice) from error


def _check(result: tuple[Any, ...], call: str) -> Any:
    code, *values = result
    if code != 0:
        raise DriverError(call, int(code), code.name)
    return values[0] if values else None
