"""Which tensors of a publication lie where, and how its bytes are cut into blocks.

Every version of a publication has the same layout: readers flip blocks, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from tpspan.spans.layout import pack

MAX_BLOCKS = {"cuda": 12, "host": 64}
"""A reader pays for every block: 0.3 ms on CUDA to import it and put it in the place of another, on
the host 20 µs and a descriptor. A version pays for every block in which anything was written, so
that fewer would cost more memory where little changes. With 12, eight
readers that come at once have 16 GiB within 20 ms (with 24, within 29), and a version in which one
tensor has changed costs a twelfth: who changes little by little publishes in smaller blocks."""

_MAX_LISTED = 20


class Entry(NamedTuple):
    """Where one tensor lies.

    Attributes:
        names: all its names; more than one if it is tied.
        offset_bytes: of its first element in the range, a multiple of 256.
        shape, stride, dtype: of the tensor; strides in elements and without gaps.
    """

    names: tuple[str, ...]
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PublishedLayout:
    """Tensors packed into a range, and the blocks behind it.

    Attributes:
        entries: the tensors, by offset.
        sizes: bytes of the blocks, one after another; they cover the range.
        optional: names of tensors that a state dict does not hold, such as tables of frequencies.
    """

    entries: tuple[Entry, ...]
    sizes: tuple[int, ...]
    optional: frozenset[str] = frozenset()

    @classmethod
    def packed(
        cls,
        parts: Sequence[Entry],
        *,
        page_nbytes: int,
        backend: str,
        optional: Iterable[str] = (),
        block_nbytes: int | None = None,
    ) -> PublishedLayout:
        """Place tensors one after another, and cut the range into equal blocks.

        Args:
            parts: the tensors; their offsets do not matter.
            page_nbytes: of the driver.
            backend: ``cuda`` or ``host``: how many blocks there may be.
            optional: as the attribute.
            block_nbytes: size of the blocks, whole pages, if not chosen by the size of the whole.

        Raises:
            ValueError: the size of blocks is not whole pages.
        """
        offsets, nbytes = pack([part.nbytes for part in parts])
        num_pages = max(1, -(-nbytes // page_nbytes))
        if block_nbytes is None:
            block_nbytes = -(-num_pages // MAX_BLOCKS[backend]) * page_nbytes
        if block_nbytes <= 0 or block_nbytes % page_nbytes:
            raise ValueError(
                f"block_nbytes={block_nbytes} must be a multiple of the page of {page_nbytes} bytes"
            )
        whole = num_pages * page_nbytes
        sizes = tuple(min(block_nbytes, whole - at) for at in range(0, whole, block_nbytes))
        entries = tuple(
            Entry(part.names, offset, part.shape, part.stride, part.dtype)
            for part, offset in zip(parts, offsets, strict=True)
        )
        return cls(entries, sizes, frozenset(optional))

    @cached_property
    def span_nbytes(self) -> int:
        """Bytes of addresses."""
        return sum(self.sizes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each block begins."""
        at, offsets = 0, []
        for size in self.sizes:
            offsets.append(at)
            at += size
        return tuple(offsets)

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """The tensors by every one of their names."""
        return {name: entry for entry in self.entries for name in entry.names}

    def places_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """The blocks that hold some of these tensors, by number.

        Raises:
            KeyError: there is no tensor of that name.
        """
        places: set[int] = set()
        for name in names:
            if name not in self.by_name:
                raise KeyError(name)
            entry = self.by_name[name]
            begin, end = entry.offset_bytes, entry.offset_bytes + entry.nbytes
            places.update(
                place
                for place, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True))
                if offset < end and begin < min(offset + size, end)
            )
        return tuple(sorted(places))

    def encode(self) -> bytes:
        """The same bytes for the same layout, in any process."""
        # Columns are read in half the time of rows.
        columns = list(zip(*self.entries, strict=True)) or [()] * len(Entry._fields)
        columns[-1] = tuple(str(dtype).removeprefix("torch.") for dtype in columns[-1])
        document = [columns, self.sizes, sorted(self.optional)]
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> PublishedLayout:
        """The layout of ``encode``."""
        (names, offsets, shapes, strides, dtypes), sizes, optional = json.loads(encoded)
        known = {dtype: getattr(torch, dtype) for dtype in set(dtypes)}
        columns = (
            map(tuple, names),
            offsets,
            map(tuple, shapes),
            map(tuple, strides),
            map(known.__getitem__, dtypes),
        )
        entries = tuple(map(Entry._make, zip(*columns, strict=True)))
        return cls(entries, tuple(sizes), frozenset(optional))

    def differences(self, parts: Sequence[Entry]) -> list[str]:
        """Where other tensors are not of these names, shapes and types, in words for people."""
        theirs = {name: part for part in parts for name in part.names}
        found = []
        for name, entry in self.by_name.items():
            part = theirs.get(name)
            if part is None:
                found.append(f"{name} is missing")
            elif (part.shape, part.dtype) != (entry.shape, entry.dtype):
                found.append(
                    f"{name} is {part.shape} {part.dtype} and was {entry.shape} {entry.dtype}"
                )
            elif part.names != entry.names:
                found.append(f"{name} is tied to other names")
        found += [f"{name} is new" for name in theirs if name not in self.by_name]
        return found


def listed(differences: Sequence[str]) -> str:
    """Differences as one text, not endless."""
    rest = len(differences) - _MAX_LISTED
    more = f"; and {rest} more" if rest > 0 else ""
    return "; ".join(differences[:_MAX_LISTED]) + more
