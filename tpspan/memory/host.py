"""The driver for machines without a GPU: memfd for memory, ``mmap(MAP_FIXED)`` for mappings.

Two processes that map one memfd read the same pages, as two GPUs that map one allocation do. Where
Linux would allow more than CUDA (offsets into a memfd, unmapping a part), this driver refuses with
CUDA's error, so that code proven here is right there.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from tpspan.errors import DriverError, OutOfMemoryError
from tpspan.memory.advice import OUT_OF_MEMORY, advise
from tpspan.memory.driver import PAGE_NBYTES, Right

T = TypeVar("T")

_PROT = {Right.NONE: 0, Right.READ: 1, Right.READ_WRITE: 3}
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MREMAP_MOVE = 0x1 | 0x2 | 0x4  # MAYMOVE, FIXED, DONTUNMAP
_MAP_FAILED = ctypes.c_void_p(-1).value
_CUDA_INVALID_VALUE = 1
_CUDA_INVALID_HANDLE = 400
_ADDRESSES_NBYTES = 1 << 47  # what a process has, on every architecture that Linux runs torch on

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class _Memory:
    fd: int
    nbytes: int


class _Ranges:
    """Disjoint address ranges, found by any address in them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, address: int, nbytes: int) -> None:
        bisect.insort(self._starts, address)
        self._sizes[address] = nbytes

    def remove(self, address: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, address)]
        del self._sizes[address]

    def size_at(self, address: int) -> int | None:
        """The size of the range that starts at this very address."""
        return self._sizes.get(address)

    def overlapping(self, address: int, nbytes: int) -> bool:
        """Whether a range shares a byte with the given one."""
        at = bisect.bisect_right(self._starts, address) - 1
        for start in self._starts[max(at, 0) : at + 2]:
            if start < address + nbytes and address < start + self._sizes[start]:
                return True
        return False

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether the given range lies inside one of these."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return False
        start = self._starts[at]
        return address + nbytes <= start + self._sizes[start]


def _is_memfd(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # only memory files have seals
    except OSError:
        return False
    return True


class HostDriver:
    """``tpspan.memory.driver.Driver`` over memfd and mmap; see there for what the calls do."""

    name = "host"
    device = torch.device("cpu")
    page_nbytes = PAGE_NBYTES

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._handles = itertools.count(1)
        self._reserved = _Ranges()
        self._mapped = _Ranges()

    def reserve(self, nbytes: int) -> int:
        self._check_size("mmap", nbytes)
        address = self._addresses(nbytes)
        self._reserved.add(address, nbytes)
        return address

    def free(self, address: int, nbytes: int) -> None:
        whole = self._reserved.size_at(address) == nbytes
        if not whole or self._mapped.overlapping(address, nbytes):
            self._refuse("cuMemAddressFree", address=address, nbytes=nbytes)
        self._munmap(address, nbytes)
        self._reserved.remove(address)

    def create(self, nbytes: int, on_host: bool = False) -> int:
        self._check_size("memfd_create", nbytes)
        fd = self._system("memfd_create", lambda: os.memfd_create("tpspan"), nbytes=nbytes)
        try:
            self._system("ftruncate", lambda: os.ftruncate(fd, nbytes), nbytes=nbytes)
        except DriverError:
            os.close(fd)
            raise
        return self._keep(fd, nbytes)

    def release(self, handle: int) -> None:
        memory = self._memory("cuMemRelease", handle)
        del self._memories[handle]
        os.close(memory.fd)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        memory = self._memory("cuMemMap", handle)
        self._whole_pages("cuMemMap", address=address, nbytes=nbytes)
        inside = self._reserved.contains(address, nbytes)
        if memory.nbytes != nbytes or not inside or self._mapped.overlapping(address, nbytes):
            self._refuse("cuMemMap", address=address, nbytes=nbytes, block_nbytes=memory.nbytes)
        self._mmap(address, nbytes, fixed=True, fd=memory.fd, nbytes=nbytes)
        self._mapped.add(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        if self._mapped.size_at(address) != nbytes:
            self._refuse("cuMemUnmap", address=address, nbytes=nbytes)
        self._mmap(address, nbytes, fixed=True, nbytes=nbytes)
        self._mapped.remove(address)

    def is_mapped(self, address: int) -> bool:
        return self._mapped.size_at(address) is not None

    def protect(self, address: int, nbytes: int, right: Right) -> None:
        at = address
        while at < address + nbytes:
            size = self._mapped.size_at(at)
            if size is None:
                self._refuse("cuMemSetAccess", address=address, nbytes=nbytes)
            at += size
        if nbytes <= 0 or at != address + nbytes:
            self._refuse("cuMemSetAccess", address=address, nbytes=nbytes)
        if _libc.mprotect(address, nbytes, _PROT[right]):
            self._fail("mprotect", ctypes.get_errno(), address=address, nbytes=nbytes)

    def exchange(self, first: int, second: int, nbytes: int) -> bool:
        for address in (first, second):
            if self._mapped.size_at(address) != nbytes or first == second:
                self._refuse("mremap", address=address, nbytes=nbytes)
        # Moving the page tables of 64 MiB that were touched takes 40 µs; unmapping them takes 9 ms,
        # and finding all pages again 50.
        spare = self._addresses(nbytes)
        try:
            if not self._move(first, spare, nbytes):
                return False
            self._move(second, first, nbytes)
            try:
                self._move(spare, second, nbytes)
            except DriverError:
                self._move(first, second, nbytes)
                self._move(spare, first, nbytes)
                raise
        finally:
            self._munmap(spare, nbytes)
        return True

    def replace(self, address: int, nbytes: int, handle: int, right: Right) -> bool:
        return False

    def export_fd(self, handle: int) -> int:
        fd = self._memory("cuMemExportToShareableHandle", handle).fd
        return self._system("dup", lambda: os.dup(fd))

    def import_fd(self, fd: int, nbytes: int) -> int:
        call = "cuMemImportFromShareableHandle"
        size = self._system("fstat", lambda: os.fstat(fd)).st_size
        if size != nbytes or not _is_memfd(fd):
            self._refuse(call, fd=fd, nbytes=nbytes)
        return self._keep(self._system("dup", lambda: os.dup(fd)), nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_up(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy(target, source, nbytes)

    def memory_info(self) -> tuple[int, int]:
        with open("/proc/meminfo") as lines:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024

    def is_capturing(self, stream: int) -> bool:
        return False

    def _keep(self, fd: int, nbytes: int) -> int:
        handle = next(self._handles)
        self._memories[handle] = _Memory(fd, nbytes)
        return handle

    def _memory(self, call: str, handle: int) -> _Memory:
        memory = self._memories.get(handle)
        if memory is None:
            self._raise(call, _CUDA_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", {"handle": handle})
        return memory

    def _addresses(self, nbytes: int) -> int:
        """Whole pages of addresses without access."""
        # mmap aligns to 4 KiB only: take a page too much and give the ends back.
        loose = self._mmap(None, nbytes + PAGE_NBYTES, fixed=False, nbytes=nbytes)
        address = -(-loose // PAGE_NBYTES) * PAGE_NBYTES
        if address > loose:
            self._munmap(loose, address - loose)
        tail = loose + PAGE_NBYTES - address
        if tail:
            self._munmap(address + nbytes, tail)
        return address

    def _move(self, source: int, target: int, nbytes: int) -> bool:
        """Move a mapping; what was at the target goes, and the source is never free for others.

        Returns:
            False if the kernel cannot leave shared memory mapped at the source (before 5.13).
        """
        result: int = _libc.mremap(source, nbytes, nbytes, _MREMAP_MOVE, target)
        code = ctypes.get_errno()
        if result == _MAP_FAILED and code == errno.EINVAL:
            return False
        if result == _MAP_FAILED:
            self._fail("mremap", code, address=source, nbytes=nbytes)
        return True

    def _mmap(
        self, address: int | None, length: int, *, fixed: bool, fd: int = -1, nbytes: int
    ) -> int:
        flags = _MAP_SHARED if fd >= 0 else _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        if fixed:
            flags |= _MAP_FIXED
        result: int = _libc.mmap(address, length, _PROT[Right.NONE], flags, fd, 0)
        if result == _MAP_FAILED:
            self._fail("mmap", ctypes.get_errno(), address=address or 0, nbytes=nbytes)
        return result

    def _munmap(self, address: int, nbytes: int) -> None:
        if _libc.munmap(address, nbytes):
            self._fail("munmap", ctypes.get_errno(), address=address, nbytes=nbytes)

    def _check_size(self, call: str, nbytes: int) -> None:
        self._whole_pages(call, nbytes=nbytes)
        if nbytes >= _ADDRESSES_NBYTES:  # ctypes would cut a larger number to 64 bits
            self._fail(call, errno.ENOMEM, nbytes=nbytes)

    def _whole_pages(self, call: str, **arguments: int) -> None:
        for value in arguments.values():
            if value <= 0 or value % PAGE_NBYTES:
                self._refuse(call, **arguments)

    def _system(self, call: str, function: Callable[[], T], **arguments: int) -> T:
        try:
            return function()
        except OSError as error:
            self._fail(call, error.errno or 0, **arguments)

    def _refuse(self, call: str, **arguments: int) -> NoReturn:
        self._raise(call, _CUDA_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", arguments)

    def _fail(self, call: str, code: int, **arguments: int) -> NoReturn:
        self._raise(call, code, errno.errorcode.get(code, "UNKNOWN"), arguments)

    def _raise(self, call: str, code: int, code_name: str, arguments: dict[str, int]) -> NoReturn:
        advice = advise(call, code_name, arguments, PAGE_NBYTES)
        if code_name in OUT_OF_MEMORY:
            free, total = self.memory_info()
            raise OutOfMemoryError(
                call,
                code,
                code_name,
                arguments,
                advice,
                requested_nbytes=arguments.get("nbytes", 0),
                used_nbytes=total - free,
                free_nbytes=free,
            )
        raise DriverError(call, code, code_name, arguments, advice)
