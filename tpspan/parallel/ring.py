"""The turns of a channel and the blocks they use: numbers only, no torch and no driver.

Hand-overs are numbered from 0. Turn t uses block t modulo the depth, on both sides. A block goes
back and forth: the producer gives it, the consumer frees it, and each of these is counted per
block. So turns may be given and freed in any order, and a side knows from counts alone whether its
next block is there:

- the consumer may read turn t once block t % depth was given t // depth + 1 times;
- the producer may write turn t once it was freed t // depth times (invariant 6).
"""

from __future__ import annotations

from tpspan.errors import InUseError


class Ring:
    """One side's account of a channel.

    Args:
        depth: blocks that go round.
        most_held: how many turns this side may hold at once; by default all.
        side: names the side in errors.

    Attributes:
        depth, most_held: as given.
        next_turn: the turn that ``take`` takes next.
        num_released: turns that were taken and released.
    """

    def __init__(self, depth: int, *, most_held: int | None = None, side: str = "side") -> None:
        if depth < 1:
            raise ValueError(f"a ring has at least one block, not {depth}")
        self.depth = depth
        self.most_held = depth if most_held is None else most_held
        self.next_turn = 0
        self.num_released = 0
        self._side = side
        self._held: set[int] = set()

    @property
    def held(self) -> tuple[int, ...]:
        """Turns that were taken and not released, in order."""
        return tuple(sorted(self._held))

    def block_of(self, turn: int) -> int:
        """The block that a turn uses."""
        return turn % self.depth

    def num_given(self, turn: int) -> int:
        """How often its block was given when the turn may be read."""
        return turn // self.depth + 1

    def num_freed(self, turn: int) -> int:
        """How often its block was freed when the turn may be written; 0: it always was free."""
        return turn // self.depth

    def check(self) -> int:
        """The next turn, if this side may take it.

        Raises:
            InUseError: it holds as many as it may, or still holds the block that comes next.
        """
        turn = self.next_turn
        if len(self._held) >= self.most_held:
            raise InUseError(
                f"the {self._side} holds {len(self._held)} of at most {self.most_held} slots: "
                "release one before taking another"
            )
        if turn - self.depth in self._held:
            raise InUseError(
                f"the {self._side} still holds turn {turn - self.depth}, whose block is the next "
                "one: release it first"
            )
        return turn

    def take(self) -> int:
        """Take the next turn.

        Raises:
            InUseError: as ``check``.
        """
        turn = self.check()
        self._held.add(turn)
        self.next_turn += 1
        return turn

    def put_back(self, turn: int) -> None:
        """Untake the turn that was taken last; ``take`` returns it again.

        Raises:
            ValueError: another was taken since, or it is not held.
        """
        if turn not in self._held or turn != self.next_turn - 1:
            raise ValueError(f"turn {turn} is not the one that was taken last")
        self._held.discard(turn)
        self.next_turn = turn

    def release(self, turn: int) -> None:
        """Finish a turn.

        Raises:
            ValueError: it is not held.
        """
        if turn not in self._held:
            raise ValueError(f"turn {turn} is not held")
        self._held.discard(turn)
        self.num_released += 1
