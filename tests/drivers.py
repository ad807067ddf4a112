"""The drivers that memory tests run on, and how to see what a mapping allows without crashing."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import pytest

from tpspan.memory import Driver
from tpspan.memory.cuda import CudaDriver, cuda_device_count
from tpspan.memory.host import HostDriver

_libc = ctypes.CDLL(None, use_errno=True)
_libc.read.argtypes = _libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_libc.read.restype = _libc.write.restype = ctypes.c_ssize_t


def host_driver() -> Driver:
    return HostDriver()


def cuda_driver() -> Driver:
    if cuda_device_count() == 0:
        pytest.skip("no GPU: the driver counts 0 devices")
    return CudaDriver(0)


ON_EACH_DRIVER = pytest.mark.parametrize(
    "make_driver",
    [
        pytest.param(host_driver, id="host"),
        pytest.param(cuda_driver, id="cuda", marks=pytest.mark.cuda),
    ],
)


def is_readable(address: int) -> bool:
    """Whether this process may read the byte; the kernel tries it, so a refusal is no crash."""
    reading, writing = os.pipe()
    try:
        return _allowed(_libc.write(writing, address, 1))
    finally:
        os.close(reading)
        os.close(writing)


def is_writable(address: int) -> bool:
    """Whether this process may write the byte, which is 0 afterwards if so."""
    zeros = os.open("/dev/zero", os.O_RDONLY)
    try:
        return _allowed(_libc.read(zeros, address, 1))
    finally:
        os.close(zeros)


def _allowed(result: int) -> bool:
    if result >= 0:
        return True
    assert ctypes.get_errno() == errno.EFAULT
    return False


def open_descriptors() -> Iterator[int]:
    """Numbers of the open descriptors of this process."""
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}") or os.path.islink(f"/proc/self/fd/{name}"):
            yield int(name)
