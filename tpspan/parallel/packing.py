"""Tensors side by side in a block, and the header that tells the other side what they are.

Header of a block: 64-bit words in host memory. Word 0 says how many words there are; then for each
tensor a word with its dtype and its number of dims, and a word for each size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

ALIGNMENT = 256
HEADER_WORDS = 512
WORD_NBYTES = 8

Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype]

_NAMES = (
    "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool complex32 complex64 "
    "complex128 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2"
)
_DTYPES: tuple[torch.dtype | None, ...] = tuple(
    getattr(torch, name, None) for name in _NAMES.split()
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in its block.

    Attributes:
        offset_bytes, nbytes: its place.
        shape, dtype: what it is.
    """

    offset_bytes: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Packed:
    """All tensors of a slot, placed once for many slots.

    Attributes:
        places: of each, in order.
        specs: shape and dtype of each.
        end_bytes: where the last one ends.
        header: what the header of a slot says then, as it lies in memory.
    """

    places: tuple[Placed, ...] = ()
    specs: tuple[Spec, ...] = ()
    end_bytes: int = 0
    header: bytes = b""


class Packing:
    """Tensors one after another in ``nbytes``, each aligned to 256 bytes.

    Attributes:
        specs: shape and dtype of each, in order.
        end_bytes: where the last one ends.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._num_words = 1
        self.specs: list[Spec] = []
        self.end_bytes = 0

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Placed:
        """Take the next place.

        Raises:
            ValueError: it does not fit into the block, there are too many tensors for the header,
                or a size is negative.
            TypeError: a dtype that cannot be handed over.
        """
        sizes = tuple(map(int, shape))
        if dtype not in _CODES:
            raise TypeError(f"{dtype!r} is not a dtype that can be handed over")
        if sizes and min(sizes) < 0:
            raise ValueError(f"shape {sizes} has a negative size")
        nbytes = math.prod(sizes) * dtype.itemsize
        offset = -(-self.end_bytes // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > self._nbytes:
            raise ValueError(
                f"{nbytes} bytes at offset {offset} do not fit into a block of {self._nbytes} "
                "bytes: make the Handoff with a larger nbytes"
            )
        num_words = self._num_words + 1 + len(sizes)
        if num_words > HEADER_WORDS:
            raise ValueError(f"more than {len(self.specs)} tensors of these shapes in one slot")
        self._num_words = num_words
        self.end_bytes = offset + nbytes
        self.specs.append((sizes, dtype))
        return Placed(offset, nbytes, sizes, dtype)


def pack(nbytes: int, specs: Iterable[tuple[Sequence[int], torch.dtype]]) -> Packed:
    """Place these tensors in blocks of a size.

    Raises:
        As ``Packing.place``.
    """
    packing = Packing(nbytes)
    places = tuple(packing.place(shape, dtype) for shape, dtype in specs)
    packed = tuple(packing.specs)
    return Packed(places, packed, packing.end_bytes, as_bytes(encode(packed)))


def encode(specs: Sequence[Spec]) -> list[int]:
    """The words of a header."""
    words = [0]
    for shape, dtype in specs:
        words.append(_CODES[dtype] | len(shape) << 8)
        words.extend(shape)
    words[0] = len(words)
    return words


def as_bytes(words: Sequence[int]) -> bytes:
    """The words of a header as they lie in memory."""
    return b"".join(word.to_bytes(WORD_NBYTES, "little") for word in words)


def decode(words: Sequence[int]) -> tuple[Spec, ...]:
    """What ``encode`` was given.

    Raises:
        ValueError: these are not the words of a header.
    """
    specs: list[Spec] = []
    at = 1
    while at < len(words):
        code, num_dims = words[at] & 0xFF, words[at] >> 8
        dtype = _DTYPES[code] if code < len(_DTYPES) else None
        if dtype is None or at + num_dims >= len(words):
            raise ValueError("the header does not describe tensors")
        specs.append((tuple(words[at + 1 : at + 1 + num_dims]), dtype))
        at += 1 + num_dims
    return tuple(specs)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
