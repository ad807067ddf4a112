"""Remaps beside the thread that launches: after the last use of an address, before its next one.

A lane is one address behind which blocks take turns. ``Lane.submit`` says what comes next and after
which fence; a helper thread waits for the fence on the host (invariant 5) and while anything that
uses the address is being captured (invariant 7), remaps, and opens the lane's gate. On CUDA the
next use of the address waits for the gate on its stream. Without a GPU a fence is always done, and
who needs the next block first remaps: the helper, or the caller in ``Lane.hold``.

Lanes do not wait for each other: a fence may hang on a peer that waits for another lane of this
rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tpspan.errors import CaptureError, ClosedError, PeerError, TpspanError
from tpspan.launch.world import World
from tpspan.memory import Driver
from tpspan.spans.stream_gate import StreamGate, beside_captures

_NAP_S = 20e-6
_LONGEST_NAP_S = 500e-6
_PATIENCE = 20  # a nap is at most this part of what was waited already
_NUM_KEPT = 100
_SLACK_NS = 1000
_SET_TIMER_SLACK = 29  # prctl(2): by so much the system may prolong a nap, 50 µs if not told


class After(Protocol):
    """What a remap comes after; a ``Fence`` is one."""

    def is_done(self) -> bool:
        """Whether the remap may happen, without waiting."""

    def give_back(self) -> None:
        """It is not asked again."""


class _Job(NamedTuple):
    after: After
    change: Callable[[], object]
    opens: int  # the gate, for this count
    since_s: float


class Lane:
    """The remaps of one address, in order. Made by ``Remapper.lane``.

    Attributes:
        num_done: remaps so far.
        last_s: how long each of the last of them took the helper from the fence on, and how much of
            that its thread ran: it may have to wait for the GIL.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        refuse_capture: Callable[[], None],
        gate: StreamGate | None,
        rank: int,
        timeout_s: float,
    ) -> None:
        self._wake = wake
        self._refuse_capture = refuse_capture
        self._gate = gate
        self._rank = rank
        self._timeout_s = timeout_s
        self._jobs: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._count = 0
        self._moved_s = 0.0
        self.num_done = 0
        self.last_s: deque[tuple[float, float]] = deque(maxlen=_NUM_KEPT)

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has been done."""
        return not self._jobs

    @property
    def waited_s(self) -> float:
        """How long the first job has been the first; 0 without one."""
        try:
            return self._waited_s(self._jobs[0])
        except IndexError:
            return 0.0

    def submit(self, after: After, change: Callable[[], object], count: int) -> None:
        """Let ``change`` be made after a fence, and the gate be opened for ``count`` then.

        Args:
            change: remaps; on failure it has put back what was there.
        """
        self._jobs.append(_Job(after, change, count, time.monotonic()))
        self._wake()

    def hold(self, stream: int, count: int) -> None:
        """Hold a stream, or without a GPU the caller, until the gate is open for ``count``.

        Raises:
            TpspanError: an earlier remap failed.
            PeerError: what it comes after did not finish in time.
        """
        self.check()
        if self._gate is not None:
            self._gate.hold(stream, count)
            return
        while self._count < count:
            if not self.advance():
                time.sleep(_NAP_S)
            self.check()

    def wait(self, count: int) -> None:
        """Hold the caller until the gate is open for ``count``. Raises as ``hold``."""
        while self._count < count:
            self.check()
            time.sleep(_NAP_S)
        self.check()

    def advance(self) -> bool:
        """Make the next change if it may be made now; say whether anything was done."""
        with self._lock:
            if not self._jobs:
                return False
            job = self._jobs[0]
            try:
                if not self._may(job):
                    return False
                if self._error is None:  # behind a failure nothing is what it should be
                    began_s, ran_s = time.perf_counter(), time.thread_time()
                    job.after.give_back()
                    job.change()
                    ran_s = time.thread_time() - ran_s
                    self.last_s.append((time.perf_counter() - began_s, ran_s))
                    self.num_done += 1
            except Exception as error:
                self._error = error.with_traceback(None)
            # After a failure, too: the stream goes on, and the next call says what happened.
            self._count = job.opens
            if self._gate is not None:
                self._gate.open(job.opens)
            self._jobs.popleft()
            self._moved_s = time.monotonic()
            return True

    def check(self) -> None:
        """Raise what a remap ran into; everything since is void.

        Raises:
            TpspanError: as the driver or the fence raised it.
        """
        error = self._error
        if error is None:
            return
        if isinstance(error, PeerError):
            raise PeerError(error.ranks, error.what)
        if isinstance(error, TpspanError):
            raise error
        raise TpspanError(f"a remap failed: {type(error).__name__}: {error}")

    def end(self, error: Exception) -> None:
        """Let whoever holds or waits raise this, unless something failed before."""
        self._error = self._error or error

    def drain(self) -> None:
        """Wait until everything submitted has been done or has failed."""
        while not self.is_idle:
            if not self.advance():
                time.sleep(_NAP_S)

    def _waited_s(self, job: _Job) -> float:
        """A job that was submitted long before its turn has not waited since then for its fence."""
        return time.monotonic() - max(job.since_s, self._moved_s)

    def _may(self, job: _Job) -> bool:
        if self._error is not None:
            return True
        if not self._is_captured() and job.after.is_done():
            return True
        if self._waited_s(job) > self._timeout_s:
            raise PeerError(
                [self._rank],
                f"work that uses an address, or its capture, has not ended within "
                f"{self._timeout_s:g} s: the address cannot be remapped",
            )
        return False

    def _is_captured(self) -> bool:
        try:
            self._refuse_capture()
        except CaptureError:
            return True
        return False


class Remapper:
    """The helper thread of a rank; it begins with the first lane and ends with the world."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lanes: list[Lane] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_resting = False
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(world: World) -> Remapper:
        """The remapper of a world, made at its first use."""
        return world.resource("remapper", lambda world: Remapper(world.driver))

    def lane(
        self,
        refuse_capture: Callable[[], None],
        *,
        gate: StreamGate | None,
        rank: int,
        timeout_s: float,
    ) -> Lane:
        """Begin a lane.

        Args:
            refuse_capture: raises ``CaptureError`` while something that uses it is captured.
            gate: holds the streams; None if callers are held.
            rank, timeout_s: who is named when what a remap comes after takes longer than this.
        """
        lane = Lane(self._wake, refuse_capture, gate, rank, timeout_s)
        with self._changed:
            self._lanes.append(lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tpspan-remap", daemon=True)
                self._thread.start()
        return lane

    def end(self, lane: Lane) -> None:
        """Finish a lane: what was submitted is done before this returns."""
        lane.drain()
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)

    def close(self) -> None:
        """End the thread; lanes that are left over are not served any more, and say so."""
        with self._changed:
            self._is_closed = True
            for lane in self._lanes:
                lane.end(ClosedError("the world of this channel is closed"))
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        # Who submits has done so before it looks, and the helper says that it rests before it looks
        # for work: one of the two sees the other.
        if self._is_resting:
            with self._changed:
                self._changed.notify_all()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(_SLACK_NS))
        with contextlib.ExitStack() as stack:
            stack.enter_context(beside_captures(self._driver))
            while True:
                with self._changed:
                    self._is_resting = True
                    while not self._is_closed and all(lane.is_idle for lane in self._lanes):
                        self._changed.wait()
                    self._is_resting = False
                    if self._is_closed:
                        return
                    busy = [lane for lane in self._lanes if not lane.is_idle]
                num_moved = sum(lane.advance() for lane in busy)
                if not num_moved:
                    waited_s = min((lane.waited_s for lane in busy), default=0.0)
                    time.sleep(min(max(_NAP_S, waited_s / _PATIENCE), _LONGEST_NAP_S))
                busy.clear()  # a lane that has ended is not kept alive from here
