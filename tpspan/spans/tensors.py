"""Tensors over mapped memory, with an explicit device and a count of those that still live.

A tensor is made through DLPack (the DLPack specification, structs ``DLManagedTensor`` and
``DLTensor``): it names the device itself, where asking the driver for the owner of an address would
give the GPU of whichever rank owns the first page. Its deleter tells when the last view has gone.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import struct
import threading
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack as _from_dlpack

_CPU, _CUDA = 1, 2  # DLDeviceType
# DLDataTypeCode and bits. What is not here, such as float8, is made as bytes, and then viewed.
_TYPES = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}
# DLManagedTensor: address, device type and number, dimensions, type code, bits, lanes, shape,
# strides, byte offset; manager, deleter. One pack takes as long as two assignments by ctypes.
_MANAGED = struct.Struct("@QiiiBBHQQQQQ")
_DELETER_AT = _MANAGED.size - 8

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

Part = tuple[Sequence[int], torch.dtype, int, Sequence[int]]
"""Shape, dtype, offset in bytes, and strides in elements of a tensor."""

# What every live tensor needs: its struct and its shape, its range, and what it keeps alive.
_live: dict[int, tuple[object, TensorRange, object]] = {}
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
        if dtype not in _TYPES:
            elements = self._made([((nbytes,), torch.uint8, offset_bytes, (1,))], keep)[0]
            elements = elements.view(dtype)
            return elements.view(shape) if stride is None else elements.as_strided(shape, stride)
        return self._made([(shape, dtype, offset_bytes, stride or _dense(shape))], keep)[0]

    def tensors(self, parts: Sequence[Part], *, keep: object) -> list[torch.Tensor]:
        """Many tensors at once, as ``tensor`` makes them, in a third of the time for each.

        Raises:
            ValueError: one of them would not lie inside the range, or is not aligned.
        """
        made: list[torch.Tensor | None] = []
        quick: list[Part] = []
        for shape, dtype, offset_bytes, stride in parts:
            last = 0
            for size, step in zip(shape, stride, strict=True):
                if size < 1 or step < 0:
                    last = -1
                    break
                last += (size - 1) * step
            end = offset_bytes + (last + 1) * dtype.itemsize
            unusual = last < 0 or dtype not in _TYPES or offset_bytes % dtype.itemsize
            if unusual or not 0 <= offset_bytes < end <= self.nbytes:
                made.append(self.tensor(shape, dtype, offset_bytes, stride, keep=keep))
            else:
                made.append(None)
                quick.append((shape, dtype, offset_bytes, stride))
        following = iter(self._made(quick, keep))
        return [next(following) if each is None else each for each in made]

    def _made(self, parts: Sequence[Part], keep: object) -> list[torch.Tensor]:
        """Tensors of parts that lie inside, of types that DLPack knows."""
        structs = (ctypes.c_uint64 * (len(parts) * _MANAGED.size // 8))()
        numbers = [
            number for shape, _, _, stride in parts for each in (shape, stride) for number in each
        ]
        shapes = (ctypes.c_int64 * len(numbers))(*numbers)
        at, shape_at = ctypes.addressof(structs), ctypes.addressof(shapes)
        device_type = _CUDA if self.device.type == "cuda" else _CPU
        device = device_type, self.device.index or 0
        pack, address = _MANAGED.pack_into, self.address
        for number, (shape, dtype, offset_bytes, _) in enumerate(parts):
            ndim = len(shape)
            code, bits = _TYPES[dtype]
            place = address + offset_bytes
            dims = shape_at, shape_at + 8 * ndim
            pack(
                structs,
                number * _MANAGED.size,
                place,
                *device,
                ndim,
                code,
                bits,
                1,
                *dims,
                0,
                0,
                _DROPPED,
            )
            shape_at += 16 * ndim
        keys = range(at, at + len(parts) * _MANAGED.size, _MANAGED.size)
        with _lock:
            _live.update(dict.fromkeys(keys, ((structs, shapes), self, keep)))
            self._num_live += len(parts)
        made: list[torch.Tensor] = []
        try:
            for key in keys:
                made.append(_from_dlpack(_new_capsule(key, b"dltensor", None)))
        except BaseException:
            with _lock:  # one that torch had taken over has been dropped
                left = [key for key in keys[len(made) :] if key in _live]
            for key in left:
                _dropped(key)
            raise
        return made


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _dropped(key: int) -> None:
    with _lock:
        _, tensor_range, _ = _live.pop(key)
        tensor_range._num_live -= 1


_deleter = _DELETER(_dropped)
_DROPPED = ctypes.cast(_deleter, ctypes.c_void_p).value  # a cast takes as long as a struct


@atexit.register
def _forget_deleters() -> None:
    """Keep tensors that outlive the interpreter from calling back into it."""
    with _lock:
        for key in _live:
            ctypes.c_uint64.from_address(key + _DELETER_AT).value = 0
