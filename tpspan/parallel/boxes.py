"""Ranges of a tensor's memory as boxes of its indices: arithmetic alone.

A rank owns pages, hence ranges of bytes that begin and end anywhere in a tensor. Checkpoints are
read by index. A box, one slice for each dimension, is what both understand: every range of an array
is a few boxes, whatever the order of its dimensions in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[slice, ...]
"""One slice with explicit start and stop for each dimension."""


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost to the innermost in memory."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cut the flat range [begin, end) of a row-major array into boxes, in order.

    There are at most ``2 * len(shape) - 1`` of them.
    """
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    first, first_at = divmod(begin, inner)
    last, last_at = divmod(end, inner)
    if first == last:
        for box in boxes(inner_shape, first_at, last_at):
            yield (slice(first, first + 1), *box)
        return
    if first_at:
        for box in boxes(inner_shape, first_at, inner):
            yield (slice(first, first + 1), *box)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in inner_shape))
    if last_at:
        for box in boxes(inner_shape, 0, last_at):
            yield (slice(last, last + 1), *box)


def boxes_in_memory(
    shape: Sequence[int], stride: Sequence[int], begin: int, end: int, chunk: int
) -> Iterator[Box]:
    """Cut the elements [begin, end) of a dense tensor, counted as they lie in memory, into boxes.

    Args:
        shape, stride: of the tensor, in elements.
        begin, end: elements from the tensor's first in memory.
        chunk: the most elements in one box.
    """
    order = memory_order(shape, stride)
    physical = [shape[dim] for dim in order]
    for at in range(begin, end, chunk):
        for box in boxes(physical, at, min(at + chunk, end)):
            by_dim = dict(zip(order, box, strict=True))
            yield tuple(by_dim[dim] for dim in range(len(shape)))


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of what a box selects."""
    return tuple(part.stop - part.start for part in box)
