"""What belongs to a rank ends in the processes that are forked from it.

A child maps the same pages as its parent: were it to meet the other ranks, it would come in its
parent's place and nobody would notice.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from tpspan.errors import ClosedError
from tpspan.launch.world import IN_A_CHILD


class Owned(Protocol):
    """What only the process that made it may use."""

    def end(self, error: ClosedError) -> None:
        """Let every later use raise the error."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def end_in_children(owned: Owned) -> None:
    """Let it end in every child that is forked from here on; its use costs nothing more."""
    _owned.add(owned)


def _forked() -> None:
    for owned in tuple(_owned):
        owned.end(ClosedError(IN_A_CHILD))


os.register_at_fork(after_in_child=_forked)
