"""The header of a GGUF file: its fields, and where its tensors lie.

Read here, not by the gguf package, for two reasons: that reader makes Python objects of every token
of the vocabulary, two seconds for 50,000 of them, and on a damaged file it may count to 2**64.
Format: the GGUF specification of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

Value = int | float | bool | str


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes:
        shape: outermost dimension first, as in torch; the file has it the other way round.
        type_number: ggml's number of the type.
        offset_bytes: of its data, from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset_bytes: int


@dataclass(frozen=True)
class Header:
    """Fields with a single value (arrays are left out), and the tensors."""

    fields: dict[str, Value]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        ValueError: the file is no GGUF file, cut short inside the header, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ValueError("the file is empty") from error
        with data:
            return _Cursor(data).header()


class _Cursor:
    """A place in the header that moves on with every item."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = len(data)
        self._at = 0

    def header(self) -> Header:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF's magic bytes")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ValueError("it was written for machines of the other byte order")
        if version not in _VERSIONS:
            raise ValueError(f"its version {version} is none of {_VERSIONS}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Value] = {}
        for _ in range(num_fields):
            name = self._string()
            value = self._value(self._number("I"))
            if value is not None:
                fields[name] = value
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment {alignment!r} is not a positive number")
        base = -(-self._at // alignment) * alignment
        tensors = tuple(
            TensorInfo(name, shape, kind, base + offset) for name, shape, kind, offset in found
        )
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two of its tensors have the same name")
        return Header(fields, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"its tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Value | None:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        code = self._code(kind)
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _skip_array(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        elif kind == _ARRAY:
            for _ in range(count):
                self._skip_array()
        else:
            self._skip(count * struct.calcsize("<" + self._code(kind)))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it has a field of unknown type {kind}")
        return _SCALARS[kind]

    def _number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0])

    def _string(self) -> str:
        return self._take(self._number("Q")).decode(errors="replace")

    def _take(self, nbytes: int) -> bytes:
        begin = self._at
        self._skip(nbytes)
        return self._data[begin : self._at]

    def _skip(self, nbytes: int) -> None:
        if nbytes > self._end - self._at:
            raise ValueError(f"its header goes on beyond the end at byte {self._end}")
        self._at += nbytes
