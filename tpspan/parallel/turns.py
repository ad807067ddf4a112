"""How the two sides of a channel wait for each other, turn by turn.

The hosts always tell each other: counters in shared host pages, a line for each block and
direction. Without a GPU that is all there is. With one, streams wait for streams by the signals of
the link, a slot for each block; or by events, where one process stands on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tpspan.parallel.ring import Ring
from tpspan.spans.host_ops import HostOps
from tpspan.spans.signals import Signals

_GIVEN = "the producer has not handed anything over: is it still coming?"
_LOOK_S = 1e-3
_FREED = "no block is free: the consumer has not released any"


class Turns(Protocol):
    """Waiting for turns and finishing them. Ranks are those of the link.

    Attributes:
        are_of_streams: whether a turn has to be waited for although the other side's host has come,
            because its stream may not have.
    """

    are_of_streams: bool

    def has_come(self, turn: int) -> bool:
        """Whether the other side's host has got so far that this side may have the turn."""

    def wait(self, turn: int, stream: int, timeout_s: float, *, has_come: bool) -> None:
        """Hold the stream, or without a GPU the caller, until this side may use the turn.

        Args:
            has_come: what ``has_come`` said.

        Raises:
            PeerError: a peer is dead or late.
        """

    def finish(self, turn: int, stream: int) -> None:
        """Tell the other side that everything before on the stream is done with the turn."""

    def wait_on_host(self, turn: int, timeout_s: float) -> None:
        """Hold the caller until the other side's host has got so far; streams may still work."""

    def wait_until_freed(self, turn: int, timeout_s: float) -> None:
        """Hold a producer until the consumers' hosts have released a turn."""

    def settle(self, stream: int) -> None:
        """Leave nothing behind for the next channel; no rank takes or finishes turns any more."""


class HostTurns:
    """``Turns`` by futexes on counters in host pages.

    Args:
        ops: over the channel's pages.
        ring: this side's.
        peers: the other side.
        is_producer: which side this is.
    """

    are_of_streams = False

    def __init__(
        self, ops: HostOps, ring: Ring, peers: Sequence[int], *, is_producer: bool
    ) -> None:
        self._ops = ops
        self._ring = ring
        self._peers = tuple(peers)
        self._is_producer = is_producer
        self._what = _FREED if is_producer else _GIVEN
        # The producer's posts come first among the slots, then the consumers'.
        self._awaited_from = ring.depth if is_producer else 0
        self._posted_from = 0 if is_producer else ring.depth

    def _awaited(self, turn: int) -> tuple[int, int]:
        """The slot and the count of posts that let this side have a turn."""
        ring = self._ring
        count = ring.num_freed(turn) if self._is_producer else ring.num_given(turn)
        return self._awaited_from + ring.block_of(turn), count

    def has_come(self, turn: int) -> bool:
        slot, count = self._awaited(turn)
        return not count or self._have_come(slot, count)

    def wait(self, turn: int, stream: int, timeout_s: float, *, has_come: bool) -> None:
        if not has_come:
            self.wait_on_host(turn, timeout_s)

    def finish(self, turn: int, stream: int) -> None:
        slot = self._posted_from + self._ring.block_of(turn)
        for peer in self._peers:
            self._ops.post(slot, peer)

    def settle(self, stream: int) -> None:
        """Nothing to do: the counters go with the channel."""

    def posted(self, block: int, count: int) -> list[int]:
        """The peers that have finished a block more than ``count`` times."""
        slot = self._awaited_from + block
        return [peer for peer in self._peers if self._ops.has_come(slot, peer, count + 1)]

    def check_alive(self) -> None:
        """Refuse to go on without the other side.

        Raises:
            PeerError: one of its processes has ended.
        """
        self._ops.check_alive(self._peers)

    def wait_on_host(self, turn: int, timeout_s: float) -> None:
        slot, count = self._awaited(turn)
        if count:
            self._wait_for(slot, count, timeout_s)

    def wait_until_freed(self, turn: int, timeout_s: float) -> None:
        ring = self._ring
        # Its block was freed as often by then as it had been given.
        slot, count = self._awaited_from + ring.block_of(turn), ring.num_given(turn)
        if not self._have_come(slot, count):
            self._wait_for(slot, count, timeout_s)

    def _have_come(self, slot: int, count: int) -> bool:
        has_come = self._ops.has_come
        return all(has_come(slot, peer, count) for peer in self._peers)

    def _wait_for(self, slot: int, count: int, timeout_s: float) -> None:
        for peer in self._peers:
            self._ops.wait_for(slot, peer, count, timeout_s=timeout_s, what=self._what)


class StreamTurns:
    """``Turns`` by the signals of streams; the hosts are told that it was launched.

    A signal stands until it is waited for, and its slot goes on to the next channel. What was freed
    last, or given and not consumed, no turn waits for: ``settle`` does.

    Args:
        hosts: the same between the hosts.
        signals: of the link.
        slots: of the signals, one for each block.
    """

    are_of_streams = True

    def __init__(
        self,
        hosts: HostTurns,
        signals: Signals,
        slots: Sequence[int],
        ring: Ring,
        peers: Sequence[int],
        *,
        is_producer: bool,
    ) -> None:
        self._hosts = hosts
        self._signals = signals
        self._slots = tuple(slots)
        self._ring = ring
        self._peers = tuple(peers)
        self._is_producer = is_producer
        self._next_look_s = 0.0
        self._num_taken = [0] * len(self._slots)  # signals of each block that were waited for
        self.has_come = hosts.has_come
        self.wait_on_host = hosts.wait_on_host
        self.wait_until_freed = hosts.wait_until_freed

    def wait(self, turn: int, stream: int, timeout_s: float, *, has_come: bool) -> None:
        if self._is_producer and not self._ring.num_freed(turn):
            self._signals.check()
            return
        if not has_come and time.monotonic() > self._next_look_s:
            # A stream would find out at its deadline, and the host be far ahead by then.
            self._hosts.check_alive()
            self._next_look_s = time.monotonic() + _LOOK_S
        block = self._ring.block_of(turn)
        for peer in self._peers:
            self._signals.wait(self._slots[block], peer, stream)
        self._num_taken[block] += 1

    def finish(self, turn: int, stream: int) -> None:
        slot = self._slots[self._ring.block_of(turn)]
        for peer in self._peers:
            self._signals.post(slot, peer, stream)
        self._hosts.finish(turn, stream)

    def settle(self, stream: int) -> None:
        for block, slot in enumerate(self._slots):
            for peer in self._hosts.posted(block, self._num_taken[block]):
                self._signals.wait(slot, peer, stream)


class EventTurns:
    """``Turns`` within a process: the hosts' counters say that an event was recorded.

    Args:
        hosts: between the two sides' threads.
        own, theirs: events of each block; own ones are recorded here.
        device: of this side.
    """

    are_of_streams = True

    def __init__(
        self,
        hosts: HostTurns,
        ring: Ring,
        own: Sequence[torch.cuda.Event],
        theirs: Sequence[torch.cuda.Event],
        device: torch.device,
        *,
        is_producer: bool,
    ) -> None:
        self._hosts = hosts
        self._ring = ring
        self._own = tuple(own)
        self._theirs = tuple(theirs)
        self._device = device
        self._is_producer = is_producer
        self.has_come = hosts.has_come
        self.wait_on_host = hosts.wait_on_host
        self.wait_until_freed = hosts.wait_until_freed
        self.settle = hosts.settle

    def wait(self, turn: int, stream: int, timeout_s: float, *, has_come: bool) -> None:
        self._hosts.wait(turn, stream, timeout_s, has_come=has_come)
        if not self._is_producer or self._ring.num_freed(turn):
            event = self._theirs[self._ring.block_of(turn)]
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, turn: int, stream: int) -> None:
        event = self._own[self._ring.block_of(turn)]
        event.record(torch.cuda.current_stream(self._device))
        self._hosts.finish(turn, stream)
