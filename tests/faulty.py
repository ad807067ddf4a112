"""Stands between tpspan and a driver: counts calls, knows what is held, fails or delays them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from tpspan.errors import DriverError
from tpspan.memory import ADDRESS_SPACE_LOCK, Driver

# What each call adds to handles, mappings and reservations.
_EFFECTS = {
    "reserve": (0, 0, 1),
    "free": (0, 0, -1),
    "create": (1, 0, 0),
    "import_fd": (1, 0, 0),
    "release": (-1, 0, 0),
    "map": (0, 1, 0),
    "unmap": (0, -1, 0),
    "protect": (0, 0, 0),
    "exchange": (0, 0, 0),
    "replace": (0, 0, 0),
    "export_fd": (0, 0, 0),
}


class Held(NamedTuple):
    """What a driver holds beyond what it held when it was first watched."""

    handles: int = 0
    mappings: int = 0
    reservations: int = 0


NOTHING = Held()


class Call(NamedTuple):
    """One call that was let through, and when it began and ended."""

    name: str
    start_s: float
    end_s: float


class FaultyDriver:
    """Watches one driver inside a ``with`` block.

    The driver's own methods are replaced on the instance, so that it stays the same object
    wherever it is known already.

    Attributes:
        held: what the driver holds since the ``with`` block began.
        calls: the calls that were let through.
        num_failed: how many were not.
        unlocked: calls made by a thread that did not hold the address-space lock.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.held = NOTHING
        self.calls: list[Call] = []
        self.num_failed = 0
        self.unlocked: list[str] = []
        self.concurrent: list[str] = []
        self._fail_from: int | None = None
        self._fail_count = 0
        self._delays: dict[str, float] = {}
        self._inside = 0
        self._before: dict[str, Any] = {}
        self._handles: set[int] = set()
        self._mapped: dict[int, int] = {}
        self._reserved: dict[int, int] = {}

    def give_back(self) -> int:
        """Give back what was made while watched and is still held; return how much that was."""
        num_held = len(self._mapped) + len(self._reserved) + len(self._handles)
        for address, nbytes in tuple(self._mapped.items()):
            self.driver.unmap(address, nbytes)
        for address, nbytes in tuple(self._reserved.items()):
            self.driver.free(address, nbytes)
        for handle in tuple(self._handles):
            self.driver.release(handle)
        return num_held

    def fail(self, nth: int, *, count: int = 1) -> None:
        """Fail the nth call from now on (1 is the next), and all in all ``count`` in a row."""
        self._fail_from, self._fail_count = nth, count

    def heal(self) -> None:
        """Fail nothing any more."""
        self._fail_from = None

    def delay(self, name: str, delay_s: float) -> None:
        """Make every call of this name begin later."""
        self._delays[name] = delay_s

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def __enter__(self) -> Self:
        own = vars(self.driver)
        self._before = {name: own[name] for name in _EFFECTS if name in own}
        for name in _EFFECTS:
            original = getattr(self.driver, name)
            setattr(self.driver, name, functools.partial(self._perform, name, original))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in _EFFECTS:
            delattr(self.driver, name)
        vars(self.driver).update(self._before)

    def _perform(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not ADDRESS_SPACE_LOCK._is_owned():  # type: ignore[attr-defined]
            self.unlocked.append(name)
        if self._inside:
            self.concurrent.append(name)
        self._inside += 1
        try:
            return self._call(name, original, *args, **kwargs)
        finally:
            self._inside -= 1

    def _keep_books(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        if name in ("create", "import_fd"):
            self._handles.add(value)
        elif name == "release":
            self._handles.discard(args[0])
        elif name == "reserve":
            self._reserved[value] = args[0]
        elif name == "free":
            self._reserved.pop(args[0], None)
        elif name == "map":
            self._mapped[args[0]] = args[1]
        elif name == "unmap":
            self._mapped.pop(args[0], None)

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._fail_from is not None:
            self._fail_from -= 1
            if -self._fail_count < self._fail_from <= 0:
                self.num_failed += 1
                raise DriverError(name, 999, "INJECTED", {}, "Made to fail by a test")
        time.sleep(self._delays.get(name, 0.0))
        start_s = time.monotonic()
        value = original(*args, **kwargs)
        self.calls.append(Call(name, start_s, time.monotonic()))
        self._keep_books(name, args, value)
        self.held = Held(*(a + b for a, b in zip(self.held, _EFFECTS[name], strict=True)))
        return value
