"""Giving several things back when any of them may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def close_each(closes: Iterable[Callable[[], object]]) -> None:
    """Call every one in order, whatever the others do, and raise the first failure.

    An ``ExitStack`` would raise the last one, which is often only a consequence of the first: a
    block that could not be unmapped cannot be closed either.
    """
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
