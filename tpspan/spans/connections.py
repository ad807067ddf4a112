"""Connections between the ranks of one host, over private Unix sockets.

The sockets stand in a directory that only this user can enter, each side shows its credentials
(``SO_PEERCRED``) and the job's token, and directory and listeners are gone before the first block
is shared.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpspan.errors import DriverError, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.memory.advice import advise

ACK = b"ok"
_HELLO = struct.Struct("!16sI")
_MAX_PARENT = 70  # a Unix socket's path ends at 107 bytes

Together = Callable[[str, Callable[[], Any]], Any]


def connect_all(world: World, together: Together) -> dict[int, socket.socket]:
    """Connect every rank with every other. Collective; on failure nothing is left open.

    Args:
        together: takes a step on every rank or fails on all.

    Returns:
        One connection per other rank.

    Raises:
        PeerError: ranks are missing at the deadline, or failed.
        DriverError: the system gave this rank no socket.
    """
    deadline = time.monotonic() + world.timeout_s
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo, _directory(world, together) as directory:
        closing = undo.enter_context(contextlib.ExitStack())

        def listen() -> socket.socket:
            with _system_errors("socket"):
                made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                closing.enter_context(made)
                made.bind(str(directory / str(world.rank)))
                made.listen(world.world_size)
                # A rank that finds later that it has no descriptor for a connection would leave
                # its peer waiting for that until the deadline.
                with contextlib.ExitStack() as spare:
                    for _ in range(world.world_size - 1):
                        spare.callback(os.close, os.dup(made.fileno()))
            return made

        def meet() -> None:
            for peer in range(world.rank):
                path = directory / str(peer)
                peers[peer] = connect(path, world.rank, world.token, deadline)
                undo.callback(peers[peer].close)
            expected = set(range(world.rank + 1, world.world_size))
            while expected:
                peer, connection = accept(listener, expected, world.token, deadline)
                peers[peer] = connection
                undo.callback(connection.close)
                expected.remove(peer)

        listener = together("opening a socket", listen)
        together("connecting to the other ranks", meet)
        closing.close()
        undo.pop_all()
    return peers


def connect(path: Path, rank: int, token: bytes, deadline: float) -> socket.socket:
    """Connect to the listener of a lower rank and show who we are.

    Raises:
        PeerError: it does not answer before ``deadline`` (``time.monotonic``), or is a stranger.
    """
    peer = int(path.name)
    with _system_errors("socket"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        _enter_queue(connection, path, deadline)
        if _uid(connection) != os.getuid():
            raise PeerError([peer], "another user listens on its socket")
        connection.send(_HELLO.pack(token, rank))
        if connection.recv(len(ACK)) != ACK:
            raise PeerError([peer], "refused this rank's token")
    except OSError as error:
        connection.close()
        raise PeerError([peer], f"connecting to its socket failed: {error}") from None
    except PeerError:
        connection.close()
        raise
    return connection


def _enter_queue(connection: socket.socket, path: Path, deadline: float) -> None:
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:  # the queue is full, of strangers perhaps: it does not wait here
            if time.monotonic() >= deadline:
                raise
        time.sleep(1e-3)


def accept(
    listener: socket.socket, expected: set[int], token: bytes, deadline: float
) -> tuple[int, socket.socket]:
    """Accept the next of the ``expected`` ranks; strangers are turned away and waiting goes on.

    A stranger is a process of another user, one without the job's token, or one that says nothing
    within a second.

    Raises:
        PeerError: the expected ranks did not come before ``deadline`` (``time.monotonic``).
    """
    while True:
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:  # strangers that keep coming do not hold us for ever
                raise TimeoutError
            listener.settimeout(left_s)
            with _system_errors("accept"):
                connection, _ = listener.accept()
        except TimeoutError:
            what = "did not connect to share memory before the deadline"
            raise PeerError(expected, what) from None
        rank = _greet(connection, expected, token)
        if rank is not None:
            return rank, connection
        connection.close()


def _greet(connection: socket.socket, expected: set[int], token: bytes) -> int | None:
    if _uid(connection) != os.getuid():
        return None
    connection.settimeout(1.0)
    try:
        claimed, rank = _HELLO.unpack(connection.recv(_HELLO.size + 1))  # and nothing after it
        if not hmac.compare_digest(claimed, token) or rank not in expected:
            return None
        connection.send(ACK)
    except (OSError, struct.error):
        return None
    return int(rank)


def _uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


@contextlib.contextmanager
def _directory(world: World, together: Together) -> Iterator[Path]:
    """A directory that only this user can enter; rank 0 makes and removes it."""
    with contextlib.ExitStack() as undo:

        def make() -> str | None:
            if world.rank:
                return None
            # tempfile.gettempdir would try to write a file, for which a descriptor may be missing
            parents = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR")]
            usable = next((parent for parent in parents if parent and _has_room(parent)), "/tmp")
            with _system_errors("mkdtemp"):
                made = tempfile.mkdtemp(prefix="tpspan-", dir=usable)  # mode 0700
            undo.callback(_remove, made, world.world_size)
            return made

        made = together("making a directory for sockets", make)
        yield Path(world.control.broadcast(made))


def _has_room(parent: str) -> bool:
    """Whether every rank can have a socket there, wherever it stands."""
    is_short = os.path.isabs(parent) and len(os.fsencode(parent)) < _MAX_PARENT
    return is_short and os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)


def _remove(directory: str, world_size: int) -> None:
    """Remove the directory and every rank's socket, be it with no descriptor left to list it."""
    with contextlib.suppress(OSError):
        for rank in range(world_size):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, str(rank)))
        os.rmdir(directory)


@contextlib.contextmanager
def _system_errors(call: str) -> Iterator[None]:
    """Raise what the system refuses as a ``DriverError`` with advice."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
        arguments = {"reason": error.strerror or str(error)}
        advice = advise(call, name, arguments, PAGE_NBYTES)
        raise DriverError(call, error.errno or 0, name, arguments, advice) from None
