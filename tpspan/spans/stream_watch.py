"""Deadlines for streams that wait for a word, which by themselves would wait for ever.

A thread looks at every stream with such a wait on it. When one has not come any further for the
time allowed, and the same word of another rank has been waited for through half of it or more, the
thread moves the words itself: the stream goes on, and all ranks are told who was missing before any
word is moved. A stream that was busy that long with something else, and now waits for a rank that
is a little behind, is not late. Words that were moved say nothing true any more, and let the
streams of others through that have not waited as long.

All that needs the driver. It has room for about a thousand launches on a stream, and a thread that
waits inside for more can keep others from looking at words. So a host is never ahead of a stream by
more than ``MOST_AHEAD`` waits: it is held outside, where it can be told. What else a program
launches between two waits can still fill the stream, or wait inside for another reason (the first
launch of a kernel loads it, once the device is idle). If the thread itself is held there for longer
than a look at the words may take, nothing can be told any more, and the job is ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cuda.bindings import driver as cu

from tpspan.errors import PeerError, TpspanError
from tpspan.kernels.board import has_arrived
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.stream_words import FREE, SET, StreamWords

MOST_AHEAD = 64
"""Waits by which a host may be ahead of a stream; with four ranks each takes 5 of 1024 places."""
_LOOK_S = 0.1
_MARK_S = 0.5
_MARK_WAITS = 16
_PATIENCE_S = 10.0
_NAP_S = 50e-6

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
        epochs: by slot, the number of the last barrier that was put on a stream.
        captured: the slots with barriers in graphs.
        waits: by (slot, peer), how many posts were waited for.
    """

    def __init__(
        self,
        words: StreamWords,
        driver: CudaDriver,
        timeout_s: float,
        end_job: Callable[[TpspanError], object],
    ) -> None:
        self.lock = threading.Lock()
        self.epochs: dict[int, int] = {}
        self.captured: set[int] = set()
        self.waits: dict[tuple[int, int], int] = {}
        self._words, self._driver, self._timeout_s = words, driver, timeout_s
        self._end_job = end_job
        self._queues: dict[int, Queue] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def queue(self, stream: int) -> Queue:
        """The books of a stream, begun at the first call."""
        queue = self._queues.get(stream)
        if queue is None:
            with self._driver.current():
                made = Queue(stream, self._driver)
                with self.lock:
                    queue = self._queues.setdefault(stream, made)
                if queue is not made:  # another thread's was first
                    made.close()
        return queue

    def make_room(self, queue: Queue) -> None:
        """Hold the caller while the stream has too many waits before it; ``queue.order`` is held.

        Raises:
            PeerError: a wait ran out of time.
        """
        if queue.num_ahead < MOST_AHEAD:
            return
        with self._beside_captures():
            while True:
                with self.lock:
                    queue.catch_up()
                if queue.num_ahead < MOST_AHEAD:
                    return
                if not self._words.is_well():
                    missing = sorted(self._words.told()[0])
                    raise PeerError(missing, "did not come before a stream's wait ran out of time")
                time.sleep(_NAP_S)

    def note_barrier(self, queue: Queue, slot: int, epoch: int) -> None:
        """Say that a barrier was put on a stream just now; ``queue.order`` is held."""
        with self.lock:
            self.epochs[slot] = epoch
        self._note(queue, None)

    def note_wait(self, queue: Queue, slot: int, peer: int, count: int) -> None:
        """The same of a wait for a post."""
        with self.lock:
            self.waits[slot, peer] = count
        self._note(queue, (slot, peer, count))

    def _note(self, queue: Queue, wait: _Wait | None) -> None:
        mark = queue.record()
        with self.lock:
            queue.noted(mark, wait)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="tpspan-stream-watch", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait for what still waits (at its deadline that ends), then stop.

        Raises:
            PeerError: a stream is held by something else.
        """
        deadline = time.monotonic() + self._timeout_s + _PATIENCE_S
        with self._driver.current():
            queues = tuple(self._queues.values())
            while not (done := all(_is_done(queue.last) for queue in queues)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            if not done:
                what = "a stream with a barrier in it does not come to rest"
                raise PeerError([self._words.rank], what)
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
                with self.lock:
                    queues = tuple(self._queues.values())
                    stuck = [queue for queue in queues if queue.stuck_s() > self._timeout_s / 2]
                for queue in stuck:
                    # Events can be asked for at any time; what a look does may wait in the driver.
                    held = threading.Timer(self._timeout_s / 2 + 2 * _PATIENCE_S, self._give_up)
                    held.daemon = True
                    held.start()
                    with contextlib.suppress(TimeoutError):  # the next look tries again
                        self._look_at(queue)
                    held.cancel()

    def _give_up(self) -> None:
        self._end_job(
            TpspanError(
                f"rank {self._words.rank}: a stream waits for other ranks for longer than "
                f"{self._timeout_s:g} s, and a launch behind it that waits in the driver (for room "
                "on the stream, or to load a kernel) keeps anybody from seeing for whom: the job "
                "is ended"
            )
        )

    def _look_at(self, queue: Queue) -> None:
        """Every half of the time allowed, see whom the stream waits for that it waited for then."""
        if time.monotonic() - queue.seen_s < self._timeout_s / 2:
            return
        with self.lock:
            epochs, captured = dict(self.epochs), set(self.captured)
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
        while not _is_done(queue.last) and time.monotonic() < end:
            with self.lock:  # what waits behind goes on, too, also if it has come meanwhile
                epochs, captured, waits = dict(self.epochs), set(self.captured), dict(self.waits)
            # No word goes back: a peer may have come, and others wait for it.
            unmet = self._unmet(self._barriers(epochs) + self._posts(waits))
            flags = [
                flag
                for slot in captured
                for peer in words.peers
                for flag in (
                    (words.flag(slot, words.rank, peer), SET),
                    (words.flag(slot, peer, words.rank), FREE),
                )
            ]
            words.write([(word, goal) for _, word, goal in unmet] + flags)
            time.sleep(0.001)

    def _corrected(self, missing: set[int]) -> set[int]:
        """What this rank sees as missing, with what those say whose deadline came first."""
        missed, said = self._words.told()
        return ((missing - said) | missed) - {self._words.rank} or missing

    def _behind(self, epochs: dict[int, int]) -> set[_Goal]:
        """What lacks at barriers to which this rank's stream has come; it may be queued only."""
        own = [self._words.arrived(slot, self._words.rank) for slot in epochs]
        here = dict(zip(epochs, self._words.read(own), strict=True))
        return set(self._unmet(self._barriers(here)))

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
        found = self._words.read([address for _, address, _ in goals])
        pairs = zip(goals, found, strict=True)
        return [goal for goal, now in pairs if not has_arrived(now, goal[2])]

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
    """How far a stream has come: its last wait, and marks between that show progress.

    Attributes:
        order: held while something is put on the stream and noted.
        last: an event behind the last wait.
        waits: those for posts, in order, as far as the stream may not have come to them.
        owed, seen_s: what it waited for when that was last looked at, and when that was; none if it
            has come any further since.
    """

    def __init__(self, stream: int, driver: CudaDriver) -> None:
        self._stream, self._driver = stream, driver
        self.order = threading.Lock()
        self.last = _new_event()
        self.waits: deque[_Wait] = deque()
        self.owed: set[_Goal] = set()
        self.seen_s = 0.0
        # With the number of waits for posts before it, and of waits of either kind.
        self._marks: deque[tuple[Any, int, int]] = deque()
        self._num_waits = 0
        self._num_put = self._num_marked = self._num_done = 0
        self._marked = 0.0
        self._progress = 0.0
        self._is_idle = True

    def record(self) -> Any:
        """Let the event stand behind everything so far; return a mark if one is due, or None."""
        is_due = self._num_put - self._num_marked >= _MARK_WAITS - 1
        if not is_due and time.monotonic() - self._marked <= _MARK_S:
            (code,) = cu.cuEventRecord(self.last, self._stream)
            if not code:
                return None  # or another context is current in this thread, or none
        with self._driver.current():
            check("cuEventRecord", cu.cuEventRecord(self.last, self._stream))
            mark = _new_event()
            check("cuEventRecord", cu.cuEventRecord(mark, self._stream))
        self._marked = time.monotonic()
        return mark

    def noted(self, mark: Any, wait: _Wait | None) -> None:
        """Note what was recorded. Not before: the event would still stand for what was done."""
        if self._is_idle:
            self._is_idle = False
            self._moved()
        if wait is not None:
            self.waits.append(wait)
            self._num_waits += 1
        self._num_put += 1
        if mark is not None:
            self._num_marked = self._num_put
            self._marks.append((mark, self._num_waits, self._num_put))

    @property
    def num_ahead(self) -> int:
        """How many waits the stream may have before it, as far as it was last seen to have come."""
        return self._num_put - self._num_done

    def catch_up(self) -> None:
        """See how far the stream has come."""
        while self._marks and _is_done(self._marks[0][0]):
            mark, num_waits, self._num_done = self._marks.popleft()
            check("cuEventDestroy", cu.cuEventDestroy(mark))
            while len(self.waits) > self._num_waits - num_waits:
                self.waits.popleft()
            self._moved()

    def stuck_s(self) -> float:
        """Seconds since the stream was last seen to have come any further."""
        self.catch_up()
        if _is_done(self.last):
            self._is_idle = True
            self.waits.clear()
        return 0.0 if self._is_idle else time.monotonic() - self._progress

    def _moved(self) -> None:
        self._progress, self.seen_s = time.monotonic(), 0.0
        self.owed.clear()

    def close(self) -> None:
        """Give the events back."""
        for event in (self.last, *(mark for mark, _, _ in self._marks)):
            check("cuEventDestroy", cu.cuEventDestroy(event))


def _new_event() -> Any:
    flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
    return check("cuEventCreate", cu.cuEventCreate(flags))


def _is_done(event: Any) -> bool:
    (code,) = cu.cuEventQuery(event)
    if code == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    check("cuEventQuery", (code,))
    return True
