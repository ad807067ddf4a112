"""The names of the ways to read what lies in other ranks' memory."""

from __future__ import annotations

from typing import Literal, cast, get_args

Read = Literal["auto", "in_place", "staged"]
READS: tuple[str, ...] = get_args(Read)


def check_read(read: str) -> Read:
    """Return the name of a way, checked.

    Raises:
        ValueError: there is no such way.
    """
    if read not in READS:
        raise ValueError(f"read must be one of {', '.join(map(repr, READS))}, not {read!r}")
    return cast(Read, read)
