"""Descriptors of blocks, passed between the ranks of one host over private Unix sockets.

Every pair of ranks is connected once, when the world first shares memory. The end of a connection
also tells at once that a peer has died.

Blocks travel in batches of at most 64 descriptors (``SCM_RIGHTS``). A batch goes round by round: in
round k a rank sends to the k-th rank on its right and receives from the k-th on its left, who
imports, closes and acknowledges. So no rank ever holds more than two batches, and the limit of open
files does not depend on how many blocks there are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tpspan.errors import DriverError, PeerError, TpspanError
from tpspan.launch.votes import together
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, Block, Driver
from tpspan.memory.advice import advise
from tpspan.spans.connections import ACK, connect_all

T = TypeVar("T")

BATCH = 64
"""Descriptors in one message; Linux allows 253 (SCM_MAX_FD)."""

_HEADER = struct.Struct("!iI")  # descriptors here (-1: the sender failed), number of the exchange


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
        self._number = 0
        self._peers: dict[int, socket.socket] = {}
        outside = set(range(world.world_size)) - set(world.domain)
        if outside:
            raise PeerError(
                outside,
                "cannot map this rank's memory: they run on another host or as another user. "
                "Share spans inside world.subset(world.domain)",
            )
        if world.world_size > 1:
            self._peers = connect_all(world, self.together)

    def together(self, what: str, step: Callable[[], T]) -> T:
        """Take a step on every rank, and fail on all if it fails on one. Collective.

        For what is made before the board is; it votes over the control plane.

        Raises:
            As ``tpspan.launch.votes.together``.
        """
        return together(what, self.rank, step, self._control.all_gather)

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
        self._number += 1
        num_blocks = max(len(each) for each in sizes) if self.world_size > 1 else 0
        with contextlib.ExitStack() as undo:
            for first in range(0, num_blocks, BATCH):
                # Exported once for all peers: on CUDA an export takes as long as an import.
                with _exported(own[first : first + BATCH], failures) as fds:
                    for distance in range(1, self.world_size):
                        right = (self.rank + distance) % self.world_size
                        left = (self.rank - distance) % self.world_size
                        incoming = sizes[left][first : first + BATCH]
                        if first < len(own):
                            self._send(right, fds, timeout_s)
                        if incoming:
                            for block in self._receive(left, driver, incoming, failures, timeout_s):
                                undo.callback(block.close)
                                blocks[left].append(block)
                        if first < len(own):
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

    def _send(self, peer: int, fds: Sequence[int], timeout_s: float) -> None:
        """Send a batch; an empty one says that this rank could not export it."""
        connection = self._connection(peer, timeout_s)
        try:
            socket.send_fds(connection, [_HEADER.pack(len(fds) or -1, self._number)], fds)
        except OSError as error:
            raise PeerError([peer], f"sending blocks to it failed: {error}") from None

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
            count, number = _HEADER.unpack(data)
            if number != self._number:
                failures.append(PeerError([peer], "is out of step after an exchange that failed"))
            elif count < 0:
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
            self._connection(peer, timeout_s).send(ACK)

    def _take(
        self, peer: int, timeout_s: float, what: str, max_fds: int = 0
    ) -> tuple[bytes, list[int]]:
        connection = self._connection(peer, timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 64, max_fds, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise PeerError([peer], f"no answer within {timeout_s} s while {what}") from None
        except OSError as error:
            raise PeerError([peer], f"{what} failed: {error}") from None
        if not data:
            raise PeerError([peer], f"left the world, or ended, while {what}")
        return data, fds

    def _connection(self, peer: int, timeout_s: float) -> socket.socket:
        connection = self._peers[peer]
        connection.settimeout(timeout_s)
        return connection


def _table_is_full(num_arrived: int, num_sent: int) -> DriverError:
    """What it means that the kernel dropped descriptors of a message."""
    arguments = {"num_sent": num_sent, "num_arrived": num_arrived}
    advice = advise("recvmsg", "EMFILE", arguments, PAGE_NBYTES)
    return DriverError("recvmsg", errno.EMFILE, "EMFILE", arguments, advice)


@contextlib.contextmanager
def _exported(blocks: Sequence[Block], failures: list[TpspanError]) -> Iterator[list[int]]:
    """Descriptors of all the blocks, or none and a failure noted; closed at the end."""
    fds: list[int] = []
    try:
        try:
            fds.extend(block.export() for block in blocks)
        except TpspanError as error:
            failures.append(error)
            for fd in fds:
                os.close(fd)
            fds.clear()
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
