"""What a remap waits for: every stream of this rank that used the range is done with it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from tpspan.errors import PeerError
from tpspan.spans.signals import Signals

_SPIN_S = 100e-6
_NAP_S = 20e-6


class Fence:
    """Events on the streams of this rank that used a span, recorded when the fence was made.

    The host waits for it before anything is unmapped: the driver's unmap is not ordered with
    streams, so a stream that waits is no protection (invariant 5). The other ranks' part comes with
    the vote of the collective call that takes the fence: every rank waits for its own first.
    """

    def __init__(
        self, streams: Iterable[torch.cuda.Stream], signals: Signals, rank: int, timeout_s: float
    ) -> None:
        self._signals = signals
        self._rank = rank
        self._timeout_s = timeout_s
        self._events = [stream.record_event() for stream in streams]

    def is_done(self) -> bool:
        """Say whether everything before the fence has finished, without waiting."""
        return all(event.query() for event in self._events)

    def wait(self, timeout_s: float | None = None) -> None:
        """Hold the host until everything before the fence has finished on this rank.

        Raises:
            PeerError: it has not finished at the deadline; names the ranks that a stream still
                waits for, or this rank if its own work is late.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        while not self.is_done():
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                self._signals.check()
                raise PeerError(
                    [self._rank], f"work that uses the span has not finished within {timeout_s:g} s"
                )
            if waited_s > _SPIN_S:
                time.sleep(_NAP_S)
        self._signals.check()
