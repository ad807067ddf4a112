"""What the keeper of this user holds: a list for programs, and the removal of a name."""

from __future__ import annotations

from typing import Any

from tpspan.sharing.client import ask_once
from tpspan.sharing.starting import connect


def published() -> list[dict[str, Any]]:
    """Everything that is published on this host by this user; starts no keeper.

    Returns:
        For each name, sorted: ``name``, ``device``, ``bytes`` and ``tensors`` of a version,
        ``held_bytes`` of all versions together, ``keep``, ``publisher`` (a process) and
        ``publisher_alive``, ``versions`` with ``version``, ``time``, ``new_bytes`` (not shared with
        an earlier one) and ``readers`` (processes), and the readers of versions that are gone.

    Raises:
        KeeperError: the keeper does not answer.
    """
    connection = connect(start=False)
    if connection is None:
        return []
    connection.close()
    names: list[dict[str, Any]] = ask_once({"op": "list"})["names"]
    return names


def remove(name: str, *, force: bool = False) -> None:
    """Remove a name; its memory is given back when the last process that has it mapped lets go.

    Args:
        name: what it is published under.
        force: also if its publisher is alive, which then can commit no more.

    Raises:
        UnknownNameError: nothing is published under this name.
        NameTakenError: its publisher is alive, and ``force`` was not given.
    """
    ask_once({"op": "remove", "name": name, "force": force})
