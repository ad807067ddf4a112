"""Signals between hosts' threads of control: futexes on the counters, with a look at who died."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection

from tpspan import kernels
from tpspan.errors import ClosedError, PeerError
from tpspan.spans.exchange import Exchange
from tpspan.spans.pages import Pages

_LOOK_FOR_DEAD_S = 0.2
_ENDED = "left the world, or ended"
_SAME_CALLS = "all ranks must make the same collective calls in the same order"


class HostOps:
    """Post, wait and barrier of the calling thread over pages of counters (``SignalOps``).

    An exception that comes into a barrier or a wait from elsewhere, such as that of a signal
    handler, leaves the ranks out of step: this one counts as missing from then on.

    Args:
        pages: hold the counters; their content begins as zeros, as that of new host memory does.
        exchange: knows which peers have died.
        timeout_s: the deadline where a call gives none.
        num_cores: cores that the ranks have between them, if that is known already.
    """

    def __init__(
        self, pages: Pages, exchange: Exchange, timeout_s: float, num_cores: int | None = None
    ) -> None:
        self.num_cores = num_cores
        self._pages = pages
        self._exchange = exchange
        self._rank, self._world_size = exchange.rank, exchange.world_size
        self._timeout_s = timeout_s
        self._counts: dict[tuple[str, int, int], ctypes.c_uint32] = {}
        # Where the counters lie: asked for at every hand-over.
        self._posts: dict[tuple[int, int], tuple[int, int]] = {}
        self._counters: dict[tuple[int, int], int] = {}
        self._missing: tuple[int, ...] = ()
        self._is_closed = False

    def barrier(
        self,
        slot: int,
        stream: int = 0,
        capturing: bool | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until every rank has come to this barrier of the slot.

        Raises:
            PeerError: ranks died or did not come before the deadline.
        """
        place = (self._pages.base_address, self._pages.page_nbytes, slot, self._rank)
        num_cores = self.num_cores
        epoch = self._count("epoch", slot, 0)
        address = ctypes.addressof(epoch)
        self._in_step(
            lambda left_s: kernels.host_barrier(
                *place, self._world_size, address, left_s, num_cores=num_cores
            ),
            epoch,
            timeout_s,
        )

    def post(self, slot: int, peer: int, stream: int = 0) -> None:
        """Count one more post to a peer, and wake it if it waits."""
        place = self._posts.get((slot, peer))
        if place is None:
            sent = self._count("sent", slot, peer)
            place = self._pages.counter(slot, peer, self._rank), ctypes.addressof(sent)
            self._posts[slot, peer] = place
        kernels.host_post(*place)

    def wait(
        self, slot: int, peer: int, stream: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Wait for the peer's next post.

        Raises:
            PeerError: it died or did not post before the deadline.
        """
        expected = self._count("expected", slot, peer)
        address = ctypes.addressof(expected)
        counter = self._pages.counter(slot, self._rank, peer)
        self._in_step(
            lambda left_s: kernels.host_wait(
                counter, address, left_s, peer=peer, num_cores=self.num_cores
            ),
            expected,
            timeout_s,
        )

    def has_come(self, slot: int, peer: int, count: int) -> bool:
        """Whether the peer has posted at least ``count`` times on the slot."""
        counter = self._counters.get((slot, peer))
        if counter is None:
            counter = self._counters[slot, peer] = self._pages.counter(slot, self._rank, peer)
        return kernels.host_has_arrived(counter, count)

    def wait_for(
        self,
        slot: int,
        peer: int,
        count: int,
        *,
        timeout_s: float | None = None,
        what: str = _SAME_CALLS,
    ) -> None:
        """Wait until the peer has posted ``count`` times on the slot, however often one waits.

        A failed wait changes nothing: it may be made again.

        Args:
            what: ends the sentence that says that it did not come in time.

        Raises:
            PeerError: as ``wait``.
        """
        expected = self._count("expected", slot, peer)
        expected.value = count - 1  # the wait counts on by one
        address = ctypes.addressof(expected)
        counter = self._pages.counter(slot, self._rank, peer)
        self._until(
            lambda left_s: kernels.host_wait(
                counter, address, left_s, peer=peer, num_cores=self.num_cores
            ),
            expected,
            timeout_s,
            what,
        )

    def check_alive(self, peers: Collection[int]) -> None:
        """Refuse to go on without peers whose process has ended.

        Raises:
            PeerError: names them.
        """
        dead = set(self._exchange.dead_peers()) & set(peers)
        if dead:
            raise PeerError(dead, _ENDED)

    def missing(self) -> tuple[int, ...]:
        return self._missing

    def close(self) -> None:
        """Let who still waits, interrupted by who closes, wait no longer."""
        self._is_closed = True

    def _in_step(
        self,
        attempt: Callable[[float], tuple[int, ...]],
        count: ctypes.c_uint32,
        timeout_s: float | None,
    ) -> None:
        """Wait for what counts on by one: who is torn out of it no longer knows how far it is."""
        try:
            self._until(attempt, count, timeout_s)
        except PeerError:
            raise
        except BaseException:
            self._missing = (self._rank,)
            raise

    def _until(
        self,
        attempt: Callable[[float], tuple[int, ...]],
        count: ctypes.c_uint32,
        timeout_s: float | None,
        what: str = _SAME_CALLS,
    ) -> None:
        self._pages.hold()
        try:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            deadline = time.monotonic() + timeout_s
            while True:
                left_s = max(deadline - time.monotonic(), 0.0)
                missing = attempt(min(left_s, _LOOK_FOR_DEAD_S))
                if self._is_closed:
                    raise ClosedError("the world was closed while this call waited")
                if not missing:
                    return
                count.value -= 1  # the attempt is made again: it must not count twice
                dead = set(self._exchange.dead_peers()) & set(missing)
                if dead:
                    self._missing = tuple(sorted(dead))
                    raise PeerError(dead, _ENDED)
                if time.monotonic() >= deadline:
                    self._missing = missing
                    raise PeerError(missing, f"did not come within {timeout_s:g} s; {what}")
        finally:
            self._pages.let_go()

    def _count(self, kind: str, slot: int, peer: int) -> ctypes.c_uint32:
        return self._counts.setdefault((kind, slot, peer), ctypes.c_uint32())
