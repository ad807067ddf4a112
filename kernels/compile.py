"""Device kernels: compiled once per device by numba to PTX, loaded by cuda.core.

numba's own dispatcher costs 30 to 100 µs a launch and makes a context of its own; here numba only
turns a function into PTX. That takes a second or two for each, so the PTX is kept on disk
(``tpspan.cached``), unless ``TPSPAN_KERNEL_CACHE`` is 0. Launches go to the driver directly, with
arguments packed into memory that is kept: ``cuda.core.launch`` takes twice as long.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpspan.cached import DiskCache
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
    "fused_gather": ("tpspan.kernels.device_fused", 15),
    "fused_sum_f32": ("tpspan.kernels.device_fused", 16),
    "fused_sum_bf16": ("tpspan.kernels.device_fused", 16),
    "fused_sum_f16": ("tpspan.kernels.device_fused", 16),
    "fused_scatter_f32": ("tpspan.kernels.device_fused", 16),
    "fused_scatter_bf16": ("tpspan.kernels.device_fused", 16),
    "fused_scatter_f16": ("tpspan.kernels.device_fused", 16),
    "ll_gather": ("tpspan.kernels.device_ll", 12),
    "ll_sum_f32": ("tpspan.kernels.device_ll", 13),
    "ll_sum_bf16": ("tpspan.kernels.device_ll", 13),
    "ll_sum_f16": ("tpspan.kernels.device_ll", 13),
}
_OF_SPANS = ("post", "wait", "barrier", "gather_copy", "rotated_copy")
_COMPILE_ADVICE = (
    "numba compiles with libnvvm and libnvrtc of a CUDA toolkit: install one, or the package's "
    "extra cuda, or set CUDA_HOME."
)
_LOAD_ADVICE = "The driver must be at least as new as the CUDA toolkit that compiled the kernel."

_loaded: dict[tuple[str, int], DeviceKernel] = {}
_CACHE = DiskCache("ptx", 1, "TPSPAN_KERNEL_CACHE")
_COMPILERS = ("numba", "numba-cuda")
_MOST_ARGUMENTS = 16
BOUND_THREADS = 512
"""Of a block of those kernels that would take more registers than so many threads can have."""
_BOUND = {name for name, (module, _) in _BODIES.items() if module == "tpspan.kernels.device_fused"}
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
    entry = re.search(r"\.entry\s+([\w$]+)\s*\([^)]*\)", ptx)
    assert entry is not None, "numba's PTX has no entry"
    bound = f"\n.maxntid {BOUND_THREADS}, 1, 1" if name in _BOUND else ""
    return ptx[: entry.end()] + bound + ptx[entry.end() :], entry.group(1)


def cached_ptx(
    name: str, compute_capability: tuple[int, int], driver_version: int
) -> tuple[str, str]:
    """``compile_ptx``, or what it returned in an earlier process of the same sources.

    Args:
        driver_version: PTX of a newer toolkit, from beside a newer driver, cannot be loaded.
    """
    key = {
        "kernel": name,
        "driver": str(driver_version),
        "compute_capability": ".".join(map(str, compute_capability)),
        "sources": _digest_of_sources(),
        **{package: importlib.metadata.version(package) for package in _COMPILERS},
    }
    found = _CACHE.load(key)
    if isinstance(found, list) and len(found) == 2 and all(isinstance(each, str) for each in found):
        return found[0], found[1]
    ptx, entry = compile_ptx(name, compute_capability)
    _CACHE.store(key, [ptx, entry])
    return ptx, entry


@functools.cache
def _digest_of_sources() -> str:
    """Of every file beside this one: a kernel may use functions of any of them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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


class _Arguments(threading.local):
    """Where a thread packs the arguments of its launches: the driver copies them in the call.

    Attributes:
        place: the values, and the address of an array of pointers to them.
    """

    def __init__(self) -> None:
        values = (ctypes.c_int64 * _MOST_ARGUMENTS)()
        addresses = [ctypes.addressof(values) + 8 * index for index in range(_MOST_ARGUMENTS)]
        self._pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*addresses)
        self.place = values, ctypes.addressof(self._pointers)


_arguments = _Arguments()


class DeviceKernel:
    """One kernel on one device; calling it launches it."""

    def __init__(self, name: str, device_index: int) -> None:
        from cuda.bindings import driver  # absent where there is no CUDA
        from cuda.core import Device, ObjectCode
        from torch import _C  # seconds to import: only who launches pays for it

        self.name = name
        self.device_index = device_index
        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._current_device = _C._cuda_getDevice  # type: ignore[attr-defined]
        self._streams: dict[int, Any] = {}
        self._pack_into = struct.Struct(f"{_BODIES[name][1]}q").pack_into
        with _device_context(driver, device_index):
            capability = Device(device_index).compute_capability
            with _advised("compile", name, _COMPILE_ADVICE):
                version = _check(driver.cuDriverGetVersion(), "cuDriverGetVersion")
                ptx, symbol = cached_ptx(name, (capability.major, capability.minor), version)
            with _advised("load", name, _LOAD_ADVICE):
                self._code = ObjectCode.from_ptx(ptx.encode(), name=name)
                self._kernel = self._code.get_kernel(symbol)
                self._function = driver.CUfunction(int(self._kernel.handle))

    def __call__(self, stream: int, num_blocks: int, num_threads: int, *arguments: int) -> None:
        """Launch on a stream given by its handle; the arguments are 64-bit integers.

        Raises:
            DriverError: the launch was refused.
        """
        values, pointers = _arguments.place
        self._pack_into(values, 0, *arguments)
        on = self._streams.get(stream)
        if on is None:
            on = self._streams[stream] = self._driver.CUstream(stream)
        call = (self._function, num_blocks, 1, 1, num_threads, 1, 1, 0, on, pointers, 0)
        # A stream has a context, but the default stream is that of whatever device is current.
        is_there = stream or self._current_device() == self.device_index
        if is_there and not self._launch(*call)[0]:
            return
        self._launch_again(call)

    def bind(self, num_blocks: int, num_threads: int, *arguments: int) -> Callable[[int], None]:
        """A launch with these arguments on a stream given by its handle, to be made many times.

        Any thread may call it. It raises what launching the kernel itself does.
        """
        assert len(arguments) == _BODIES[self.name][1]
        # An array of pointers keeps what they point to; the driver copies it in the call.
        word = ctypes.POINTER(ctypes.c_int64)
        words = [ctypes.pointer(ctypes.c_int64(argument)) for argument in arguments]
        pointers = (word * len(words))(*words)
        shape = (self._function, num_blocks, 1, 1, num_threads, 1, 1, 0)
        calls: dict[int, tuple[Any, ...]] = {}
        launch, current_device, index = self._launch, self._current_device, self.device_index

        def call_on(stream: int) -> tuple[Any, ...]:
            on = self._driver.CUstream(stream)
            calls[stream] = made = (*shape, on, ctypes.addressof(pointers), 0)
            return made

        def launch_on(stream: int) -> None:
            call = calls.get(stream) or call_on(stream)
            if (stream or current_device() == index) and not launch(*call)[0]:
                return
            self._launch_again(call)

        return launch_on

    def _launch_again(self, call: tuple[Any, ...]) -> None:
        """With the device's context, which this thread may not have had."""
        with _device_context(self._driver, self.device_index):
            (code,) = self._launch(*call)
        if code:
            raise DriverError(
                "cuLaunchKernel",
                int(code),
                code.name,
                {"kernel": self.name, "num_blocks": call[1], "num_threads": call[4]},
                "An earlier kernel may have failed: errors of a device show at the next call.",
            )


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
