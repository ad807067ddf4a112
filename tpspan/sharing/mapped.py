"""Blocks of a layout behind one range of addresses, changed whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from tpspan.errors import ClosedError, DriverError, OutOfMemoryError
from tpspan.memory import ADDRESS_SPACE_LOCK, Block, Right
from tpspan.memory.advice import advise
from tpspan.memory.closing import close_each
from tpspan.sharing.layout import Entry, PublishedLayout
from tpspan.sharing.local import Local
from tpspan.spans.table import SpanBlock, Table
from tpspan.spans.tensors import TensorRange


class Mapped:
    """A range for a layout in this process, and the blocks that it owns.

    Args:
        place: the device that uses it.
        layout: what lies there; some of its blocks may stay away.

    Attributes:
        range: hands out tensors, and counts those that live.
    """

    def __init__(self, place: Local, layout: PublishedLayout) -> None:
        self._place, self._layout = place, layout
        self._table = Table(place.driver, layout.span_nbytes)
        self._numbers = itertools.count()
        self._blocks: dict[int, SpanBlock] = {}
        address = self._table.reservation.address
        self.range = TensorRange(address, layout.span_nbytes, place.device)
        self._inner = TensorRange(address, layout.span_nbytes, place.device)

    @property
    def address(self) -> int:
        """Where the range begins."""
        return self.range.address

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of the blocks that are mapped."""
        return tuple(sorted(self._blocks))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that are mapped."""
        return tuple(each.block for each in self._blocks.values())

    def block(self, place: int) -> Block:
        """The block with a number."""
        return self._blocks[place].block

    def tensor(self, entry: Entry, *, keep: object) -> torch.Tensor:
        """A tensor of the layout."""
        if not entry.nbytes:
            return torch.empty_strided(
                entry.shape, entry.stride, dtype=entry.dtype, device=self._place.device
            )
        return self.range.tensor(
            entry.shape, entry.dtype, entry.offset_bytes, entry.stride, keep=keep
        )

    def tensors(self, entries: Sequence[Entry], *, keep: object) -> list[torch.Tensor]:
        """Many tensors of the layout, in less time."""
        parts = [(e.shape, e.dtype, e.offset_bytes, e.stride) for e in entries]
        return self.range.tensors(parts, keep=keep)

    def words(self, place: int) -> torch.Tensor:
        """A block as integers of 64 bits; not counted as a tensor that lives."""
        offset, nbytes = self._layout.offsets[place], self._layout.sizes[place]
        return self._inner.tensor((nbytes // 8,), torch.int64, offset, keep=None)

    def place_all(self, blocks: Mapping[int, Block], right: Right) -> None:
        """Map blocks where nothing is mapped; if that fails, close the whole."""
        with ADDRESS_SPACE_LOCK:
            for place in sorted(blocks):
                self._blocks[place] = made = self._numbered(blocks[place])
                self._table.place(self._layout.offsets[place], made)
            self.protect(blocks, right)

    def replace(self, blocks: Mapping[int, Block]) -> dict[int, Block]:
        """Put other blocks in the place of those there, all or none; rights stay.

        The caller has waited for everything that uses the range (invariant 5).

        Returns:
            The blocks that were there, which are the caller's now.

        Raises:
            DriverError: the driver refused; the blocks are where they were.
        """
        self.check()
        moves = [
            (self._layout.offsets[place], self._numbered(blocks[place])) for place in sorted(blocks)
        ]
        with ADDRESS_SPACE_LOCK:
            self._table.replace(moves)
            old = {place: self._blocks[place].block for place in blocks}
            self._blocks.update(zip(sorted(blocks), (block for _, block in moves), strict=True))
        return old

    def protect(self, places: Iterable[int], right: Right) -> None:
        """Set the right of blocks, in as few calls as can be."""
        for offset, nbytes in self._joined(sorted(places)):
            self._table.reservation.protect(right, offset, nbytes)

    def check(self) -> None:
        """Refuse to go on after a change that was neither made nor taken back.

        Raises:
            ClosedError: that has happened.
        """
        if self._table.is_broken:
            raise ClosedError("a mapping was lost in a failed change: close it, and begin anew")

    def close(self, *, keep: Iterable[Block] = ()) -> None:
        """Unmap and close everything but some blocks; all is tried, the first failure raised."""
        kept = {id(block) for block in keep}
        blocks = [each.block for each in self._blocks.values() if id(each.block) not in kept]
        self._blocks.clear()
        close_each([self._table.close, *(block.close for block in blocks)])

    def _numbered(self, block: Block) -> SpanBlock:
        return SpanBlock(next(self._numbers), 0, block)

    def _joined(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """Ranges of blocks that follow each other: an access call costs more than a map."""
        joined: list[tuple[int, int]] = []
        for place in places:
            offset, nbytes = self._layout.offsets[place], self._layout.sizes[place]
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((offset, nbytes))
        return joined


def close_blocks(blocks: list[Block]) -> None:
    """Close blocks that nothing needs; one that cannot be closed stays in the list.

    Raises:
        DriverError: the first failure, after all were tried.
    """
    for block in tuple(blocks):
        with contextlib.suppress(DriverError):
            block.close()
            blocks.remove(block)
    if blocks:
        blocks[0].close()


def create_blocks(place: Local, sizes: Mapping[int, int]) -> dict[int, Block]:
    """New memory for blocks, or none of it.

    Raises:
        OutOfMemoryError: there is not enough; nothing is held.
    """
    blocks: dict[int, Block] = {}
    if place.backend == "host":
        _check_free(place, sum(sizes.values()))
    try:
        for number in sorted(sizes):
            blocks[number] = Block.create(place.driver, sizes[number])
    except BaseException:
        close_each(block.close for block in blocks.values())
        raise
    return blocks


def _check_free(place: Local, nbytes: int) -> None:
    """Linux gives memory of the host at the first write, and ends a process for which it has none:
    refuse before that."""
    free, total = place.driver.memory_info()
    if nbytes > free:
        raise OutOfMemoryError(
            "memfd_create",
            errno.ENOMEM,
            "ENOMEM",
            {"nbytes": nbytes},
            advise("memfd_create", "ENOMEM", {}, place.driver.page_nbytes),
            requested_nbytes=nbytes,
            used_nbytes=total - free,
            free_nbytes=free,
        )
