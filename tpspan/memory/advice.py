"""What usually causes a failure of the memory driver, and what to do about it: all in one place.

The first rule that fits is the answer. Names are those of the CUDA driver API; the host backend's
system errors are told by their errno names, and its own refusals borrow CUDA's names.
"""

from __future__ import annotations

from collections.abc import Mapping

_BY_CALL = {
    ("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE"): (
        "A block is unmapped whole: give exactly the address and size of one map call"
    ),
    ("cuMemMap", "CUDA_ERROR_INVALID_VALUE"): (
        "A block is mapped whole, into reserved addresses where nothing is mapped yet"
    ),
    ("mremap", "CUDA_ERROR_INVALID_VALUE"): (
        "Two different blocks of one size trade places: give the addresses and the size of their "
        "map calls"
    ),
    ("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE"): (
        "A reservation is freed whole, after everything in it was unmapped"
    ),
    ("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE"): (
        "Every page of the range must be mapped, and this GPU must be able to reach the GPU that "
        "owns the memory: check peer access with `nvidia-smi topo -p2p r`"
    ),
    ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE"): (
        "The size must be a positive multiple of the granularity"
    ),
    ("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED"): (
        "Fabric handles need the fabric service (nvidia-imex) even where the attribute says they "
        "are supported; use POSIX descriptors inside one host"
    ),
    ("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED"): (
        "This GPU or driver offers no exportable virtual memory; the host backend works everywhere"
    ),
    ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE"): (
        "The descriptor is not one of GPU memory, or its creator used another kind of handle"
    ),
    ("cuMemImportFromShareableHandle", "CUDA_ERROR_UNKNOWN"): (
        "The descriptor is not one of GPU memory"
    ),
    ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_DEVICE"): (
        "The memory lies on a GPU that this driver cannot see; all ranks of a domain must run on "
        "one host and in containers that share its GPUs"
    ),
}

_BY_CODE = {
    "CUDA_ERROR_INVALID_HANDLE": "The block was released already, or belongs to another driver",
    "CUDA_ERROR_INVALID_DEVICE": (
        "The device does not exist here: check CUDA_VISIBLE_DEVICES and the device index"
    ),
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": (
        "The GPUs cannot reach each other's memory: check `nvidia-smi topo -p2p r`"
    ),
    "CUDA_ERROR_NOT_PERMITTED": (
        "The driver forbids this here, often because of a container's limits"
    ),
    "CUDA_ERROR_NO_DEVICE": (
        "The driver sees no GPU. In a container, start it with GPU access (--gpus all); otherwise "
        "check CUDA_VISIBLE_DEVICES"
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        "The system refused a descriptor: the limit of open files may be reached (ulimit -n)"
    ),
    "NO_DRIVER": (
        "No CUDA driver (libcuda.so.1) is installed here. In a container, start it with GPU "
        "access; on a machine without a GPU use backend='host'"
    ),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        "A kernel touched memory that is not mapped or may not be written, and the context is "
        "lost: start the process again"
    ),
    "EMFILE": (
        "This process has no file descriptor left: raise the limit (ulimit -n), close spans, or "
        "use fewer and larger blocks"
    ),
    "ENFILE": "The system has no file descriptor left",
    "EACCES": "The block was shared read-only: it cannot be mapped for writing",
    "EBADF": "The descriptor is closed, or is not one of memory",
}

_MEMORY = (
    "Not enough memory is left: close spans or pools that hold blocks, use a smaller span, or "
    "spread it over more ranks"
)

OUT_OF_MEMORY = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "ENOMEM", "ENOSPC", "EFBIG"})


def advise(call: str, code_name: str, arguments: Mapping[str, object], page_nbytes: int) -> str:
    """Return one sentence of advice for a failed call, or an empty string."""
    if code_name in OUT_OF_MEMORY:
        return _MEMORY
    if code_name == "CUDA_ERROR_INVALID_VALUE":
        for name in ("nbytes", "address"):
            value = arguments.get(name)
            if isinstance(value, int) and (value <= 0 or value % page_nbytes):
                return f"{name} must be a positive multiple of the page of {page_nbytes} bytes"
    return _BY_CALL.get((call, code_name)) or _BY_CODE.get(code_name, "")
