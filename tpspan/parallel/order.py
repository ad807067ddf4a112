"""Which weight a model will read next: learned from the pass before, without torch."""

from __future__ import annotations


class Order:
    """The order of uses in a pass, learned from the pass before; says what comes next.

    A pass that goes another way is followed as far as it can be, and the next one learns from it.
    """

    def __init__(self) -> None:
        self._learned: tuple[object, ...] = ()
        self._seen: list[object] = []
        self._at = 0

    def begin(self) -> None:
        """A new pass begins; one that was not finished teaches nothing."""
        self._seen, self._at = [], 0

    def use(self, key: object) -> object | None:
        """Note a use; return the one that will follow, or None if that is not known."""
        self._seen.append(key)
        if self._at < len(self._learned) and self._learned[self._at] == key:
            found = self._at
        elif key in self._learned[self._at :]:
            found = self._learned.index(key, self._at)
        elif key in self._learned:
            found = self._learned.index(key)
        else:
            return None
        self._at = found + 1
        return self._learned[self._at] if self._at < len(self._learned) else None

    def finish(self) -> None:
        """The pass is complete: it is what the next one is expected to be."""
        if self._seen:
            self._learned = tuple(self._seen)
        self.begin()
