"""Descriptors of blocks, passed between the ranks of one host over private Unix sockets.

Every pair of ranks is connected once, when the world first shares memory: the sockets stand in a
directory that only this user can enter, each side shows its credentials (``SO_PEERCRED``) and the
job's token, and directory and listeners are removed before the first block is shared. What remains
is one connection per peer, whose end also tells at once that a peer has died.

Blocks then travel in rounds: in round k a rank sends to the k-th rank on its right and receives
from the k-th on its left, in batches of at most 64 descriptors (``SCM_RIGHTS``), each imported,
closed and acknowledged before the next. So no rank ever holds more than two batches, and the limit
of open files does not depend on how many blocks there are.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tpspan.errors import DriverError, PeerError, TpspanError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, Block, Driver
from tpspan.memory.advice import advise
from tpspan.spans.votes import together

T = TypeVar("T")

BATCH = 64
"""Descriptors in one message; Linux allows 253 (SCM_MAX_FD)."""

_HELLO = struct.Struct("!16sI")
_HEADER = struct.Struct("!iI")  # descriptors in this message (-1: the sender failed), first block
_ACK = b"ok"
_MAX_PARENT = 70  # a Unix socket's path ends at 107 bytes


class Exchange:
    """One connection from this rank to every other rank of a world on one host.

    Collective: made by all ranks of the world together.

    Raises:
        PeerError: ranks are missing at the deadline, or lie outside the domain.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.world_size = world.world_size
        self.timeout_s = world.timeout_s
        self._control = world.control
        self._peers: dict[int, socket.socket] = {}
        outside = set(range(world.world_size)) - set(world.domain)
        if outside:
            raise PeerError(
                outside,
                "cannot map this rank's memory: they run on another host or as another user. "
                "Share spans inside world.subset(world.domain)",
            )
        if world.world_size > 1:
            with self._directory() as directory:
                self._connect(world.token, directory)

    def together(self, what: str, step: Callable[[], T]) -> T:
        """Take a step on every rank, and fail on all if it fails on one. Collective.

        For what is made before the board is; it votes over the control plane.

        Raises:
            As ``tpspan.spans.votes.together``.
        """
        return together(what, self.rank, step, self._control.all_gather)

    def _connect(self, token: bytes, directory: Path) -> None:
        deadline = time.monotonic() + self.timeout_s
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            closing = contextlib.ExitStack()
            undo.push(closing)

            def listen() -> socket.socket:
                with _system_errors("socket"):
                    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    closing.enter_context(made)
                    made.bind(str(directory / str(self.rank)))
                    made.listen(self.world_size)
                return made

            def meet() -> None:
                for peer in range(self.rank):
                    self._peers[peer] = connect(directory / str(peer), self.rank, token, deadline)
                expected = set(range(self.rank + 1, self.world_size))
                while expected:
                    peer, connection = accept(listener, expected, token, deadline)
                    self._peers[peer] = connection
                    expected.remove(peer)

            listener = self.together("opening a socket", listen)
            self.together("connecting to the other ranks", meet)
            closing.close()
            undo.pop_all()

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        """A directory that only this user can enter; rank 0 makes and removes it."""
        with contextlib.ExitStack() as undo:

            def make() -> str | None:
                if self.rank:
                    return None
                parents = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
                parent = next(
                    (p for p in parents if p and len(p) < _MAX_PARENT and os.access(p, os.W_OK)),
                    "/tmp",
                )
                with _system_errors("mkdtemp"):
                    made = tempfile.mkdtemp(prefix="tpspan-", dir=parent)  # mode 0700
                undo.callback(shutil.rmtree, made, ignore_errors=True)
                return made

            made = self.together("making a directory for sockets", make)
            yield Path(self._control.broadcast(made))

    def all_gather(
        self,
        driver: Driver,
        own: Sequence[Block],
        sizes: Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> list[list[Block]]:
        """Give every rank's blocks to every rank. Collective.

        A failure on one side never stops the rounds half-way: they are run to their end, so that
        the connections stay in step, and only then the first failure is raised.

        Args:
            driver: imports the descriptors.
            own: this rank's blocks.
            sizes: per rank, the bytes of each block that it shares; the same on all ranks.
            timeout_s: how long to wait for one message; by default the world's.

        Returns:
            Per rank, its blocks: this rank's own, and imported ones that the caller closes.

        Raises:
            PeerError: a rank died, did not come, or could not export its blocks.
            DriverError: this rank could not export or import.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        blocks: list[list[Block]] = [[] for _ in sizes]
        blocks[self.rank] = list(own)
        failures: list[TpspanError] = []
        with contextlib.ExitStack() as undo:
            for distance in range(1, self.world_size):
                right = (self.rank + distance) % self.world_size
                left = (self.rank - distance) % self.world_size
                num_blocks = max(len(own), len(sizes[left]))
                for first in range(0, num_blocks, BATCH):
                    outgoing = own[first : first + BATCH]
                    incoming = sizes[left][first : first + BATCH]
                    if outgoing:
                        self._send(right, outgoing, first, failures, timeout_s)
                    if incoming:
                        for block in self._receive(left, driver, incoming, failures, timeout_s):
                            undo.callback(block.close)
                            blocks[left].append(block)
                    if outgoing:
                        self._take(right, timeout_s, "acknowledging blocks")
            if failures:
                raise failures[0]
            undo.pop_all()
        return blocks

    def dead_peers(self) -> tuple[int, ...]:
        """The ranks whose process has ended, as far as their connections tell."""
        poll = select.poll()
        by_fd = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLRDHUP)
        return tuple(sorted(by_fd[fd] for fd, _ in poll.poll(0)))

    def close(self) -> None:
        """Close the connections; peers then see this rank as gone."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _send(
        self,
        peer: int,
        blocks: Sequence[Block],
        first: int,
        failures: list[TpspanError],
        timeout_s: float,
    ) -> None:
        fds: list[int] = []
        try:
            count = len(blocks)
            try:
                fds.extend(_exported(blocks))
            except TpspanError as error:
                failures.append(error)
                count = -1
            connection = self._connection(peer, timeout_s)
            header = [_HEADER.pack(count, first)]
            try:
                socket.send_fds(connection, header, fds if count > 0 else [])
            except OSError as error:
                raise PeerError([peer], f"sending blocks to it failed: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def _receive(
        self,
        peer: int,
        driver: Driver,
        sizes: Sequence[int],
        failures: list[TpspanError],
        timeout_s: float,
    ) -> Iterator[Block]:
        data, fds = self._take(peer, timeout_s, "receiving blocks", BATCH)
        try:
            count, _ = _HEADER.unpack(data)
            if count < 0:
                failures.append(PeerError([peer], "could not export its blocks"))
            elif len(fds) != len(sizes):
                failures.append(_table_is_full(len(fds), len(sizes)))
            else:
                for nbytes in sizes:
                    fd = fds.pop(0)  # closed at once: half a batch less to hold
                    try:
                        block = Block.from_fd(driver, fd, nbytes)
                    finally:
                        os.close(fd)
                    yield block
        except TpspanError as error:
            failures.append(error)
        finally:
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(OSError):  # a peer that died is reported by the next wait for it
            self._connection(peer, timeout_s).send(_ACK)

    def _take(
        self, peer: int, timeout_s: float, what: str, max_fds: int = 0
    ) -> tuple[bytes, list[int]]:
        connection = self._connection(peer, timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 64, max_fds)
        except TimeoutError:
            raise PeerError([peer], f"no answer within {timeout_s} s while {what}") from None
        except OSError as error:
            raise PeerError([peer], f"{what} failed: {error}") from None
        if not data:
            raise PeerError([peer], f"its process ended while {what}")
        return data, fds

    def _connection(self, peer: int, timeout_s: float) -> socket.socket:
        connection = self._peers[peer]
        connection.settimeout(timeout_s)
        return connection


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
        if connection.recv(len(_ACK)) != _ACK:
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
        connection.send(_ACK)
    except (OSError, struct.error):
        return None
    return int(rank)


def _uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


def _table_is_full(num_arrived: int, num_sent: int) -> DriverError:
    """What it means that the kernel dropped descriptors of a message."""
    arguments = {"num_sent": num_sent, "num_arrived": num_arrived}
    advice = advise("recvmsg", "EMFILE", arguments, PAGE_NBYTES)
    return DriverError("recvmsg", errno.EMFILE, "EMFILE", arguments, advice)


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


def _exported(blocks: Sequence[Block]) -> Iterator[int]:
    for block in blocks:
        yield block.export()
