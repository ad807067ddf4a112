"""Where the keeper of this user is found: a private directory with a socket and locks.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time

from tpspan.errors import KeeperError

VARIABLE = "TPSPAN_KEEPER_DIR"
"""Names another directory, and with it another keeper."""

_MAX_PATH = 90  # a Unix socket's path ends at 107 bytes


class Place:
    """The directory of one keeper.

    Attributes:
        directory: only this user can enter it.
        socket: the path at which the keeper listens.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.socket = os.path.join(directory, "keeper")
        self.log = os.path.join(directory, "log")

    def lock(self, name: str, timeout_s: float) -> int | None:
        """Take a lock that the end of this process gives back.

        Returns:
            A descriptor that holds it, or None if somebody else still had it at the deadline.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(os.path.join(self.directory, name), flags, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
            time.sleep(2e-3)


def find_place() -> Place:
    """This user's directory, made if it is not there.

    It is ``$TPSPAN_KEEPER_DIR``, or ``tpspan`` in ``$XDG_RUNTIME_DIR``, or ``/tmp/tpspan-<uid>``.

    Raises:
        KeeperError: it belongs to somebody else, or others may enter it.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directory = os.environ.get(VARIABLE, "")
    if not directory and runtime and len(runtime) < _MAX_PATH and os.access(runtime, os.W_OK):
        directory = os.path.join(runtime, "tpspan")
    directory = os.path.abspath(directory or f"/tmp/tpspan-{user}")
    if len(directory) > _MAX_PATH:
        raise KeeperError(
            f"{directory} is too long for the path of a socket: set {VARIABLE} to a shorter one"
        )
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise KeeperError(f"the keeper's directory {directory} cannot be made: {error}") from None
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise KeeperError(f"{directory} is no directory: the keeper's socket cannot be there")
    if found.st_uid != user:
        raise KeeperError(
            f"{directory} belongs to user {found.st_uid}, and this is user {user}: a keeper serves "
            f"its own user only. Set {VARIABLE} to a directory of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise KeeperError(
            f"{directory} can be entered by other users: it must have mode 700 (chmod 700)"
        )
    return Place(directory)
