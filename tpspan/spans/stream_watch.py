"""Deadlines for streams that wait for a word, which by themselves would wait for ever.

A thread looks at every stream with such a wait on it. When one has not come any further for the
time allowed, and the same word of another rank has been waited for through half of it or more, the
thread moves the words itself: the stream goes on, and all ranks are told who was missing before any
word is moved. A stream that was busy that long with something else, and now waits for a rank that
is a little behind, is not late. Words that were moved say nothing true any more, and let the
streams of others through that have not waited as long.

All that needs the driver. It has room for a thousand launches and operations on a stream, and a
thread that waits inside for more can keep others from looking at words and events. So a host is
never ahead of a stream by more than ``ROOM`` operations of waits: it is held outside, where it can
be told. What else a program launches between two waits can still fill the stream, or wait inside
for another reason (the first launch of a kernel loads it, once the device is idle). If the thread
that looks is held there for longer than a stream may wait, nothing can be told any more, and a
second thread ends the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from tpspan.errors import PeerError, TpspanError
from tpspan.kernels.board import COUNT_MASK, has_arrived
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.stream_words import FREE, SET, StreamWords

ROOM = 256
"""Operations of waits by which a host may be ahead of a stream, one for each rank in a barrier."""
_LOOK_S = 0.1
_MARK_S = 0.5
_MARK_WAITS = 16
_PATIENCE_S = 10.0
_NAP_S = 50e-6
# By so much words are moved: far beyond what any stream waits for, so that their rank still sees
# how far its own stream has come.
_FAR = 1 << 24

_Wait = tuple[int, int, int]  # a slot, a peer, and for how many of its posts
_Goal = tuple[int, int, int]  # a peer, the address of a word of its, and what it has to come to


class StreamWatch:
    """Watches the streams of one rank.

    Args:
        words: what streams wait for.
        driver: of the GPU.
        timeout_s: how long a stream may wait.
        end_job: called when a stream has waited for longer and the driver lets nobody see why.

    Attributes:
        lock: of what is noted here; never held over a call that puts something on a stream, which
            waits while the driver's queue is full. Nothing but ``order`` of that stream and of what
            is put on it is held then: other threads and the watch go on.
        captured: the slots with barriers in graphs.
    """

    def __init__(
        self,
        words: StreamWords,
        driver: CudaDriver,
        timeout_s: float,
        end_job: Callable[[TpspanError], object],
    ) -> None:
        self.lock = threading.Lock()
        self.captured: set[int] = set()
        self._words, self._driver, self._timeout_s = words, driver, timeout_s
        self._end_job = end_job
        self._queues: dict[int, Queue] = {}
        self._stop = threading.Event()
        self._most_ahead = ROOM // words.world_size
        self._looks_since_s = 0.0
        self._threads: list[threading.Thread] = []

    def queue(self, stream: int) -> Queue:
        """The books of a stream, begun at the first call."""
        queue = self._queues.get(stream)
        if queue is None:
            with self.lock:
                queue = self._queues.setdefault(stream, Queue(stream, self._driver))
        return queue

    def make_room(self, queue: Queue) -> None:
        """Hold the caller while the stream has too many waits before it; ``queue.order`` is held.

        Raises:
            PeerError: a wait ran out of time.
        """
        if queue.num_ahead < self._most_ahead:
            return
        with self._beside_captures():
            while True:
                with self.lock:
                    queue.catch_up()
                if queue.num_ahead < self._most_ahead:
                    return
                if not self._words.is_well():
                    missing = sorted(self._words.told()[0])
                    raise PeerError(missing, "did not come before a stream's wait ran out of time")
                time.sleep(_NAP_S)

    def note_barrier(self, queue: Queue, slot: int, epoch: int) -> None:
        """Say that a barrier was put on a stream just now; ``queue.order`` is held."""
        mark = queue.mark()
        with self.lock:
            queue.epochs[slot] = epoch
            queue.noted(mark)
        self._begin()

    def note_wait(self, queue: Queue, slot: int, peer: int, count: int) -> None:
        """The same of a wait for a post."""
        mark = queue.mark()
        with self.lock:
            queue.counts[slot, peer] = count
            queue.waits.append((slot, peer, count))
            queue.noted(mark)
        self._begin()

    def _begin(self) -> None:
        if self._threads:
            return
        for target, name in ((self._watch, "tpspan-stream-watch"), (self._guard, "tpspan-guard")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Wait for what still waits (at its deadline that ends), then stop.

        Raises:
            PeerError: a stream is held by something else.
        """
        end = time.monotonic() + self._timeout_s + _PATIENCE_S
        queues = tuple(self._queues.values())
        with self._driver.current():
            while waits := any(self._holds(queue) for queue in queues):
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
            self._stop.set()
            for thread in self._threads:
                thread.join()
            if waits:
                what = "a stream with a barrier in it does not come to rest"
                raise PeerError([self._words.rank], what)
            # The words are there, but a stream may not have looked at them yet.
            check("cuCtxSynchronize", cu.cuCtxSynchronize())
            for queue in queues:
                queue.close()
            self._queues.clear()

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Or a look at an event would end a capture that goes on in another thread."""
        with self._driver.current():
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            result = cu.cuThreadExchangeStreamCaptureMode(mode)
            before = check("cuThreadExchangeStreamCaptureMode", result)
            try:
                yield
            finally:
                result = cu.cuThreadExchangeStreamCaptureMode(before)
                check("cuThreadExchangeStreamCaptureMode", result)

    def _watch(self) -> None:
        with self._beside_captures():
            while not self._stop.wait(_LOOK_S):
                self._looks_since_s = time.monotonic()
                with self.lock:
                    queues = tuple(self._queues.values())
                    stuck = [queue for queue in queues if queue.stuck_s() > self._timeout_s / 2]
                for queue in stuck:
                    with contextlib.suppress(TimeoutError):  # the next look tries again
                        self._look_at(queue)
                self._looks_since_s = 0.0

    def _guard(self) -> None:
        """See whether the watch comes back from the driver; this thread never goes there."""
        longest_s = self._timeout_s + 2 * _PATIENCE_S
        while not self._stop.wait(_LOOK_S):
            since_s = self._looks_since_s
            if since_s and time.monotonic() - since_s > longest_s:
                self._end_job(
                    TpspanError(
                        f"rank {self._words.rank}: a launch has waited in the driver for "
                        f"{longest_s:.0f} s, most likely for a stream that waits for other ranks, "
                        "and keeps anybody from seeing for whom: the job is ended"
                    )
                )
                return

    def _look_at(self, queue: Queue) -> None:
        """Every half of the time allowed, see whom the stream waits for that it waited for then."""
        if time.monotonic() - queue.seen_s < self._timeout_s / 2:
            return
        with self.lock:
            epochs, captured = dict(queue.epochs), set(self.captured)
            pending = tuple(queue.waits)
        owed = self._behind(epochs) | self._silent(pending) or self._absent(captured)
        still = owed & queue.owed
        if still:
            self._release(queue, self._corrected({peer for peer, _, _ in still}))
        queue.owed, queue.seen_s = owed, time.monotonic()

    def _release(self, queue: Queue, missing: set[int]) -> None:
        """Tell who was missing, and move the words until the stream goes on."""
        words = self._words
        words.tell(missing)
        end = time.monotonic() + _PATIENCE_S
        while self._holds(queue) and time.monotonic() < end:
            with self.lock:  # what waits behind goes on, too, also if it has come meanwhile
                goals = self._barriers(queue.epochs) + self._posts(queue.counts)
                captured = set(self.captured)
            # A peer may have come: its word stays.
            moved = [
                (word, (now + _FAR) & COUNT_MASK) for (_, word, _), now in self._lacking(goals)
            ]
            flags = [
                flag
                for slot in captured
                for peer in words.peers
                for flag in (
                    (words.flag(slot, words.rank, peer), SET),
                    (words.flag(slot, peer, words.rank), FREE),
                )
            ]
            words.write(moved + flags)
            time.sleep(0.001)

    def _holds(self, queue: Queue) -> bool:
        """Whether the stream has still to come to one of its waits, or through one."""
        with self.lock:
            goals, epochs = self._posts(queue.counts), dict(queue.epochs)
        goals += self._barriers(epochs)
        try:
            here = self._here(epochs)
            return here != epochs or bool(self._unmet(goals))
        except TimeoutError:
            return True

    def _corrected(self, missing: set[int]) -> set[int]:
        """What this rank sees as missing, with what those say whose deadline came first."""
        missed, said = self._words.told()
        return ((missing - said) | missed) - {self._words.rank} or missing

    def _behind(self, epochs: dict[int, int]) -> set[_Goal]:
        """What lacks at barriers to which this rank's stream has come; it may be queued only."""
        return set(self._unmet(self._barriers(self._here(epochs))))

    def _here(self, epochs: dict[int, int]) -> dict[int, int]:
        """The number of the barrier to which this rank's stream has come, by slot."""
        own = [self._words.arrived(slot, self._words.rank) for slot in epochs]
        found = zip(epochs.items(), self._words.read(own), strict=True)
        return {
            slot: (now - _FAR * has_arrived(now, (epoch + 1) & COUNT_MASK)) & COUNT_MASK
            for (slot, epoch), now in found
        }

    def _silent(self, pending: Sequence[_Wait]) -> set[_Goal]:
        """The first post that a stream waits for; it has not come to those behind.

        It may not have come to this one, if it is busy with something before it.
        """
        posted, rank = self._words.posted, self._words.rank
        goals = [(peer, posted(slot, rank, peer), num) for slot, peer, num in pending]
        return set(self._unmet(goals)[:1])

    def _barriers(self, epochs: dict[int, int]) -> list[_Goal]:
        arrived, peers = self._words.arrived, self._words.peers
        return [(peer, arrived(slot, peer), epochs[slot]) for slot in epochs for peer in peers]

    def _posts(self, waits: dict[tuple[int, int], int]) -> list[_Goal]:
        posted, rank = self._words.posted, self._words.rank
        return [(peer, posted(slot, rank, peer), num) for (slot, peer), num in waits.items()]

    def _unmet(self, goals: Sequence[_Goal]) -> list[_Goal]:
        """Those whose word has not come to what it has to."""
        return [goal for goal, _ in self._lacking(goals)]

    def _lacking(self, goals: Sequence[_Goal]) -> list[tuple[_Goal, int]]:
        """The same, and what the words hold."""
        found = self._words.read([address for _, address, _ in goals])
        pairs = zip(goals, found, strict=True)
        return [(goal, now) for goal, now in pairs if not has_arrived(now, goal[2])]

    def _absent(self, captured: set[int]) -> set[_Goal]:
        """The flags that a barrier in a graph waits for."""
        rank, flag = self._words.rank, self._words.flag
        pairs = [(slot, peer) for slot in captured for peer in self._words.peers]
        theirs = self._words.read([flag(slot, rank, peer) for slot, peer in pairs])
        own = self._words.read([flag(slot, peer, rank) for slot, peer in pairs])
        # A barrier in a graph that holds the stream is one to which this rank has posted.
        posted = [pair for pair, value in zip(pairs, own, strict=True) if value == SET]
        unset = {pair for pair, value in zip(pairs, theirs, strict=True) if value == FREE}
        waiting = {
            (peer, flag(slot, rank, peer), SET) for slot, peer in posted if (slot, peer) in unset
        }
        return waiting or {(peer, flag(slot, peer, rank), FREE) for slot, peer in posted}


class Queue:
    """What waits were put on a stream, with marks between that show how far it has come.

    A mark is an event, and not every wait has one: where ranks share a GPU an event behind each
    takes a barrier from 10 to 16 µs with two ranks, from 19 to 32 with four. Whether a stream is
    through the last of its waits, the words say.

    Attributes:
        order: held while something is put on the stream and noted.
        epochs: by slot, the number of the last barrier.
        counts: by (slot, peer), how many posts were waited for.
        waits: those for posts, in order, as far as the stream may not have come to them.
        owed, seen_s: what it waited for when that was last looked at, and when that was; none if it
            has come any further since.
    """

    def __init__(self, stream: int, driver: CudaDriver) -> None:
        self._stream, self._driver = stream, driver
        self.order = threading.Lock()
        self.epochs: dict[int, int] = {}
        self.counts: dict[tuple[int, int], int] = {}
        self.waits: deque[_Wait] = deque()
        self.owed: set[_Goal] = set()
        self.seen_s = 0.0
        self._marks: deque[_Mark] = deque()
        self._num_waits = self._num_put = self._num_marked = self._num_done = 0
        self._marked_s = self._put_s = self._progress_s = 0.0

    def mark(self) -> Any:
        """Put an event on the stream if one is due behind the wait that was put there just now."""
        is_due = self._num_put + 1 - self._num_marked >= _MARK_WAITS
        if not is_due and time.monotonic() - self._marked_s <= _MARK_S:
            return None
        with self._driver.current():
            event = _new_event()
            check("cuEventRecord", cu.cuEventRecord(event, self._stream))
        self._marked_s = time.monotonic()
        return event

    def noted(self, event: Any) -> None:
        """Note a wait, with the event behind it, or None."""
        self._put_s = time.monotonic()
        self._num_put += 1
        if event is not None:
            self._num_marked = self._num_put
            self._marks.append(_Mark(event, self._num_put, len(self.waits), self._put_s))

    @property
    def num_ahead(self) -> int:
        """How many waits the stream may have before it, as far as it was last seen to have come."""
        return self._num_put - self._num_done

    def catch_up(self) -> None:
        """See how far the stream has come."""
        while self._marks and _is_done(self._marks[0].event):
            mark = self._marks.popleft()
            check("cuEventDestroy", cu.cuEventDestroy(mark.event))
            self._num_done = mark.num_put
            for _ in range(mark.num_waits):
                self.waits.popleft()
            for later in self._marks:
                later.num_waits -= mark.num_waits
            self._progress_s, self.seen_s = time.monotonic(), 0.0
            self.owed.clear()

    def stuck_s(self) -> float:
        """How long the stream may have been waiting, in seconds; 0 if it is through all waits."""
        self.catch_up()
        if self._num_done == self._num_put:
            return 0.0
        # It cannot wait for longer than what it may be waiting at has been there.
        put_s = self._marks[0].put_s if self._marks else self._put_s
        return time.monotonic() - max(put_s, self._progress_s)

    def close(self) -> None:
        """Give the events back."""
        for mark in self._marks:
            check("cuEventDestroy", cu.cuEventDestroy(mark.event))


@dataclass
class _Mark:
    """An event, and how many waits came before it: in all, and of those for posts that are kept."""

    event: Any
    num_put: int
    num_waits: int
    put_s: float


def _new_event() -> Any:
    flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
    return check("cuEventCreate", cu.cuEventCreate(flags))


def _is_done(event: Any) -> bool:
    (code,) = cu.cuEventQuery(event)
    if code == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    check("cuEventQuery", (code,))
    return True
