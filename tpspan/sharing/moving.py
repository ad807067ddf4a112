"""Bringing all that a keeper holds to another keeper, which has come to serve at its place.

That happens if somebody takes the whole directory away, lock included, and a client comes before
the keeper has noticed.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from tpspan.sharing import wire
from tpspan.sharing.place import Place
from tpspan.sharing.registry import Publication, Registry, Version

_TIMEOUT_S = 5.0


def move(registry: Registry, place: Place) -> None:
    """Give every publication to the keeper that serves at a place.

    A name that is published there already stays what it is there.

    Raises:
        OSError, WireError: there is no keeper, or it ends or does not answer.
    """
    for publication in registry.publications.values():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(place.socket)
            _move(publication, connection)


def _move(publication: Publication, connection: socket.socket) -> None:
    claim = {
        "op": "claim",
        "name": publication.name,
        "description": publication.description,
        "keep": publication.keep,
        "publisher": publication.publisher,
    }
    _ask(connection, {"op": "hello", "protocol": wire.PROTOCOL})
    wire.send(connection, claim, publication.layout)
    there = wire.receive(connection)[0]  # a refusal is what is wanted: the name is there already
    if there.get("version") != 0:
        return
    known: set[str] = set()
    for _, version in sorted(publication.versions.items()):
        _deposit(version, known, connection)
        commit = {
            "op": "commit",
            "name": publication.name,
            "blocks": [block.name for block in version.blocks],
            "token": version.token,
            "version": version.number,
        }
        _ask(connection, commit, version.state)


def _deposit(version: Version, known: set[str], connection: socket.socket) -> None:
    blocks = {block.name: block for block in version.blocks if block.name not in known}
    known.update(blocks)
    message = {
        "op": "deposit",
        "blocks": list(blocks),
        "sizes": [block.nbytes for block in blocks.values()],
    }
    fds = (os.dup(block.fd) for block in blocks.values())
    wire.send(connection, message, b"", len(blocks), fds)
    _answer(connection)


def _ask(connection: socket.socket, message: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
    wire.send(connection, message, data)
    return _answer(connection)


def _answer(connection: socket.socket) -> dict[str, Any]:
    """What the other keeper says.

    Raises:
        WireError: it refuses.
    """
    said = wire.receive(connection)[0]
    if "error" in said:
        raise wire.WireError(f"the other keeper refuses: {said['error']}")
    return said
