"""The control plane: small objects between the ranks, every wait with a deadline.

A star: the first of the ranks gathers what every other sent and answers them all. It is written
over a ``Channel``, which moves bytes by (peer, tag) and never waits; MPI and torch's TCPStore
are channels.

How the ranks that did not come are named. The hub knows who is missing. While it waits it tells
those who came (a pulse), so whoever runs out of time first can name the missing ranks as well; a
rank that gives up takes its message back, so the hub cannot succeed without it. A rank that leaves
its world says so, and nobody waits for it any longer. After such an error this control plane is out
of step and every further call raises the same error; a new ``World.subset`` starts afresh.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from tpspan.errors import CollectiveMismatch, PeerError
from tpspan.launch.failure import report

FIRST_PULSE_S = 0.5
GRACE_S = 1.0
"""How much longer than the hub the others wait, so that its verdict arrives before they give up."""


class Tag(NamedTuple):
    """Which call of which control plane a message belongs to."""

    context: str
    sequence: int


class Channel(Protocol):
    """Moves bytes between ranks; the order of messages with one peer and tag is kept.

    Within one context sequences only grow: once a rank uses a later one with a peer, what is left
        of earlier ones may be dropped.
    """

    @property
    def rank(self) -> int:
        """This rank, among all that the channel connects."""

    @property
    def world_size(self) -> int:
        """How many ranks the channel connects."""

    def send(self, peer: int, tag: Tag, data: bytes) -> None:
        """Hand a message over; does not wait for the peer."""

    def poll(self, peer: int, tag: Tag) -> bytes | None:
        """Return the next message of that peer and tag, or None if none has come."""

    def retract(self, peer: int, tag: Tag) -> None:
        """Take back what was sent with that tag, unless the peer has polled it already."""

    def flush(self, limit_s: float) -> None:
        """Wait until what was sent moves without this rank's help, or until the limit."""

    def has_left(self, peer: int) -> bool:
        """Say whether the peer has closed its end."""

    def abort(self, message: str, *, secondary: bool = False) -> NoReturn:
        """Report the message and end every rank of the job with a non-zero exit code.

        Args:
            secondary: this rank failed only because a peer did.
        """

    def close(self, linger_s: float = 5.0) -> None:
        """Tell the peers that this rank leaves; waits at most ``linger_s`` for sent data to go."""


class Control(Protocol):
    """Collective calls for small objects; all of them raise ``PeerError`` at their deadline."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks take part."""

    def all_gather(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Collective. Return every rank's object, by rank."""

    def broadcast(self, obj: Any, *, root: int = 0, timeout_s: float | None = None) -> Any:
        """Collective. Return the object of ``root``."""

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Collective. Return once every rank has called."""

    def abort(self, message: str) -> NoReturn:
        """Report the message and end every rank of the job with a non-zero exit code."""


class Backoff:
    """Sleeps of a tenth of the wait so far: quick answers stay quick, long waits cost little."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def sleep(self) -> None:
        """Sleep, between 20 µs and 5 ms."""
        time.sleep(min(max((time.monotonic() - self._start_s) / 10, 2e-5), 5e-3))


class StarControl:
    """``Control`` for some of a channel's ranks, with the first of them as the hub.

    Args:
        channel: what moves the bytes.
        ranks: the channel's ranks that take part; the order gives them their new numbers.
        context: a name that no other control plane over this channel has.
        timeout_s: the deadline of calls that give none.
    """

    def __init__(
        self, channel: Channel, ranks: Sequence[int], context: str, timeout_s: float
    ) -> None:
        self._channel = channel
        self._ranks = tuple(ranks)
        self._context = context
        self._timeout_s = timeout_s
        self._rank = self._ranks.index(channel.rank)
        self._sequence = 0
        self._failure: PeerError | None = None
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def context(self) -> str:
        """The name that sets this control plane apart from others over the same channel."""
        return self._context

    @property
    def failed(self) -> bool:
        """Whether a call has failed, so that the ranks are out of step."""
        return self._failure is not None

    def all_gather(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Collective. Return every rank's object, by rank.

        Raises:
            PeerError: some ranks did not come before the deadline, or left; it names them.
            CollectiveMismatch: some ranks made another call.
        """
        parts = self._exchange("all_gather", pickle.dumps(obj), timeout_s)
        return [pickle.loads(part) for part in parts]

    def broadcast(self, obj: Any, *, root: int = 0, timeout_s: float | None = None) -> Any:
        """Collective. Return the object of ``root``; what others pass is ignored.

        Raises:
            PeerError: some ranks did not come before the deadline, or left; it names them.
            CollectiveMismatch: some ranks made another call, or named another root.
            ValueError: there is no such root.
        """
        if not 0 <= root < self.world_size:
            raise ValueError(f"root={root} is no rank of {self.world_size}")
        data = pickle.dumps(obj) if self._rank == root else b""
        return pickle.loads(self._exchange(f"broadcast from rank {root}", data, timeout_s)[root])

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Collective. Return once every rank has called.

        Raises:
            PeerError: some ranks did not come before the deadline, or left; it names them.
            CollectiveMismatch: some ranks made another call.
        """
        self._exchange("barrier", b"", timeout_s)

    def abort(self, message: str) -> NoReturn:
        """Report the message and end every rank of the job with a non-zero exit code."""
        self._channel.abort(message)

    def _exchange(self, call: str, data: bytes, timeout_s: float | None) -> list[bytes]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if limit_s <= 0:
            raise ValueError(f"timeout_s={limit_s} must be positive")
        if not self._lock.acquire(timeout=limit_s):
            raise PeerError(
                [self._rank], f"{call}: another thread held the control plane {limit_s:g} s"
            )
        try:
            if self._failure is not None:
                raise PeerError(self._failure.ranks, f"{self._failure.what} (in an earlier call)")
            self._sequence += 1
            run = self._as_hub if self._rank == 0 else self._as_peer
            try:
                return run(call, Tag(self._context, self._sequence), data, limit_s)
            except PeerError as error:
                self._failure = error
                raise
        finally:
            self._lock.release()

    def _as_hub(self, call: str, tag: Tag, data: bytes, limit_s: float) -> list[bytes]:
        calls, parts = self._gather(call, tag, data, limit_s)
        others = range(1, self.world_size)
        if len(set(calls.values())) > 1:
            shown = dict(sorted(calls.items()))
            self._answer(tag, ("mismatch", shown), others)
            raise CollectiveMismatch(call, shown)
        ordered = [parts[rank] for rank in range(self.world_size)]
        self._answer(tag, ("done", ordered), others)
        self._channel.flush(limit_s)
        return ordered

    def _gather(
        self, call: str, tag: Tag, data: bytes, limit_s: float
    ) -> tuple[dict[int, str], dict[int, bytes]]:
        now_s = time.monotonic()
        deadline_s, pulse_s = now_s + limit_s, now_s + min(FIRST_PULSE_S, limit_s / 2)
        calls, parts = {0: call}, {0: data}
        missing = set(range(1, self.world_size))
        told: set[int] = set()
        backoff = Backoff()
        while True:
            for rank in sorted(missing):
                message = self._channel.poll(self._ranks[rank], tag)
                if message is not None:
                    calls[rank], parts[rank] = pickle.loads(message)
                    missing.discard(rank)
            if not missing:
                return calls, parts
            now_s = time.monotonic()
            if now_s >= pulse_s:
                pulse_s = now_s + FIRST_PULSE_S
                left = {rank for rank in missing if self._channel.has_left(self._ranks[rank])}
                if left:
                    self._fail(tag, left, _left(call, tag))
                if told != missing:
                    told = set(missing)
                    self._answer(tag, ("waiting", told), [rank for rank in parts if rank != 0])
            if now_s >= deadline_s:
                self._fail(tag, missing, _did_not_come(call, tag, limit_s))
            backoff.sleep()

    def _fail(self, tag: Tag, ranks: set[int], what: str) -> NoReturn:
        self._answer(tag, ("failed", (ranks, what)), range(1, self.world_size))
        self._channel.flush(GRACE_S)
        raise PeerError(ranks, what)

    def _answer(self, tag: Tag, answer: tuple[str, Any], ranks: Iterable[int]) -> None:
        message = pickle.dumps(answer)
        for rank in ranks:
            self._channel.send(self._ranks[rank], tag, message)

    def _as_peer(self, call: str, tag: Tag, data: bytes, limit_s: float) -> list[bytes]:
        self._channel.send(self._ranks[0], tag, pickle.dumps((call, data)))
        deadline_s = time.monotonic() + limit_s + GRACE_S
        missing = {0}
        while True:
            answer = self._next_answer(call, tag, deadline_s)
            if answer is None:
                self._channel.retract(self._ranks[0], tag)
                raise PeerError(missing, _did_not_come(call, tag, limit_s))
            kind, content = answer
            if kind == "done":
                return list(content)
            if kind == "mismatch":
                raise CollectiveMismatch(call, content)
            if kind == "failed":
                raise PeerError(*content)
            missing = content

    def _next_answer(self, call: str, tag: Tag, deadline_s: float) -> tuple[str, Any] | None:
        hub = self._ranks[0]
        look_s = time.monotonic() + FIRST_PULSE_S
        backoff = Backoff()
        while True:
            left = False
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + FIRST_PULSE_S
                left = self._channel.has_left(hub)
            # Polled after the look: the hub answers before it leaves.
            message = self._channel.poll(hub, tag)
            if message is not None:
                answer: tuple[str, Any] = pickle.loads(message)
                return answer
            if left:
                raise PeerError([0], _left(call, tag))
            if time.monotonic() >= deadline_s:
                return None
            backoff.sleep()


class AloneChannel:
    """The channel of a world with one rank: nobody to talk to."""

    rank = 0
    world_size = 1

    def send(self, peer: int, tag: Tag, data: bytes) -> None:
        raise AssertionError("a world of one rank sends nothing")

    def poll(self, peer: int, tag: Tag) -> bytes | None:
        raise AssertionError("a world of one rank receives nothing")

    def retract(self, peer: int, tag: Tag) -> None:
        raise AssertionError("a world of one rank sends nothing")

    def flush(self, limit_s: float) -> None:
        pass

    def has_left(self, peer: int) -> bool:
        return False

    def abort(self, message: str, *, secondary: bool = False) -> NoReturn:
        report(message, 0, 1, secondary=secondary)
        os._exit(1)

    def close(self, linger_s: float = 5.0) -> None:
        pass


def _left(call: str, tag: Tag) -> str:
    return f"left the world before {call} (call {tag.sequence} of {tag.context})"


def _did_not_come(call: str, tag: Tag, limit_s: float) -> str:
    return f"did not come to {call} (call {tag.sequence} of {tag.context}) within {limit_s:g} s"
