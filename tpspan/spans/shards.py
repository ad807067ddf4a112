"""Rows and shards: how a shape is cut, and a rank's pages of a striped span side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tpspan.memory import PAGE_NBYTES, Driver, Right
from tpspan.spans.layout import Layout, balanced
from tpspan.spans.table import SpanBlock, Table
from tpspan.spans.tensors import TensorRange

_ADDRESSES_NBYTES = 1 << 47  # what a process can address


def as_tuple(value: Any) -> Any:
    """A sequence as a tuple; anything else as it is, for ``plan_layout`` to refuse."""
    return tuple(value) if isinstance(value, Iterable) else value


def plan_layout(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    world_size: int,
    layout: str | Layout,
    rows: tuple[int, ...] | None,
    stripe_nbytes: int,
) -> tuple[Layout, tuple[int, ...] | None]:
    """Check the arguments of an allocation and make its layout.

    Returns:
        The layout, and the rows of dim 0 per rank of a blocked one.

    Raises:
        ValueError: they do not fit together.
        TypeError: an argument is of another kind.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    if not isinstance(shape, tuple) or any(not isinstance(size, int) for size in shape):
        raise TypeError(f"shape must be a sequence of whole numbers, not {shape!r}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} must be of sizes that are not negative")
    if rows is not None and not isinstance(rows, tuple):
        raise TypeError(f"rows must be a sequence of whole numbers, not {rows!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _ADDRESSES_NBYTES:
        raise ValueError(f"the {nbytes} bytes of shape {shape} exceed the addresses of a process")
    if isinstance(layout, Layout):
        if rows is not None:
            raise ValueError("rows go with layout='blocked' only")
        if (layout.nbytes, layout.world_size) != (nbytes, world_size):
            raise ValueError(
                f"the layout is for {layout.nbytes} bytes on {layout.world_size} ranks, not for "
                f"{nbytes} bytes on {world_size}"
            )
        if layout.page_nbytes != PAGE_NBYTES:
            raise ValueError(f"the layout's page must be {PAGE_NBYTES} bytes")
        return layout, None
    if layout == "striped":
        if rows is not None:
            raise ValueError("rows go with layout='blocked' only")
        striped = Layout.striped(
            nbytes, world_size, stripe_nbytes=stripe_nbytes, page_nbytes=PAGE_NBYTES
        )
        return striped, None
    if layout != "blocked":
        raise ValueError(f"layout must be 'blocked', 'striped' or a Layout, not {layout!r}")
    num_rows = shape[0] if shape else 1
    rows = balanced(num_rows, world_size) if rows is None else rows
    if len(rows) != world_size or sum(rows) != num_rows or any(count < 0 for count in rows):
        raise ValueError(f"rows {rows} do not cut {num_rows} rows among {world_size} ranks")
    row_nbytes = nbytes // num_rows if num_rows else 0
    sizes = [count * row_nbytes for count in rows]
    return Layout.blocked(sizes, page_nbytes=PAGE_NBYTES), rows


class ShardView:
    """The pages of a rank's shard, mapped a second time, side by side: same memory, other order.

    Args:
        driver, table, layout, rank: where the pages are, and whose shard is meant. Rights are taken
            over from the table.

    Raises:
        ValueError: the shard does not consist of whole runs of the layout.
    """

    def __init__(self, driver: Driver, table: Table, layout: Layout, rank: int) -> None:
        if not layout.shard_is_owned(rank):
            raise ValueError("the shard has bytes on other ranks' pages; use layout.shards")
        runs = layout.runs_of(rank)
        self._nbytes = layout.shard_nbytes(rank)
        self._offsets: dict[int, int] = {}
        at = 0
        for run in runs:
            self._offsets[run.offset_bytes] = at
            at += run.nbytes
        self.table = Table(driver, max(at, PAGE_NBYTES))
        try:
            for offset, own_offset in self._offsets.items():
                self.table.place(own_offset, table.block_at(offset))
            rights = [(table.right_at(run.offset_bytes), run) for run in runs]
            for right, group in itertools.groupby(rights, lambda pair: pair[0]):
                same = [run for _, run in group]
                start = same[0].offset_bytes
                self.protect(right, start, same[-1].end - start)
        except BaseException:
            self.table.close()
            raise
        self.range = TensorRange(self.table.reservation.address, self._nbytes, driver.device)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, keep: object) -> torch.Tensor:
        """The shard as rows of ``shape[1:]`` if whole rows lie together, else in one dimension."""
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        rest = tuple(shape[1:])
        cuts = (self._nbytes, *self._offsets, *self._offsets.values())
        if not row_nbytes or any(at % row_nbytes for at in cuts):
            row_nbytes, rest = dtype.itemsize, ()
        return self.range.tensor((self._nbytes // row_nbytes, *rest), dtype, keep=keep)

    def protect(self, right: Right, offset_bytes: int, nbytes: int) -> None:
        """Set the right of this mapping's part of a range of the span."""
        starts = [own for at, own in self._offsets.items() if 0 <= at - offset_bytes < nbytes]
        if starts:
            end = starts[-1] + self.table.block_at(starts[-1]).nbytes
            self.table.reservation.protect(right, starts[0], end - starts[0])

    def moves(self, moves: Sequence[tuple[int, SpanBlock]]) -> list[tuple[int, SpanBlock]]:
        """The same moves in this mapping: those at offsets of this shard."""
        return [(self._offsets[at], block) for at, block in moves if at in self._offsets]

    def close(self) -> None:
        """Unmap the second mapping."""
        self.table.close()
