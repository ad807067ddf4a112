"""Deadlines for streams that wait for a word, which by themselves would wait for ever.

A thread looks at every stream with such a wait on it. When one has not come any further for the
time allowed, and the same word of another rank has been waited for through half of it or more, the
thread tells all ranks who was missing. From then on each rank moves the words that its own streams
still wait for, and they go on: words that were moved say nothing true any more. A stream that was
busy that long with something else, and now waits for a rank that is a little behind, is not late.

All that needs the driver. It has room for a thousand launches and operations on a stream, and a
thread that waits inside for more can keep others from looking at words and events. So a host is
never ahead of a stream by more than ``ROOM`` operations: it is held outside, where it can be told.
What else a program launches between two waits can still fill the stream, or wait inside for another
reason (the first launch of a kernel loads it, once the device is idle). If the thread that looks is
held there for longer than a stream may wait, nothing can be told any more, and a second thread ends
the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cuda.bindings import driver as cu

from tpspan.errors import DriverError, PeerError, TpspanError
from tpspan.kernels.board import COUNT_MASK, has_arrived
from tpspan.memory.closing import close_each
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.stream_queue import Goal, Queue, Wait
from tpspan.spans.stream_words import FREE, SET, StreamWords

ROOM = 256
"""Operations by which a host may be ahead of a stream; a barrier has one for each rank."""
_LOOK_S = 0.1
_MOVE_S = 0.002
_PATIENCE_S = 10.0
_NAP_S = 50e-6
# By so much words are moved: far beyond what any stream waits for, so that their rank still sees
# how far its own stream has come.
_FAR = 1 << 24


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
        epochs: by slot, the number of the last barrier that was put on any stream.
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
        self.epochs: dict[int, int] = {}
        self.captured: set[int] = set()
        self._words, self._driver, self._timeout_s = words, driver, timeout_s
        self._end_job = end_job
        self._queues: dict[int, Queue] = {}
        self._stop = threading.Event()
        self._num_steps = 0  # of the watch; odd while it may be in the driver
        self._threads: list[threading.Thread] = []

    def queue(self, stream: int) -> Queue:
        """The books of a stream, begun at the first call."""
        queue = self._queues.get(stream)
        if queue is None:
            with self.lock:
                queue = self._queues.setdefault(stream, Queue(stream, self._driver))
        return queue

    def make_room(self, queue: Queue) -> None:
        """Hold the caller while the stream has too much before it; ``queue.order`` is held.

        Raises:
            PeerError: a wait ran out of time.
        """
        if queue.num_ahead < ROOM:
            return
        with self._beside_captures():
            while True:
                with self.lock:
                    queue.catch_up()
                if queue.num_ahead < ROOM:
                    return
                if not self._words.is_well():
                    missing = sorted(self._words.told()[0])
                    raise PeerError(missing, "did not come before a stream's wait ran out of time")
                time.sleep(_NAP_S)

    def note_barrier(self, queue: Queue, slot: int, epoch: int) -> None:
        """Say that a barrier was put on a stream just now; ``queue.order`` is held."""
        num_operations = self._words.world_size
        mark = queue.mark(num_operations, always=self._has_graphs)
        with self.lock:
            self.epochs[slot] = queue.epochs[slot] = epoch
            queue.noted(num_operations, mark)
        self._begin()

    def note_wait(self, queue: Queue, slot: int, peer: int, count: int) -> None:
        """The same of a wait for a post."""
        mark = queue.mark(1, always=self._has_graphs)
        with self.lock:
            queue.counts[slot, peer] = count
            queue.waits.append((slot, peer, count))
            queue.noted(1, mark)
        self._begin()

    def note_post(self, queue: Queue, _count: int) -> None:
        """The same of a post, which nobody is named for."""
        mark = queue.mark(1, always=False)
        with self.lock:
            queue.noted(1, mark)
        self._begin()

    def close(self) -> None:
        """Wait until the streams are through (a deadline ends what they wait for), then stop.

        Raises:
            PeerError: a stream is held by something else.
        """
        end = time.monotonic() + self._timeout_s + _PATIENCE_S
        queues = tuple(self._queues.values())
        try:
            with self._beside_captures():
                for queue in queues:
                    with queue.order:
                        mark = queue.mark(0, always=True)
                        with self.lock:
                            queue.noted(0, mark)
                while self._ahead():
                    if time.monotonic() > end:
                        what = "a stream with a barrier in it does not come to rest"
                        raise PeerError([self._words.rank], what)
                    time.sleep(0.001)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
            self._queues.clear()
            close_each(queue.close for queue in queues)

    @property
    def _has_graphs(self) -> bool:
        """Whether each wait gets a mark: only while one shows that a stream is not through are the
        flags of graphs looked at. At any other time healthy replays use them."""
        return bool(self.captured)

    def _begin(self) -> None:
        if self._threads:
            return
        with self.lock:
            if self._threads:
                return
            for target, name in ((self._watch, "tpspan-watch"), (self._guard, "tpspan-guard")):
                thread = threading.Thread(target=target, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

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

    def _ahead(self) -> list[Queue]:
        """Those whose stream is not known to be through."""
        with self.lock:
            for queue in self._queues.values():
                queue.catch_up()
            return [queue for queue in self._queues.values() if queue.num_ahead]

    def _watch(self) -> None:
        # A driver that fails here fails in every call of the program, which says why.
        with contextlib.suppress(DriverError), self._beside_captures():
            pause_s = _LOOK_S
            while not self._stop.wait(pause_s):
                self._num_steps += 1
                try:
                    pause_s = self._look()
                finally:
                    self._num_steps += self._num_steps % 2

    def _look(self) -> float:
        """Look at every stream once; return the seconds until the next time."""
        pause_s = _LOOK_S
        ahead = self._ahead()
        with self.lock:
            stuck = [queue for queue in ahead if queue.stuck_s() > self._timeout_s / 2]
        with contextlib.suppress(TimeoutError):  # the next look tries again
            for queue in stuck:
                self._num_steps += 2
                self._look_at(queue)
            self._num_steps += 2
            if not self._words.is_well() and self._move(ahead):
                pause_s = _MOVE_S
        return pause_s

    def _guard(self) -> None:
        """See whether the watch comes back from the driver; this thread never goes there."""
        longest_s = self._timeout_s + 2 * _PATIENCE_S
        num_steps = num_same = 0
        while not self._stop.wait(_LOOK_S):
            # Times that this thread ran: seconds in which the process was stopped do not count.
            is_same = self._num_steps == num_steps and num_steps % 2
            num_same = num_same + 1 if is_same else 0
            num_steps = self._num_steps
            if num_same * _LOOK_S > longest_s:
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
        # A stream that has come to one of these has not come to what is behind.
        owed = self._behind(epochs) or self._silent(pending)
        if not owed and queue.is_before_mark:
            owed = self._absent(captured)
        if still := owed & queue.owed:
            self._words.tell(self._corrected({peer for peer, _, _ in still}))
        queue.owed, queue.seen_s = owed, time.monotonic()

    def _move(self, queues: Sequence[Queue]) -> bool:
        """Move the words that streams wait for; say whether there were any."""
        words = self._words
        with self.lock:
            captured = set(self.captured)
            goals = [
                goal
                for queue in queues
                for goal in (*self._barriers(queue.epochs), *self._posts(queue.counts))
            ]
        # A peer may have come, or come yet: its word stays, or goes back and is moved again.
        moved = {word: (now + _FAR) & COUNT_MASK for (_, word, _), now in self._lacking(goals)}
        if any(queue.is_before_mark for queue in queues):
            for slot in captured:
                for peer in words.peers:
                    moved[words.flag(slot, words.rank, peer)] = SET
                    moved[words.flag(slot, peer, words.rank)] = FREE
        words.write(moved.items())
        return bool(moved)

    def _corrected(self, missing: set[int]) -> set[int]:
        """What this rank sees as missing, with what those say whose deadline came first."""
        missed, said = self._words.told()
        return ((missing - said) | missed) - {self._words.rank} or missing

    def _behind(self, epochs: dict[int, int]) -> set[Goal]:
        """What lacks at barriers to which this rank's stream has come; it may be queued only."""
        own = [self._words.arrived(slot, self._words.rank) for slot in epochs]
        here = {}
        for (slot, epoch), now in zip(epochs.items(), self._words.read(own), strict=True):
            # A word that is ahead of all barriers was moved by a peer.
            is_moved = has_arrived(now, (self.epochs[slot] + 1) & COUNT_MASK)
            now = (now - _FAR * is_moved) & COUNT_MASK
            here[slot] = epoch if has_arrived(now, epoch) else now
        return {goal for goal, _ in self._lacking(self._barriers(here))}

    def _silent(self, pending: Sequence[Wait]) -> set[Goal]:
        """The first post that a stream waits for; it has not come to those behind.

        It may not have come to this one, if it is busy with something before it.
        """
        posted, rank = self._words.posted, self._words.rank
        goals = [(peer, posted(slot, rank, peer), num) for slot, peer, num in pending]
        return {goal for goal, _ in self._lacking(goals)[:1]}

    def _barriers(self, epochs: dict[int, int]) -> list[Goal]:
        arrived, peers = self._words.arrived, self._words.peers
        return [(peer, arrived(slot, peer), epochs[slot]) for slot in epochs for peer in peers]

    def _posts(self, counts: dict[tuple[int, int], int]) -> list[Goal]:
        posted, rank = self._words.posted, self._words.rank
        return [(peer, posted(slot, rank, peer), num) for (slot, peer), num in counts.items()]

    def _lacking(self, goals: Sequence[Goal]) -> list[tuple[Goal, int]]:
        """Those whose word has not come to what it has to, and what it holds."""
        found = self._words.read([address for _, address, _ in goals])
        pairs = zip(goals, found, strict=True)
        return [(goal, now) for goal, now in pairs if not has_arrived(now, goal[2])]

    def _absent(self, captured: set[int]) -> set[Goal]:
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
