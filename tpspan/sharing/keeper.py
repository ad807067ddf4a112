"""The keeper: a process that holds descriptors of published memory and a table of names.

It never maps the memory, so it needs neither torch nor CUDA and costs no GPU memory. One runs per
user and host: whoever needs it first starts it, and it ends when it holds nothing and nobody is
connected. It serves all clients from one thread that never waits for any of them: what a stopped
client does not read stays in that client's queue.

Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from tpspan.errors import KeeperError
from tpspan.sharing import wire
from tpspan.sharing.place import Place, find_place
from tpspan.sharing.serving import Keeper

_LOCK_S = 5.0
_POLL_S = 5e-3


def _serves(place: Place) -> bool:
    """Whether somebody answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_LOCK_S)
        try:
            connection.connect(place.socket)
            wire.send(connection, {"op": "hello", "protocol": wire.PROTOCOL})
            return "pid" in wire.receive(connection)[0]
        except (OSError, wire.WireError):
            return False


def run(place: Place, *, ends_by_itself: bool, ready: Callable[[], None]) -> None:
    """Be the keeper of a place until it ends; returns at once if there is one already.

    Args:
        ready: called when clients can connect.

    Raises:
        KeeperError: another keeper of this place neither serves nor ends.
    """
    deadline = time.monotonic() + _LOCK_S
    while (lock := place.lock()) is None:
        if _serves(place):
            ready()
            return
        if time.monotonic() > deadline:  # else it is about to end, or to make its socket anew
            raise KeeperError(f"a keeper in {place.directory} neither answers nor ends: kill it")
        time.sleep(_POLL_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Whoever ends in order takes the socket away.
    keeper = Keeper(
        place, lock, ends_by_itself=ends_by_itself, follows_a_kill=os.path.exists(place.socket)
    )
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    signal.signal(signal.SIGINT, lambda *_: keeper.stop())
    ready()
    keeper.serve()


def main(words: list[str]) -> int:
    """Run the keeper: ``start FD`` detaches it and writes what happened to FD, ``serve`` does not.

    Returns:
        The exit status.
    """
    if words == ["serve"]:
        try:
            run(find_place(), ends_by_itself=False, ready=lambda: None)
        except (KeeperError, OSError) as error:
            sys.stderr.write(f"tpspan keeper: {error}\n")
            return 1
        return 0
    report = int(words[1])
    if os.fork():
        return 0
    os.setsid()
    os.chdir("/")
    try:
        place = find_place()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(place.log, flags, 0o600)
        os.dup2(log, 2)
        os.close(log)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write("tpspan-keeper")

        def ready() -> None:
            with contextlib.suppress(OSError):  # who started us may have been killed
                os.write(report, b"ok")
            os.close(report)

        run(place, ends_by_itself=True, ready=ready)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(report, str(error).encode())
        traceback.print_exc()
        return 1
    return 0
