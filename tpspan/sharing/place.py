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

    def make(self) -> None:
        """Make the directory if it is not there.

        Raises:
            KeeperError: it belongs to somebody else, or others may enter it.
        """
        user = os.geteuid()
        try:
            os.mkdir(self.directory, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise KeeperError(
                f"the keeper's directory {self.directory} cannot be made: {error}"
            ) from None
        found = os.lstat(self.directory)
        if not stat.S_ISDIR(found.st_mode):
            raise KeeperError(
                f"{self.directory} is no directory: the keeper's socket cannot be there"
            )
        if found.st_uid != user:
            raise KeeperError(
                f"{self.directory} belongs to user {found.st_uid}, and this is user {user}: a "
                f"keeper serves its own user only. Set {VARIABLE} to a directory of your own"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise KeeperError(
                f"{self.directory} can be entered by other users: it must have mode 700 (chmod 700)"
            )

    def lock(self) -> int | None:
        """Take the place as its keeper, until the end of this process.

        It is the directory that is locked: whoever takes old files away leaves it, and
        systemd-tmpfiles leaves even the files of a locked directory.

        Returns:
            A descriptor that holds the lock, or None if another keeper has it.

        Raises:
            KeeperError: the directory is in a file system that has no such locks.
        """
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            os.close(fd)
            raise KeeperError(
                f"{self.directory} cannot be locked: {error}. Set {VARIABLE} to a local directory"
            ) from None
        return fd

    def is_locked(self, lock: int) -> bool:
        """Whether the directory that was locked is the one that others find."""
        return _is_same(self.directory, os.fstat(lock))

    def lock_starting(self, timeout_s: float) -> int | None:
        """Take the lock of whoever starts a keeper, until the end of this process.

        Returns:
            A descriptor that holds it, or None if somebody else still had it at the deadline.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(os.path.join(self.directory, "start"), flags, 0o600)
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

    def listens(self, found: os.stat_result) -> bool:
        """Whether a socket that was bound is still the one that others find."""
        return _is_same(self.socket, found)


def find_place() -> Place:
    """This user's directory, made if it is not there.

    It is ``$TPSPAN_KEEPER_DIR``, or ``tpspan`` in ``$XDG_RUNTIME_DIR``, or ``/tmp/tpspan-<uid>``.

    Raises:
        KeeperError: it belongs to somebody else, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directory = os.environ.get(VARIABLE, "")
    if not directory and runtime and len(runtime) < _MAX_PATH and os.access(runtime, os.W_OK):
        directory = os.path.join(runtime, "tpspan")
    directory = os.path.abspath(directory or f"/tmp/tpspan-{os.geteuid()}")
    if len(directory) > _MAX_PATH:
        raise KeeperError(
            f"{directory} is too long for the path of a socket: set {VARIABLE} to a shorter one"
        )
    place = Place(directory)
    place.make()
    return place


def _is_same(path: str, found: os.stat_result) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)
