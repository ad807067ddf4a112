"""The driver for NVIDIA GPUs: the driver API's virtual memory management on the primary context.

Source of the rules: CUDA driver API reference, "Virtual Memory Management" and "Stream Management".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver as cu

from tpspan.errors import DriverError, OutOfMemoryError
from tpspan.memory.advice import OUT_OF_MEMORY, advise
from tpspan.memory.driver import PAGE_NBYTES, Right

_C: Any = torch._C
_IN_LAUNCH_NBYTES = 1024
_SUCCESS = cu.CUresult.CUDA_SUCCESS
_IMPLICIT = cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.value
_FLAGS = {
    Right.NONE: cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,
    Right.READ: cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
    Right.READ_WRITE: cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
}
_POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_ON_HOST = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA

_REMAP = ("cuMemUnmap", "cuMemMap", "cuMemSetAccess")  # in this order


def check(call: str, result: tuple[Any, ...], **arguments: object) -> Any:
    """Return the values of a driver call, or raise what it failed with, with advice.

    Args:
        call: the function's name.
        result: what the binding returned: the code, then the values.
        arguments: the arguments that matter, for the error.

    Raises:
        OutOfMemoryError: no memory is left.
        DriverError: any other failure.
    """
    code, *values = result
    if code != _SUCCESS:
        _raise(call, int(code), code.name, arguments)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _raise(call: str, code: int, code_name: str, arguments: dict[str, object]) -> None:
    advice = advise(call, code_name, arguments, PAGE_NBYTES)
    if code_name in OUT_OF_MEMORY:
        known, *sizes = cu.cuMemGetInfo()  # fails on a thread without a context
        free, total = sizes if known == _SUCCESS else (0, 0)
        requested = arguments.get("nbytes", 0)
        raise OutOfMemoryError(
            call,
            code,
            code_name,
            arguments,
            advice,
            requested_nbytes=requested if isinstance(requested, int) else 0,
            used_nbytes=total - free,
            free_nbytes=free,
        )
    raise DriverError(call, code, code_name, arguments, advice)


def _initialise() -> None:
    try:
        result = cu.cuInit(0)
    except RuntimeError as error:  # the binding found no libcuda.so.1
        arguments = {"reason": str(error).splitlines()[0]}
        advice = advise("cuInit", "NO_DRIVER", arguments, PAGE_NBYTES)
        raise DriverError("cuInit", -1, "NO_DRIVER", arguments, advice) from None
    check("cuInit", result)


def cuda_device_count() -> int:
    """Return how many GPUs this process sees; 0 without a driver or a GPU."""
    try:
        _initialise()
        return int(check("cuDeviceGetCount", cu.cuDeviceGetCount()))
    except DriverError:
        return 0


def device_uuid(index: int) -> str:
    """Return the UUID of a GPU, the same in every process whatever it calls the GPU.

    Raises:
        DriverError: there is no such GPU.
    """
    _initialise()
    device = check("cuDeviceGet", cu.cuDeviceGet(index), index=index)
    return bytes(check("cuDeviceGetUuid", cu.cuDeviceGetUuid(device)).bytes).hex()


@dataclass(frozen=True)
class _Memory:
    nbytes: int
    on_host: bool


class _Current:
    """Pushes a context unless it is the current one already, which costs a tenth."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        now = check("cuCtxGetCurrent", cu.cuCtxGetCurrent())
        self._pushed = int(now) != int(self._context)
        if self._pushed:
            check("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            check("cuCtxPopCurrent", cu.cuCtxPopCurrent())


class CudaDriver:
    """``tpspan.memory.driver.Driver`` of one GPU; see there for what the calls do.

    Any thread may call: where a call needs a context, the primary one, which torch uses too, is
    made current around it and what was current before is put back.

    Attributes:
        remap: ``tpspan.kernels.host_remap.remap``, from who has imported it anyway; without it
            ``replace`` does nothing. Who only attaches to what others publish need not wait for it.
    """

    remap: Callable[..., tuple[int, int]] | None = None

    name = "cuda"
    page_nbytes = PAGE_NBYTES

    def __init__(self, index: int) -> None:
        _initialise()
        self.device = torch.device("cuda", index)
        self._device = check("cuDeviceGet", cu.cuDeviceGet(index), index=index)
        self._context = check(
            "cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._device), index=index
        )
        self._require(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        )
        self._require(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        numa = self._attribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)
        self._numa_node = max(numa, 0)  # -1 on machines that do not say: their only node is 0
        self._accesses = {
            (right, on_host): self._access(right, on_host)
            for right in Right
            for on_host in (False, True)
        }
        # Every hand-over asks; the binding takes three times as long.
        library = ctypes.CDLL("libcuda.so.1")
        self._ask_capture = library.cuStreamIsCapturing
        self._ask_capture.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._remap_calls = tuple(
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _REMAP
        )
        self._blocks: dict[int, _Memory] = {}
        self._mapped: dict[int, _Memory] = {}
        granularity = check(
            "cuMemGetAllocationGranularity",
            cu.cuMemGetAllocationGranularity(
                self._properties(on_host=False),
                cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            ),
        )
        if PAGE_NBYTES % granularity:
            raise DriverError(
                "cuMemGetAllocationGranularity",
                0,
                "UNEXPECTED_GRANULARITY",
                {"granularity": granularity},
                f"tpspan's page of {PAGE_NBYTES} bytes must be a multiple of it",
            )

    def reserve(self, nbytes: int) -> int:
        self._whole_pages("cuMemAddressReserve", nbytes)
        return int(
            check(
                "cuMemAddressReserve",
                cu.cuMemAddressReserve(nbytes, PAGE_NBYTES, 0, 0),
                nbytes=nbytes,
            )
        )

    def free(self, address: int, nbytes: int) -> None:
        check(
            "cuMemAddressFree",
            cu.cuMemAddressFree(address, nbytes),
            address=address,
            nbytes=nbytes,
        )

    def create(self, nbytes: int, on_host: bool = False) -> int:
        self._whole_pages("cuMemCreate", nbytes)
        with self.current():
            result = cu.cuMemCreate(nbytes, self._properties(on_host), 0)
            handle = int(check("cuMemCreate", result, nbytes=nbytes, on_host=on_host))
        self._blocks[handle] = _Memory(nbytes, on_host)
        return handle

    def release(self, handle: int) -> None:
        self._live("cuMemRelease", handle)
        check("cuMemRelease", cu.cuMemRelease(handle), handle=handle)
        del self._blocks[handle]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        block = self._live("cuMemMap", handle)
        if block.nbytes != nbytes:  # the driver would call a part of a block "not supported"
            self._refuse("cuMemMap", address=address, nbytes=nbytes, block_nbytes=block.nbytes)
        check(
            "cuMemMap",
            cu.cuMemMap(address, nbytes, 0, handle, 0),
            address=address,
            nbytes=nbytes,
        )
        self._mapped[address] = block

    def unmap(self, address: int, nbytes: int) -> None:
        block = self._mapped.get(address)
        if block is None or block.nbytes != nbytes:  # the driver would take several at once
            self._refuse("cuMemUnmap", address=address, nbytes=nbytes)
        check("cuMemUnmap", cu.cuMemUnmap(address, nbytes), address=address, nbytes=nbytes)
        del self._mapped[address]

    def is_mapped(self, address: int) -> bool:
        return address in self._mapped

    def protect(self, address: int, nbytes: int, right: Right) -> None:
        block = self._mapped.get(address)
        access = self._accesses[right, block is not None and block.on_host]
        check(
            "cuMemSetAccess",
            cu.cuMemSetAccess(address, nbytes, access, len(access)),
            address=address,
            nbytes=nbytes,
            right=right.value,
        )

    def exchange(self, first: int, second: int, nbytes: int) -> bool:
        return False

    def replace(self, address: int, nbytes: int, handle: int, right: Right) -> bool:
        there, block = self._mapped.get(address), self._live("cuMemMap", handle)
        if self.remap is None or right is Right.NONE:
            return False
        if there is None or there.on_host or block.on_host:
            return False
        if not there.nbytes == block.nbytes == nbytes:
            self._refuse("cuMemMap", address=address, nbytes=nbytes, block_nbytes=block.nbytes)
        (access,) = self._accesses[right, False]
        unmap, map_, protect = self._remap_calls
        at = access.getPtr()
        done, code = self.remap(unmap, map_, protect, address, nbytes, handle, at, 1)
        if done > 1:
            self._mapped[address] = block
        elif done:
            del self._mapped[address]
        if code:
            check(_REMAP[done], (cu.CUresult(code),), address=address, nbytes=nbytes)
        return True

    def export_fd(self, handle: int) -> int:
        self._live("cuMemExportToShareableHandle", handle)
        result = cu.cuMemExportToShareableHandle(handle, _POSIX, 0)
        return int(check("cuMemExportToShareableHandle", result, handle=handle))

    def import_fd(self, fd: int, nbytes: int) -> int:
        call = "cuMemImportFromShareableHandle"
        with self.current():
            result = cu.cuMemImportFromShareableHandle(fd, _POSIX)
            handle = int(check(call, result, fd=fd, nbytes=nbytes))
            found = cu.cuMemGetAllocationPropertiesFromHandle(handle)
            if found[0] != _SUCCESS:
                cu.cuMemRelease(handle)
            properties = check("cuMemGetAllocationPropertiesFromHandle", found)
        self._blocks[handle] = _Memory(nbytes, properties.location.type != _ON_DEVICE)
        return handle

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        # The default stream is that of whatever context is current; other streams have one.
        is_there = stream or _C._cuda_getDevice() == self.device.index
        if is_there and cu.cuMemcpyAsync(target, source, nbytes, stream)[0] == _SUCCESS:
            return
        with self.current():
            check(
                "cuMemcpyAsync",
                cu.cuMemcpyAsync(target, source, nbytes, stream),
                target=target,
                source=source,
                nbytes=nbytes,
            )

    def copy_up(self, target: int, source: int, nbytes: int, stream: int) -> None:
        # The driver puts up to 1024 bytes into the launch itself, and the GPU's processors write
        # them: where processes share the GPU that waits for a time slice, 150 µs. With several rows
        # it does not, and any number of bytes may be taken for rows.
        if not 1 < nbytes <= _IN_LAUNCH_NBYTES:
            self.copy(target, source, nbytes, stream)
            return
        num_rows = next(n for n in range(2, nbytes + 1) if nbytes % n == 0)
        rows = cu.CUDA_MEMCPY2D()
        rows.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
        rows.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        rows.srcHost, rows.dstDevice, rows.Height = source, target, num_rows
        rows.srcPitch = rows.dstPitch = rows.WidthInBytes = nbytes // num_rows
        with self.current():
            copied = cu.cuMemcpy2DAsync(rows, stream)
        check("cuMemcpy2DAsync", copied, target=target, source=source, nbytes=nbytes)

    def memory_info(self) -> tuple[int, int]:
        with self.current():
            free, total = check("cuMemGetInfo", cu.cuMemGetInfo())
        return int(free), int(total)

    def is_capturing(self, stream: int) -> bool:
        index = self.device.index
        if _C._cuda_getDevice() == index and _C._cuda_getCurrentRawStream(index) == stream:
            # torch asks in a third of the time, but fails where the driver says "implicit", below.
            with contextlib.suppress(RuntimeError):
                return bool(_C._cuda_isCurrentStreamCapturing())
        status = ctypes.c_int()
        code = self._ask_capture(stream, ctypes.byref(status))
        if code not in (0, _IMPLICIT):  # this thread may have no context
            with self.current():
                code = self._ask_capture(stream, ctypes.byref(status))
        if code == _IMPLICIT:
            return True  # the legacy stream, while another stream is being captured
        check("cuStreamIsCapturing", (cu.CUresult(code),), stream=stream)
        return bool(status.value)

    def current(self) -> _Current:
        """Make the primary context current on this thread for a ``with`` block."""
        return _Current(self._context)

    def _properties(self, on_host: bool) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _POSIX
        properties.location.type = _ON_HOST if on_host else _ON_DEVICE
        properties.location.id = self._numa_node if on_host else int(self._device)
        return properties

    def _access(self, right: Right, on_host: bool) -> list[Any]:
        """Who may do what; memory of the host may be used by the CPU too."""
        locations = [(_ON_DEVICE, int(self._device)), (_ON_HOST, self._numa_node)]
        descriptions = []
        for kind, index in locations[: 1 + on_host]:
            access = cu.CUmemAccessDesc()
            access.location.type = kind
            access.location.id = index
            access.flags = _FLAGS[right]
            descriptions.append(access)
        return descriptions

    @staticmethod
    def _whole_pages(call: str, nbytes: int) -> None:
        # The binding would raise an OverflowError for a negative size.
        if nbytes <= 0 or nbytes % PAGE_NBYTES:
            check(call, (cu.CUresult.CUDA_ERROR_INVALID_VALUE,), nbytes=nbytes)

    def _live(self, call: str, handle: int) -> _Memory:
        if handle not in self._blocks:
            invalid = cu.CUresult.CUDA_ERROR_INVALID_HANDLE
            check(call, (invalid,), handle=handle)
        return self._blocks[handle]

    def _refuse(self, call: str, **arguments: int) -> None:
        check(call, (cu.CUresult.CUDA_ERROR_INVALID_VALUE,), **arguments)

    def _attribute(self, attribute: Any) -> int:
        return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute, self._device)))

    def _require(self, attribute: Any) -> None:
        if not self._attribute(attribute):
            check(
                "cuMemCreate",
                (cu.CUresult.CUDA_ERROR_NOT_SUPPORTED,),
                device=str(self.device),
                lacks=attribute.name,
            )
