"""The pieces of a weight, and the order in which a rank copies and multiplies them: arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SMALLEST_CHUNK_NBYTES = 8 << 20
_LARGEST_CHUNK_NBYTES = 128 << 20
# A product of few rows is bound by memory and may be cut finely; one of many rows fills the
# multiprocessors badly if it is cut into pieces of few columns.
_HALVINGS = ((256, 4), (2048, 2))


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a weight on pages of one owner; the offset is that in the weight."""

    offset_bytes: int
    nbytes: int
    owner: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True)
class Chunk:
    """Rows that are multiplied together.

    Attributes:
        start, stop: the rows of W.
        copies: what brings them to local memory, in order; empty if they are read where they are.
    """

    start: int
    stop: int
    copies: tuple[Piece, ...] = ()


def copy_order(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """Pieces in the order in which ``rank`` copies them: ranks must not meet at one owner.

    Owners that take turns keep the order of addresses, begun at the right neighbour; otherwise the
    right neighbour's pieces come first, then those of the next, the rank's own last.
    """
    given = merge(pieces)
    turn = {(rank + k) % world_size: k for k in range(1, world_size + 1)}
    if len(given) <= world_size:
        return sorted(given, key=lambda piece: (turn[piece.owner], piece.offset_bytes))
    nearest = min(turn[piece.owner] for piece in given)
    first = next(i for i, piece in enumerate(given) if turn[piece.owner] == nearest)
    return given[first:] + given[:first]


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces of one owner: every copy takes 3 µs to start."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.owner, last.end) == (piece.owner, piece.offset_bytes):
            joined[-1] = Piece(last.offset_bytes, last.nbytes + piece.nbytes, last.owner)
        else:
            joined.append(piece)
    return joined


def plan_chunks(
    pieces: Sequence[Piece], num_rows: int, row_nbytes: int, rank: int, world_size: int, rows_x: int
) -> tuple[Chunk, ...]:
    """Cut a weight into chunks of whole rows, in the order in which ``rank`` multiplies them.

    If every rank's rows lie together, the own ones come first and stay where they are, then those
    of the right neighbour and so on around; the last owner's are halved again and again, so that
    little is left to multiply when the last byte arrives. If owners alternate, a chunk has rows of
    all of them, and ranks begin at different ones. Rows that cross to another owner's page count
    as those of the owner of their first byte; copies never cross from one owner to another.

    Args:
        pieces: all of the weight, by offset.
        num_rows, row_nbytes: of the weight.
        rank, world_size: who reads.
        rows_x: rows of x.
    """
    if num_rows == 0:
        return ()
    segments = _segments(merge(pieces), num_rows, row_nbytes)
    if len(segments) > 2 * world_size:
        return _alternating(pieces, num_rows, row_nbytes, rank, world_size)
    own = [Chunk(start, stop) for start, stop, owner in segments if owner == rank]
    foreign = [segment for segment in segments if segment[2] != rank]
    foreign.sort(key=lambda segment: ((segment[2] - rank) % world_size, segment[0]))
    parts: list[tuple[int, int]] = []
    most = max(1, _LARGEST_CHUNK_NBYTES // row_nbytes)
    for index, (start, stop, _) in enumerate(foreign):
        is_last = index == len(foreign) - 1
        halvings = next((n for up_to, n in _HALVINGS if rows_x <= up_to), 1) if is_last else 0
        parts += _halved(start, stop, most, max(1, _SMALLEST_CHUNK_NBYTES // row_nbytes), halvings)
    return (
        *own,
        *(_copied(a, b, pieces, row_nbytes, rank, world_size) for a, b in parts),
    )


def _segments(
    pieces: Sequence[Piece], num_rows: int, row_nbytes: int
) -> list[tuple[int, int, int]]:
    """Rows (start, stop, owner) by the owner of their first byte."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        start = -(-piece.offset_bytes // row_nbytes)
        stop = min(num_rows, -(-piece.end // row_nbytes))
        if start < stop:
            found.append((start, stop, piece.owner))
    return found


def _halved(start: int, stop: int, most: int, least: int, halvings: int) -> list[tuple[int, int]]:
    parts = []
    while stop - start > most:
        parts.append((start, start + most))
        start += most
    while halvings and stop - start >= 2 * least:
        middle = (start + stop) // 2
        parts.append((start, middle))
        start, halvings = middle, halvings - 1
    return [*parts, (start, stop)]


def _alternating(
    pieces: Sequence[Piece], num_rows: int, row_nbytes: int, rank: int, world_size: int
) -> tuple[Chunk, ...]:
    num_chunks = min(num_rows, max(1, num_rows * row_nbytes // (4 * _SMALLEST_CHUNK_NBYTES)))
    cuts = [num_rows * index // num_chunks for index in range(num_chunks + 1)]
    chunks = [
        _copied(a, b, pieces, row_nbytes, rank, world_size)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    first = rank * num_chunks // world_size
    return (*chunks[first:], *chunks[:first])


def _copied(
    start: int, stop: int, pieces: Sequence[Piece], row_nbytes: int, rank: int, world_size: int
) -> Chunk:
    begin, end = start * row_nbytes, stop * row_nbytes
    inside = [
        Piece(max(begin, p.offset_bytes), min(end, p.end) - max(begin, p.offset_bytes), p.owner)
        for p in pieces
        if p.offset_bytes < end and p.end > begin
    ]
    return Chunk(start, stop, tuple(copy_order(inside, rank, world_size)))
