"""Agreement among the ranks of one host through shared memory, in microseconds.

Protocol of one round: a rank writes its message into its own page, into the half given by the
parity of the round's number, then enters a barrier; after it, everyone reads everyone's half. A
half is written again two rounds later, when the barrier of the round between has shown that all
have read it (invariant 6).
"""

from __future__ import annotations

import contextlib
import ctypes
import numbers
import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tpspan import kernels
from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.launch.votes import Vote, attempt, settle, together
from tpspan.launch.world import IN_A_CHILD, MAX_TIMEOUT_S, World
from tpspan.memory.host import HostDriver
from tpspan.spans.exchange import Exchange
from tpspan.spans.host_ops import HostOps
from tpspan.spans.pages import Pages

T = TypeVar("T")

_LENGTH_NBYTES = 8
_MESSAGES_OFFSET = 1 << 20  # the first half of the page holds counters
_HALF_NBYTES = 1 << 19
_BEGIN, _STEP = "begun", "a later step"


_num_forks = 0


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)


def _is_step(said: object) -> bool:
    """Whether a rank is at a step of a collective call."""
    return isinstance(said, tuple) and len(said) == 4 and said[0] in (_BEGIN, _STEP)


def is_deadline(timeout_s: object) -> bool:
    """Whether it can be one; None stands for that of the world."""
    if isinstance(timeout_s, numbers.Real):
        return 0 < float(timeout_s) < MAX_TIMEOUT_S
    return timeout_s is None


class Board:
    """Small messages and votes among all ranks of a world on one host. Every call is collective.

    After a call failed, or was left half done by an exception such as that of a signal handler, the
    ranks no longer agree on what was said: every later call raises ``PeerError``.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.world_size = world.world_size
        self.timeout_s = world.timeout_s
        self.exchange = world.resource("exchange", Exchange)
        self._round = 0
        self._broken: PeerError | None = None
        self._is_closed = False
        self._num_forks = _num_forks
        with contextlib.ExitStack() as undo:
            self._pages = Pages(self.exchange, HostDriver())
            undo.callback(self._pages.close)
            self._ops = HostOps(self._pages, self.exchange, world.timeout_s)
            # A launcher may tie each rank to a core of its own: only together they know how many.
            cores: set[int] = set().union(*self.all_gather(os.sched_getaffinity(0)))
            self.num_cores = self._ops.num_cores = len(cores)
            undo.pop_all()

    @staticmethod
    def of(world: World) -> Board:
        """The board of a world, made at its first use. Collective."""
        return world.resource("board", Board)

    def check(self) -> None:
        """Refuse a closed world, and a process that is not the rank it was forked from.

        Raises:
            ClosedError: one of the two.
        """
        if self._is_closed:
            raise ClosedError("the world of this span is closed")
        if self._num_forks != _num_forks:
            raise ClosedError(IN_A_CHILD)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has come.

        Raises:
            PeerError: ranks died or did not come before the deadline; it names them.
        """
        self.all_gather_bytes(b"", timeout_s=timeout_s)

    def all_gather(self, message: object, *, timeout_s: float | None = None) -> list[Any]:
        """Give every rank's message, anything that pickles, to every rank, by rank.

        Raises:
            PeerError: ranks died or did not come before the deadline; it names them.
        """
        payloads = self.all_gather_bytes(pickle.dumps(message), timeout_s=timeout_s)
        return [pickle.loads(payload) for payload in payloads]

    def all_gather_bytes(self, message: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """``all_gather`` of bytes, of any lengths."""
        self.check()
        if timeout_s is None or not is_deadline(timeout_s):
            timeout_s = self.timeout_s
        self._pages.hold()
        try:
            return self._exchanged(message, timeout_s)
        except PeerError:
            raise
        except BaseException:
            self._leave()
            raise
        finally:
            self._pages.let_go()

    def _exchanged(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Every rank's message, in as many rounds as the longest takes."""
        room = _HALF_NBYTES - _LENGTH_NBYTES
        received = [bytearray() for _ in range(self.world_size)]
        at = 0
        while True:
            half = _MESSAGES_OFFSET + self._round % 2 * _HALF_NBYTES
            part = message[at : at + room]
            mine = self._pages.address_of(self.rank) + half
            ctypes.c_uint64.from_address(mine).value = len(message)
            ctypes.memmove(mine + _LENGTH_NBYTES, part, len(part))
            at += len(part)
            self._meet(timeout_s)
            is_complete = True
            for rank, got in enumerate(received):
                page = self._pages.address_of(rank) + half
                length = ctypes.c_uint64.from_address(page).value
                got += ctypes.string_at(page + _LENGTH_NBYTES, min(room, length - len(got)))
                is_complete &= len(got) == length
            if is_complete:
                return [bytes(got) for got in received]

    def begin(
        self,
        operation: str,
        request: object,
        step: Callable[[], T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Open a collective call: compare what every rank asks for, and take the first step.

        One round serves both. ``step`` changes nothing that a failure would leave behind: it checks
        arguments, waits for a fence, or makes what the caller's ``ExitStack`` undoes.

        Args:
            operation: the call's name, for errors.
            request: what must be equal on all ranks; it pickles.
            step: what this rank does first.

        Raises:
            CollectiveMismatch: the requests differ (invariant 3); raised on all ranks.
            PeerError: the step failed on other ranks, or they did not come.
            BaseException: whatever ``step`` raised on this rank.
        """

        def checked() -> T:
            if not is_deadline(timeout_s):
                raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
            return step()

        value, error, vote = attempt(self.rank, checked)
        said = self._said(_BEGIN, operation, request, vote, timeout_s)
        if any(other[:2] != said[0][:2] for other in said):
            shown = {
                rank: what if name == operation else f"{name}: {what}"
                for rank, (name, what, _) in enumerate(said)
            }
            raise CollectiveMismatch(operation, shown)
        settle(operation, error, [vote for *_, vote in said])
        return cast(T, value)

    def together(self, what: str, step: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Do a step on every rank, and fail on all if it fails on one (invariant 4).

        The caller undoes its own part when this raises.

        Raises:
            PeerError: the step failed on other ranks; it says what they said.
            BaseException: whatever ``step`` raised on this rank.
        """

        def gather(vote: Vote) -> list[Vote]:
            said = self._said(_STEP, what, None, vote, timeout_s)
            return [vote for *_, vote in said]

        return together(what, self.rank, step, gather)

    def _said(
        self, kind: str, what: str, request: object, vote: Vote, timeout_s: float | None
    ) -> list[tuple[str, Any, Vote]]:
        """What every rank does, asks for and votes at this step.

        Raises:
            CollectiveMismatch: a rank is at another step, because it has left a call that the
                others are in; on all ranks, which do not agree on anything from here on.
        """
        said = self.all_gather((kind, what, request, vote), timeout_s=timeout_s)
        if not all(_is_step(other) and other[0] == kind for other in said):
            shown = {
                rank: f"{other[1]} ({other[0]})" if _is_step(other) else f"{other!r:.80}"
                for rank, other in enumerate(said)
            }
            # All have seen the same: nobody needs to be told.
            others = [
                rank for rank, other in enumerate(said) if not _is_step(other) or other[0] != kind
            ]
            self._broken = PeerError(others, "ranks were at different steps of their calls")
            raise CollectiveMismatch(what, shown)
        return [other[1:] for other in said]

    def close(self) -> None:
        """Unmap the pages; every later call raises ``ClosedError``."""
        self._is_closed = True
        self._ops.close()
        self._pages.close()

    def _meet(self, timeout_s: float) -> None:
        if self._broken is not None:
            raise PeerError(self._broken.ranks, f"already failed earlier: {self._broken.what}")
        self._round += 1
        try:
            self._ops.barrier(0, timeout_s=timeout_s)
        except PeerError as error:
            # Who comes late must not go on alone: it finds this word after its barrier. Who came
            # just now may have looked before, so look for it once more.
            self._gave_up(self.rank).value = self.rank + 1
            try:
                self._ops.barrier(0, timeout_s=0.0)
                self._gave_up(self.rank).value = 0
            except PeerError:
                self._broken = error
                raise error from None
        words = [self._gave_up(rank).value for rank in range(self.world_size)]
        gone = sorted({word - 1 for word in words if word})
        if gone:
            self._broken = PeerError(
                gone, "gave up waiting before this rank came, or was interrupted"
            )
            self._gave_up(self.rank).value = gone[0] + 1
            raise self._broken

    def _leave(self) -> None:
        """Let this call fail on the others, and every later one everywhere."""
        self._broken = PeerError([self.rank], "left a collective call half done")
        self._gave_up(self.rank).value = self.rank + 1

    def _gave_up(self, rank: int) -> ctypes.c_uint32:
        """Where a rank says which one was the first to go: its number and one more, or 0."""
        address = self._pages.address_of(rank) + _MESSAGES_OFFSET - kernels.LINE_NBYTES
        return ctypes.c_uint32.from_address(address)
