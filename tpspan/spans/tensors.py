"""Tensors over mapped memory, with an explicit device and a count of those that still live.

A tensor is made through DLPack (the DLPack specification, structs ``DLManagedTensor`` and
``DLTensor``): it names the device itself, where asking the driver for the owner of an address would
give the GPU of whichever rank owns the first page. Its deleter tells when the last view has gone.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

_CPU, _CUDA = 1, 2  # DLDeviceType
_UINT = 1  # DLDataTypeCode


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# What every live tensor needs: its struct, its shape, its range, and what it keeps alive.
_live: dict[int, tuple[_DLManagedTensor, Any, TensorRange, object]] = {}
_lock = threading.RLock()  # the collector may drop a tensor while one is being made


class TensorRange:
    """A range of addresses that hands out tensors and knows whether any of them still lives.

    Args:
        address, nbytes: the range.
        device: what the tensors say they are on, whoever owns the memory.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self._num_live = 0

    @property
    def num_live(self) -> int:
        """Handed-out tensors of which a view still lives."""
        return self._num_live

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        offset_bytes: int = 0,
        stride: Sequence[int] | None = None,
        *,
        keep: object,
    ) -> torch.Tensor:
        """A tensor over a part of the range; nothing is copied.

        Args:
            shape: its shape.
            dtype: any dtype of torch.
            offset_bytes: where it begins, a multiple of the element's size.
            stride: in elements; contiguous by default.
            keep: stays alive as long as any view of the tensor.

        Raises:
            ValueError: it would not lie inside the range, or is not aligned.
        """
        shape = tuple(int(size) for size in shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape} has a negative size")
        itemsize = dtype.itemsize
        if stride is not None and (len(stride) != len(shape) or any(step < 0 for step in stride)):
            raise ValueError(f"stride {tuple(stride)} does not fit shape {shape}")
        if stride is None or 0 in shape:
            numel = math.prod(shape)
        else:
            numel = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        nbytes = numel * itemsize
        if offset_bytes < 0 or offset_bytes + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes at offset {offset_bytes} do not lie inside {self.nbytes} bytes"
            )
        if offset_bytes % itemsize:
            raise ValueError(
                f"offset {offset_bytes} is not a multiple of the {itemsize} bytes of {dtype}"
            )
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        elements = self._bytes(offset_bytes, nbytes, keep).view(dtype)
        return elements.view(shape) if stride is None else elements.as_strided(shape, stride)

    def _bytes(self, offset_bytes: int, nbytes: int, keep: object) -> torch.Tensor:
        managed = _DLManagedTensor()
        shape = (ctypes.c_int64 * 1)(nbytes)
        tensor = managed.tensor
        tensor.data = self.address + offset_bytes
        tensor.device_type = _CUDA if self.device.type == "cuda" else _CPU
        tensor.device_id = self.device.index or 0
        tensor.ndim = 1
        tensor.code, tensor.bits, tensor.lanes = _UINT, 8, 1
        tensor.shape = shape
        managed.deleter = _DROPPED
        key = ctypes.addressof(managed)
        with _lock:
            _live[key] = (managed, shape, self, keep)
            self._num_live += 1
        return torch.utils.dlpack.from_dlpack(_new_capsule(key, b"dltensor", None))


@_DELETER
def _dropped(key: int) -> None:
    with _lock:
        _, _, tensor_range, _ = _live.pop(key)
        tensor_range._num_live -= 1


_DROPPED = ctypes.cast(_dropped, ctypes.c_void_p).value  # a cast takes as long as a struct


@atexit.register
def _forget_deleters() -> None:
    """Keep tensors that outlive the interpreter from calling back into it."""
    with _lock:
        for managed, *_ in _live.values():
            managed.deleter = None
