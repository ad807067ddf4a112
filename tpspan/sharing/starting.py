"""Reaching the keeper of this user, and starting it if there is none."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from tpspan.errors import KeeperError
from tpspan.sharing import wire
from tpspan.sharing.place import VARIABLE, Place, find_place

TIMEOUT_S = 30.0
"""How long a keeper may take to start, or to answer."""

# Without site-packages, and with tpspan taken from where this process has it.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from tpspan.sharing.keeper import main; sys.exit(main(sys.argv[1:]))"
)


def keeper_command(*words: str) -> list[str]:
    """What starts a keeper in an interpreter with the standard library and tpspan alone.

    Raises:
        KeeperError: this program does not know its Python.
    """
    if not sys.executable:
        raise KeeperError("there is no sys.executable to start a keeper with: run `tpspan keeper`")
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, root, *words]


def connect(*, start: bool = True, greet: bool = True) -> socket.socket | None:
    """A connection to this user's keeper.

    Args:
        start: start a keeper if there is none.
        greet: wait until it has answered, and speaks this protocol. Otherwise the first request has
            to name the protocol, and may find that the keeper was just ending.

    Returns:
        The connection; None if there is no keeper and ``start`` is False.

    Raises:
        KeeperError: it does not start or answer, or is another user's or version's.
    """
    place = find_place()
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        connection = _connected(place, greet=greet)
        if connection is not None or not start:
            return connection
        lock = place.lock_starting(max(deadline - time.monotonic(), 0.0))
        try:
            if lock is None:
                raise KeeperError(f"a keeper is being started in {place.directory}, without end")
            connection = _connected(
                place, greet=greet
            )  # whoever had the lock before has started one
            if connection is not None:
                return connection
            if time.monotonic() > deadline:
                raise KeeperError(f"keepers in {place.directory} end as soon as they have started")
            _start(place)
        finally:
            if lock is not None:
                os.close(lock)


def _connected(place: Place, *, greet: bool) -> socket.socket | None:
    """A connection, which the keeper has answered on if it is greeted; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(place.socket)
            _, user = wire.credentials(connection)
            if user != os.geteuid():
                raise KeeperError(
                    f"the keeper at {place.socket} is one of user {user}: set {VARIABLE} to a "
                    "directory of your own"
                )
            if not greet:
                undo.pop_all()
                return connection
            with contextlib.suppress(ConnectionError):  # it may have said why and hung up
                wire.send(connection, {"op": "hello", "protocol": wire.PROTOCOL})
            answer, _, _ = wire.receive(connection)
        except (FileNotFoundError, ConnectionError, wire.WireError):
            return None  # none, or one that ended just now
        except TimeoutError:
            raise KeeperError(
                f"the keeper at {place.socket} does not answer within {TIMEOUT_S:g} s"
            ) from None
        if "error" in answer:
            raise KeeperError(answer["text"])
        undo.pop_all()
    return connection


def _for_the_interpreter() -> dict[str, str]:
    """What Python itself may need to start, where its library lies in a place of its own."""
    kept = ("LD_LIBRARY_PATH", "PYTHONHOME")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _start(place: Place) -> None:
    """Start a keeper and wait until it serves, or says why it does not."""
    read, write = os.pipe()
    try:
        started = subprocess.run(
            keeper_command("start", str(write)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[write],
            env={"PATH": os.defpath, VARIABLE: place.directory, **_for_the_interpreter()},
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        os.close(read)
        raise KeeperError(f"the keeper could not be started: {error}") from None
    finally:
        os.close(write)
    with open(read, "rb") as pipe:
        if not select.select([pipe], [], [], TIMEOUT_S)[0]:
            raise KeeperError(f"the keeper did not start within {TIMEOUT_S:g} s: see {place.log}")
        said = os.read(pipe.fileno(), 1000).decode(errors="replace")
    if said != "ok":
        why = said or started.stderr.decode(errors="replace").strip()[-500:] or "see " + place.log
        raise KeeperError(f"the keeper could not be started: {why}")
