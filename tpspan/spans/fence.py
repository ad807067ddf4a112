"""What a remap waits for: every stream of this rank that used the range is done with it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import torch

from tpspan.errors import CaptureError, PeerError
from tpspan.memory import Driver

_SPIN_S = 100e-6
_NAP_S = 20e-6


class Place(Protocol):
    """What a fence needs to know of the rank that it stands on; a ``World`` is one."""

    @property
    def backend(self) -> str:
        """``cuda`` or ``host``."""

    @property
    def device(self) -> torch.device:
        """The device whose streams are noted."""

    @property
    def driver(self) -> Driver:
        """Of that device."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def timeout_s(self) -> float:
        """The deadline where a call gives none."""


class Waits(Protocol):
    """Knows whether a wait on a stream failed; ``Signals`` do."""

    def check(self) -> None:
        """Raise what a wait on a stream ran into."""


class StreamsInUse:
    """The streams of this rank that use a span, as far as it has been told. Empty without a GPU."""

    def __init__(self, world: Place, signals: Waits) -> None:
        self._world = world
        self._signals = signals
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._spare: list[torch.cuda.Event] = []  # making an event takes longer than recording it

    def use(self, stream: torch.cuda.Stream | None = None) -> int:
        """Note a stream, by default the current one; return its handle."""
        if self._world.backend != "cuda":
            return 0
        if stream is not None:
            self._streams[stream.cuda_stream] = stream
            return int(stream.cuda_stream)
        # What torch's compiled code calls too: 0.2 µs, where a Stream object takes 6.
        handle = torch._C._cuda_getCurrentRawStream(self._world.device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self._world.device)
        return int(handle)

    def refuse_capture(self, but: int | None = None) -> None:
        """Raise ``CaptureError`` if one of the streams is being captured (invariant 7).

        Args:
            but: the handle of a stream that the caller has asked about.
        """
        for handle in tuple(self._streams):  # a helper thread asks, too
            if handle != but and self._world.driver.is_capturing(handle):
                raise CaptureError(
                    "a stream that uses this span is being captured into a graph: change mappings "
                    "before or after the capture, not during it (invariant 7)"
                )

    def fence(self, but: int | None = None) -> Fence:
        """Record everything so far on these streams and on the current one.

        Args:
            but: as ``refuse_capture``.
        """
        self.use()
        self.refuse_capture(but)
        return Fence(self, tuple(self._streams.values()), self._signals, self._world, self._spare)


class Fence:
    """Events on the streams of this rank that used a span, recorded when the fence was made.

    The host waits for it before anything is unmapped: the driver's unmap is not ordered with
    streams, so a stream that waits is no protection (invariant 5). The other ranks' part comes with
    the vote of the collective call that takes the fence: every rank waits for its own first.

    Args:
        spare: events to take, and where ``give_back`` puts them.

    Attributes:
        of: the streams of the one span that it guards.
    """

    def __init__(
        self,
        of: StreamsInUse,
        streams: Iterable[torch.cuda.Stream],
        signals: Waits,
        world: Place,
        spare: list[torch.cuda.Event] | None = None,
    ) -> None:
        self.of = of
        self._spare = [] if spare is None else spare
        self._signals = signals
        self._rank = world.rank
        self._timeout_s = world.timeout_s
        self._events = [
            stream.record_event(self._spare.pop() if self._spare else None) for stream in streams
        ]

    def give_back(self) -> None:
        """Let the next fence have the events: nobody waits for this one any more."""
        self._spare += self._events
        self._events = []

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
