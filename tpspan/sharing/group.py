"""Who publishes or attaches together: a process alone, or the ranks of a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tpspan.launch.votes import together
from tpspan.launch.world import World

T = TypeVar("T")


class Group(Protocol):
    """Processes that act as one; of each call, all of them make it."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all."""

    def together(self, what: str, step: Callable[[], T]) -> T:
        """Take a step in all processes; fails in all if it fails in one."""

    def gather(self, value: Any) -> list[Any]:
        """Every process's value."""

    def broadcast(self, value: Any) -> Any:
        """The value of the process that leads."""


class Alone:
    """One process."""

    leads = True

    def together(self, what: str, step: Callable[[], T]) -> T:
        return step()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class Ranks:
    """The ranks of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def leads(self) -> bool:
        return self._world.rank == 0

    def together(self, what: str, step: Callable[[], T]) -> T:
        return together(what, self._world.rank, step, self._world.control.all_gather)

    def gather(self, value: Any) -> list[Any]:
        return self._world.control.all_gather(value)

    def broadcast(self, value: Any) -> Any:
        return self._world.control.broadcast(value)
