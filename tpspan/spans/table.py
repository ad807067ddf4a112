"""The table offset → block of one range of addresses, changed whole or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tpspan.errors import TpspanError
from tpspan.memory import Block, Driver, Mapping, Reservation, Right


@dataclass(frozen=True, eq=False)
class SpanBlock:
    """A block that every rank of a span knows.

    Attributes:
        number: the same on all ranks.
        owner: the rank whose memory it is.
        block: this process's hold on it.
    """

    number: int
    owner: int
    block: Block

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.block.nbytes

    def __repr__(self) -> str:
        return f"SpanBlock(number={self.number}, owner={self.owner}, nbytes={self.nbytes})"


@dataclass(frozen=True)
class Placement:
    """A block and the offset at which it is mapped."""

    offset_bytes: int
    block: SpanBlock


class Table:
    """Blocks mapped side by side over the whole of a reservation.

    After a change that could neither be made nor undone ``is_broken`` is true, and some offsets may
    have nothing behind them.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.reservation = Reservation(driver, nbytes)
        self._placed: dict[int, tuple[SpanBlock, Mapping]] = {}
        self._offsets: dict[SpanBlock, int] = {}
        self.is_broken = False

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What is mapped, by offset."""
        return tuple(Placement(at, self._placed[at][0]) for at in sorted(self._placed))

    def block_at(self, offset_bytes: int) -> SpanBlock:
        """The block that begins at an offset.

        Raises:
            ValueError: no block begins there.
        """
        if offset_bytes not in self._placed:
            raise ValueError(f"no block begins at offset {offset_bytes}")
        return self._placed[offset_bytes][0]

    def right_at(self, offset_bytes: int) -> Right:
        """What may be done with the block that begins at an offset."""
        return self._placed[offset_bytes][1].right

    def place(self, offset_bytes: int, block: SpanBlock) -> None:
        """Map a block where nothing is mapped yet, without a right."""
        self._placed[offset_bytes] = (block, self.reservation.map(offset_bytes, block.block))
        self._offsets[block] = offset_bytes

    def check(self, moves: Sequence[tuple[int, SpanBlock]], known: Collection[SpanBlock]) -> None:
        """Refuse moves that would not leave every offset with exactly one fitting block.

        Args:
            moves: what ``replace`` is about to do.
            known: the blocks that may be used.

        Raises:
            ValueError: says which.
        """
        offsets = {offset for offset, _ in moves}
        if len(offsets) != len(moves):
            raise ValueError("an offset is named twice")
        for offset, block in moves:
            if block not in known:
                raise ValueError(f"{block!r} does not belong to this span")
            there = self.block_at(offset)
            if there.nbytes != block.nbytes:
                raise ValueError(
                    f"{block!r} does not fit offset {offset}, where {there.nbytes} bytes are mapped"
                )
        staying = {self._offsets[block] for _, block in moves if block in self._offsets} - offsets
        if staying or len({block for _, block in moves}) != len(moves):
            raise ValueError("a block would be mapped at two offsets (invariant 1)")

    def replace(self, moves: Sequence[tuple[int, SpanBlock]]) -> list[tuple[int, SpanBlock]]:
        """Put other blocks behind offsets, each with the right that the offset had.

        The caller has waited for the fence. On failure the old blocks are put back, or the table
        ``is_broken``.

        Returns:
            The moves that undo this call.

        Raises:
            DriverError: the driver refused.
        """
        old = [(offset, *self._placed[offset]) for offset, _ in moves]
        rights = {offset: mapping.right for offset, _, mapping in old}
        undo = [(offset, block) for offset, block, _ in old]
        try:
            if not self._replaced(moves):
                self._exchange(moves, rights)
        except BaseException:
            try:
                self._exchange(undo, rights)
            except TpspanError:
                self.is_broken = True
            raise
        return undo

    def exchange(self, first: int, second: int) -> None:
        """Let two offsets with the same right trade their blocks; otherwise as ``replace``."""
        if first == second:
            return
        (a, mapping_a), (b, mapping_b) = self._placed[first], self._placed[second]
        if not self.reservation.exchange(mapping_a, mapping_b):
            self.replace([(first, b), (second, a)])
            return
        self._placed[first], self._placed[second] = (b, mapping_a), (a, mapping_b)
        self._offsets[a], self._offsets[b] = second, first

    def offset_of(self, block: SpanBlock) -> int:
        """Where a block is mapped.

        Raises:
            KeyError: it is not.
        """
        return self._offsets[block]

    def restore(self, undo: Sequence[tuple[int, SpanBlock]]) -> None:
        """Take a change back that failed elsewhere; if that is refused, the table is broken."""
        try:
            self.replace(undo)
        except TpspanError:
            self.is_broken = True

    def close(self) -> None:
        """Unmap everything and give the addresses back; all is tried, the first failure raised."""
        self._placed.clear()
        self._offsets.clear()
        self.reservation.close_all()

    def _replaced(self, moves: Sequence[tuple[int, SpanBlock]]) -> bool:
        """Make a single move in one step; False, and nothing is done, if that cannot be."""
        if len(moves) != 1:
            return False
        ((offset, block),) = moves
        old, mapping = self._placed[offset]
        if not self.reservation.replace(mapping, block.block):
            return False
        self._placed[offset] = (block, mapping)
        self._offsets.pop(old, None)
        self._offsets[block] = offset
        return True

    def _exchange(self, moves: Sequence[tuple[int, SpanBlock]], rights: dict[int, Right]) -> None:
        for offset, _ in moves:
            block, mapping = self._placed[offset]
            mapping.close()
            self._offsets.pop(block, None)
        for offset, block in moves:
            self.place(offset, block)
        for offset, nbytes, right in _joined(moves, rights):
            if right is not Right.NONE:
                self.reservation.protect(right, offset, nbytes)


def _joined(
    moves: Sequence[tuple[int, SpanBlock]], rights: dict[int, Right]
) -> Iterator[tuple[int, int, Right]]:
    """Ranges of neighbouring offsets with one right: an access call costs more than a map."""
    start = end = 0
    right = Right.NONE
    for offset, block in sorted(moves, key=lambda move: move[0]):
        if end and (offset != end or rights[offset] is not right):
            yield start, end - start, right
            end = 0
        if not end:
            start, right = offset, rights[offset]
        end = offset + block.nbytes
    if end:
        yield start, end - start, right
