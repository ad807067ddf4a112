"""Tensors over mapped memory, with an explicit device and a count of those that still live.

A tensor is made through DLPack (the DLPack specification, structs ``DLManagedTensor`` and
``DLTensor``): it names the device itself, where asking the driver for the owner of an address would
give the GPU of whichever rank owns the first page.

A weak reference to its storage tells when the last view has gone: torch keeps the Python object of
a storage as long as the storage (THPStorage, "PyObject preservation"), and with it what the object
refers to. A deleter in Python would not do: torch calls it while an exception is on its way, if a
tensor dies of that, and then neither the call nor the exception comes through.

Tensors die at any moment, and in any thread: in a collection in the middle of what is below, at the
recursion limit, while a signal waits for its handler. So nothing of Python runs then. What has gone
is put into a queue, and its struct is used again by whoever makes the next tensors; what lives is
asked of the references, and not counted. Each step on what threads share is one call of a list, a
dict or a deque, and none of them waits: there is no lock that a fork could leave locked.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
import weakref
from collections import deque
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
_pack_into = _MANAGED.pack_into
_NO_DELETER = 0
_END = 1 << 63  # of what DLPack can say

# Torch looks for the deleter when a storage goes, be it after the interpreter has ended: the
# structs lie in memory that is used again and never freed.
_NUM_STRUCTS = 256  # allocated at once
_calloc = ctypes.CDLL(None).calloc
_calloc.restype = ctypes.c_void_p
_calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

Part = tuple[Sequence[int], torch.dtype, int, Sequence[int]]
"""Shape, dtype, offset in bytes, and strides in elements of a tensor."""

_Place = tuple[int, memoryview]
"""Room for a struct: its address, and how it is written."""


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A storage over some range.

    Attributes:
        place: its struct.
        range: where it lies.
    """

    __slots__ = ("place", "range")

    place: _Place
    range: TensorRange


_free: list[_Place] = []
_gone: deque[_Ref] = deque()


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
        self._refs: dict[int, _Ref] = {}  # by the addresses of their structs

    @property
    def num_live(self) -> int:
        """Handed-out tensors of which a view still lives."""
        return sum(ref() is not None for ref in list(self._refs.values()))

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
            TypeError: a size, step or offset is no integer, or the dtype none of torch.
            ValueError: it would not lie inside the range, or is not aligned.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        shape = tuple(map(operator.index, shape))
        offset_bytes = operator.index(offset_bytes)
        if any(not 0 <= size < _END for size in shape):
            raise ValueError(f"shape {shape} has a negative size, or one that is too large")
        itemsize = dtype.itemsize
        if stride is not None:
            stride = tuple(map(operator.index, stride))
            if len(stride) != len(shape) or any(not 0 <= step < _END for step in stride):
                raise ValueError(f"stride {stride} does not fit shape {shape}")
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
        """Many tensors at once, as ``tensor`` makes them, in half the time for each.

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
        numbers = [
            number for shape, _, _, stride in parts for each in (shape, stride) for number in each
        ]
        shapes = (ctypes.c_int64 * len(numbers))(*numbers)  # torch copies them
        shape_at = ctypes.addressof(shapes)
        device_type = _CUDA if self.device.type == "cuda" else _CPU
        device = device_type, self.device.index or 0
        address = self.address
        made: list[torch.Tensor] = []
        _take_back()
        for shape, dtype, offset_bytes, _ in parts:
            ndim = len(shape)
            code, bits = _TYPES[dtype]
            stride_at = shape_at + 8 * ndim
            place = at, view = _place()  # from here on torch may have it, whatever happens
            first = address + offset_bytes
            dims = shape_at, stride_at
            _pack_into(view, 0, first, *device, ndim, code, bits, 1, *dims, 0, 0, _NO_DELETER)
            shape_at = stride_at + 8 * ndim
            tensor = _from_dlpack(_new_capsule(at, b"dltensor", None))
            storage = tensor.untyped_storage()
            storage._tpspan_needs = self, keep  # type: ignore[attr-defined]
            ref = _Ref(storage, _gone.append)
            ref.place, ref.range = place, self
            self._refs[at] = ref
            made.append(tensor)
        return made


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _place() -> _Place:
    """Room for a struct."""
    while True:
        try:
            return _free.pop()
        except IndexError:
            _free.extend(_new_places())


def _new_places() -> list[_Place]:
    block = _calloc(_NUM_STRUCTS, _MANAGED.size)
    if not block:
        raise MemoryError("no memory is left for the structs of tensors")
    struct_type = ctypes.c_char * _MANAGED.size
    return [
        (at, memoryview(struct_type.from_address(at)))
        for at in range(block, block + _NUM_STRUCTS * _MANAGED.size, _MANAGED.size)
    ]


def _take_back() -> None:
    """Let the structs of storages that have gone be used again."""
    while True:
        try:
            ref = _gone.popleft()
        except IndexError:
            return
        # in this order: another thread may use it at once
        ref.range._refs.pop(ref.place[0], None)
        _free.append(ref.place)
