"""Which rank owns which pages of a span, and which bytes are whose shard: arithmetic alone.

Two things are kept apart. *Pages* have one owner each (invariant 1); a run of pages of one owner
becomes one block. *Shards* are the bytes that logically belong to a rank and may be cut anywhere. A
page goes to the rank whose shard covers most of it; the few bytes of a shard on a neighbour's page
are written in place, over the link.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

MAX_RUN_NBYTES = 1 << 30
"""A longer run of pages is cut into several blocks, so that no block needs a huge free range."""


@dataclass(frozen=True)
class Run:
    """Consecutive pages of one owner, backed by one block."""

    offset_bytes: int
    nbytes: int
    owner: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True)
class Layout:
    """A division of ``nbytes`` among ``world_size`` ranks.

    Attributes:
        nbytes: logical bytes of the span.
        world_size: number of ranks.
        page_nbytes: size of a page.
        runs: the owners of all pages, by offset, without a gap; they cover ``span_nbytes``.
        shards: per rank, the byte slices (offset, nbytes) of its shard, by offset. Together they
            cover ``nbytes`` exactly once.
    """

    nbytes: int
    world_size: int
    page_nbytes: int
    runs: tuple[Run, ...]
    shards: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        if self.world_size < 1 or len(self.shards) != self.world_size:
            raise ValueError(f"{len(self.shards)} shards given for {self.world_size} ranks")
        at = 0
        for run in self.runs:
            if run.offset_bytes != at or run.nbytes <= 0 or run.nbytes % self.page_nbytes:
                raise ValueError(f"{run} does not follow offset {at} in whole pages")
            if not 0 <= run.owner < self.world_size:
                raise ValueError(f"{run} has no owner among {self.world_size} ranks")
            at = run.end
        if at < self.nbytes:
            raise ValueError(f"the runs cover {at} of {self.nbytes} bytes")
        at = 0
        for offset, nbytes in sorted(piece for shard in self.shards for piece in shard):
            if nbytes <= 0 or offset != at:
                raise ValueError(f"the shards leave a gap or overlap at byte {at}")
            at += nbytes
        if at != self.nbytes:
            raise ValueError(f"the shards cover {at} of {self.nbytes} bytes")

    def __str__(self) -> str:
        """Short, and different for layouts that differ."""
        digest = hashlib.sha256(repr((self.page_nbytes, self.runs, self.shards)).encode())
        return f"Layout({self.nbytes} bytes, {len(self.runs)} runs, {digest.hexdigest()[:16]})"

    @classmethod
    def blocked(
        cls,
        sizes: Sequence[int],
        *,
        page_nbytes: int,
        max_run_nbytes: int = MAX_RUN_NBYTES,
    ) -> Self:
        """Each rank's bytes lie together, in order of rank.

        Args:
            sizes: bytes of each rank's shard; any cut, zero included.
            page_nbytes: size of a page.
            max_run_nbytes: longest run of pages in one block.
        """
        _check_sizes(sizes, page_nbytes, max_run_nbytes)
        ends = list(accumulate(sizes))
        nbytes = ends[-1]
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        runs: list[Run] = []
        at, num_pages = 0, -(-nbytes // page_nbytes)
        while at < num_pages * page_nbytes:
            owner = _owner_of_page(starts, ends, at, min(at + page_nbytes, nbytes))
            # Every page up to the end of this shard that lies inside it has the same owner.
            end = max(at + page_nbytes, ends[owner] // page_nbytes * page_nbytes)
            _append(runs, at, end, owner, max_run_nbytes)
            at = end
        shards = tuple(
            ((start, size),) if size else () for start, size in zip(starts, sizes, strict=True)
        )
        return cls(nbytes, len(sizes), page_nbytes, tuple(runs), shards)

    @classmethod
    def striped(
        cls,
        nbytes: int,
        world_size: int,
        *,
        stripe_nbytes: int,
        page_nbytes: int,
    ) -> Self:
        """Owners alternate every ``stripe_nbytes``, so that readers in order meet no one owner.

        Args:
            nbytes: bytes of the span.
            world_size: number of ranks.
            stripe_nbytes: a multiple of the page; each stripe is a block of its own.
            page_nbytes: size of a page.
        """
        _check_sizes((nbytes,), page_nbytes, stripe_nbytes)
        if world_size < 1:
            raise ValueError(f"a layout needs at least one rank, not {world_size}")
        padded = -(-nbytes // page_nbytes) * page_nbytes
        runs = tuple(
            Run(at, min(stripe_nbytes, padded - at), at // stripe_nbytes % world_size)
            for at in range(0, padded, stripe_nbytes)
        )
        shards = tuple(
            tuple(
                (run.offset_bytes, min(run.nbytes, nbytes - run.offset_bytes))
                for run in runs
                if run.owner == rank
            )
            for rank in range(world_size)
        )
        return cls(nbytes, world_size, page_nbytes, runs, shards)

    @cached_property
    def span_nbytes(self) -> int:
        """Bytes of addresses: ``nbytes`` rounded up to whole pages."""
        return self.runs[-1].end if self.runs else 0

    @cached_property
    def _run_starts(self) -> list[int]:
        return [run.offset_bytes for run in self.runs]

    def run_at(self, offset_bytes: int) -> Run:
        """The run that contains a byte.

        Raises:
            IndexError: the byte lies outside the span.
        """
        if not 0 <= offset_bytes < self.span_nbytes:
            raise IndexError(f"offset {offset_bytes} lies outside {self.span_nbytes} bytes")
        return self.runs[bisect.bisect_right(self._run_starts, offset_bytes) - 1]

    def owner_of(self, offset_bytes: int) -> int:
        """The rank that owns the page of a byte."""
        return self.run_at(offset_bytes).owner

    def pieces(self, offset_bytes: int = 0, nbytes: int | None = None) -> Iterator[Run]:
        """The parts of a byte range, each on pages of one owner, in order of offset.

        Raises:
            IndexError: the range does not lie inside the span.
        """
        end = self.nbytes if nbytes is None else offset_bytes + nbytes
        if offset_bytes < 0 or end > self.span_nbytes:
            raise IndexError(
                f"the range from {offset_bytes} to {end} lies outside {self.span_nbytes} bytes"
            )
        at = offset_bytes
        index = bisect.bisect_right(self._run_starts, at) - 1
        while at < end:
            run = self.runs[index]
            stop = min(end, run.end)
            yield Run(at, stop - at, run.owner)
            at = stop
            index += 1

    def owned_slices(
        self, rank: int, offset_bytes: int = 0, nbytes: int | None = None
    ) -> tuple[tuple[int, int], ...]:
        """The parts (offset, nbytes) of a byte range that lie on pages of ``rank``."""
        return tuple(
            (piece.offset_bytes, piece.nbytes)
            for piece in self.pieces(offset_bytes, nbytes)
            if piece.owner == rank
        )

    def runs_of(self, rank: int) -> tuple[Run, ...]:
        """The runs that ``rank`` owns."""
        return tuple(run for run in self.runs if run.owner == rank)

    def owned_nbytes(self, rank: int) -> int:
        """Bytes of physical memory that ``rank`` brings."""
        return sum(run.nbytes for run in self.runs if run.owner == rank)

    def shard_nbytes(self, rank: int) -> int:
        """Bytes that are logically the shard of ``rank``."""
        return sum(nbytes for _, nbytes in self.shards[rank])

    def shard_is_owned(self, rank: int) -> bool:
        """Whether every byte of the shard of ``rank`` lies on its own pages, and nothing else."""
        owned = self.owned_slices(rank)
        return _merged(owned) == _merged(self.shards[rank])


def pack(sizes: Sequence[int], alignment: int = 256) -> tuple[tuple[int, ...], int]:
    """Place pieces one after the other, each at a multiple of ``alignment``.

    Returns:
        The offset of each piece, and the bytes of all together.
    """
    if alignment < 1 or any(size < 0 for size in sizes):
        raise ValueError("sizes must not be negative, and the alignment must be positive")
    offsets = []
    at = 0
    for size in sizes:
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at += size
    return tuple(offsets), at


def balanced(total: int, num_parts: int) -> tuple[int, ...]:
    """Cut ``total`` into parts that differ by at most one, the larger ones first."""
    if num_parts < 1 or total < 0:
        raise ValueError(f"cannot cut {total} into {num_parts} parts")
    small, num_larger = divmod(total, num_parts)
    return tuple(small + (part < num_larger) for part in range(num_parts))


def _owner_of_page(starts: Sequence[int], ends: Sequence[int], at: int, end: int) -> int:
    """The shard that covers most of [at, end); the lowest rank among equals."""
    best, best_nbytes = 0, 0
    rank = bisect.bisect_right(ends, at)  # the first shard that ends behind ``at``
    while rank < len(starts) and starts[rank] < end:
        covered = min(end, ends[rank]) - max(at, starts[rank])
        if covered > best_nbytes:
            best, best_nbytes = rank, covered
        rank += 1
    return best


def _append(runs: list[Run], at: int, end: int, owner: int, max_run_nbytes: int) -> None:
    """Add pages to ``runs``, joined to the last run of the same owner, cut at the longest run."""
    if runs and runs[-1].owner == owner and runs[-1].nbytes < max_run_nbytes:
        at = runs.pop().offset_bytes
    while at < end:
        stop = min(end, at + max_run_nbytes)
        runs.append(Run(at, stop - at, owner))
        at = stop


def _merged(slices: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join slices that touch."""
    joined: list[tuple[int, int]] = []
    for offset, nbytes in slices:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    return joined


def _check_sizes(sizes: Sequence[int], page_nbytes: int, run_nbytes: int) -> None:
    if not sizes:
        raise ValueError("a layout needs at least one rank")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative: {tuple(sizes)}")
    if page_nbytes < 1 or run_nbytes < page_nbytes or run_nbytes % page_nbytes:
        raise ValueError(
            f"the size of a stripe or run, {run_nbytes}, must be a multiple of the page of "
            f"{page_nbytes} bytes"
        )
