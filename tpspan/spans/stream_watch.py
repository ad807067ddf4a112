"""Deadlines for streams that wait for a word, which by themselves would wait for ever.

A thread looks at every stream with such a wait on it. When one has not come any further for the
time allowed, and the word of another rank is waited for, the thread moves the words itself: the
stream goes on, and all ranks are told who was missing before any word is moved. Words that were
moved say nothing true any more, and let the streams of others through that have not waited as long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

from cuda.bindings import driver as cu

from tpspan.errors import PeerError
from tpspan.kernels.board import has_arrived
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.stream_words import FREE, SET, StreamWords

_LOOK_S = 0.1
_RECORD_S = 0.02
_MARK_S = 0.5
_PATIENCE_S = 10.0

_Goal = tuple[int, int, int]  # a peer, the address of a word of its, and what it has to come to


class StreamWatch:
    """Watches the streams of one rank.

    Args:
        words: what streams wait for.
        driver: of the GPU.
        timeout_s: how long a stream may wait.

    Attributes:
        lock: held while something is put on a stream and noted here.
        epochs: by slot, the number of the last barrier that was put on a stream.
        captured: the slots with barriers in graphs.
        waits: by (slot, peer), how many posts were waited for.
    """

    def __init__(self, words: StreamWords, driver: CudaDriver, timeout_s: float) -> None:
        self.lock = threading.Lock()
        self.epochs: dict[int, int] = {}
        self.captured: set[int] = set()
        self.waits: dict[tuple[int, int], int] = {}
        self._words, self._driver, self._timeout_s = words, driver, timeout_s
        self._queues: dict[int, _Queue] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, stream: int) -> None:
        """Say that a wait of ours was put on a stream just now; the lock is held."""
        queue = self._queues.get(stream)
        if queue is None:
            with self._driver.current():
                queue = self._queues[stream] = _Queue(stream)
        queue.submitted()
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
            for queue in queues:
                if queue.is_behind and not self._driver.is_capturing(queue.stream):
                    queue.record()
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

    def _watch(self) -> None:
        with self._driver.current():
            # Or a look at an event would end a capture that goes on in another thread.
            relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            result = cu.cuThreadExchangeStreamCaptureMode(relaxed)
            check("cuThreadExchangeStreamCaptureMode", result)
            while not self._stop.wait(_LOOK_S):
                with self.lock:
                    queues = tuple(self._queues.values())
                    for queue in queues:
                        if queue.is_resting() and not self._driver.is_capturing(queue.stream):
                            queue.record()
                    late = [queue for queue in queues if queue.stuck_s() > self._timeout_s]
                for queue in late:
                    with contextlib.suppress(TimeoutError):  # the next look tries again
                        self._release(queue)

    def _release(self, queue: _Queue) -> None:
        """Move the words until the stream goes on; note who was missing.

        A stream that is merely busy with something else has no word of ours waiting: it is left
        alone.
        """
        words = self._words
        with self.lock:
            epochs, captured, waits = dict(self.epochs), set(self.captured), dict(self.waits)
        missing = self._behind(epochs) | self._silent(waits) or self._absent(captured)
        missing = self._corrected(missing)
        if not missing:
            return
        words.tell(missing)
        # Whatever waits behind goes on, too. No word goes back: others may wait for it.
        goals = self._barriers(epochs) + self._posts(waits)
        found = words.read([address for _, address, _ in goals])
        moves = [
            (address, value)
            for (_, address, value), now in zip(goals, found, strict=True)
            if not has_arrived(now, value)
        ]
        for slot in captured:
            for peer in words.peers:
                moves.append((words.flag(slot, words.rank, peer), SET))
                moves.append((words.flag(slot, peer, words.rank), FREE))
        end = time.monotonic() + _PATIENCE_S
        while not _is_done(queue.last) and time.monotonic() < end:
            words.write(moves)
            time.sleep(0.001)

    def _corrected(self, missing: set[int]) -> set[int]:
        """What this rank sees as missing, with what those say whose deadline came first."""
        missed, said = self._words.told()
        return ((missing - said) | missed) - {self._words.rank} or missing

    def _behind(self, epochs: dict[int, int]) -> set[int]:
        """Who has not come to a barrier to which this rank's stream has; it may be queued only."""
        own = [self._words.arrived(slot, self._words.rank) for slot in epochs]
        here = dict(zip(epochs, self._words.read(own), strict=True))
        return self._short_of(self._barriers(here))

    def _silent(self, waits: dict[tuple[int, int], int]) -> set[int]:
        """Who has not posted as often as is waited for."""
        return self._short_of(self._posts(waits))

    def _barriers(self, epochs: dict[int, int]) -> list[_Goal]:
        arrived, peers = self._words.arrived, self._words.peers
        return [(peer, arrived(slot, peer), epochs[slot]) for slot in epochs for peer in peers]

    def _posts(self, waits: dict[tuple[int, int], int]) -> list[_Goal]:
        posted, rank = self._words.posted, self._words.rank
        return [(peer, posted(slot, rank, peer), num) for (slot, peer), num in waits.items()]

    def _short_of(self, goals: list[_Goal]) -> set[int]:
        found = self._words.read([address for _, address, _ in goals])
        return {
            peer
            for (peer, _, value), now in zip(goals, found, strict=True)
            if not has_arrived(now, value)
        }

    def _absent(self, captured: set[int]) -> set[int]:
        """Who has not moved a flag that a barrier in a graph waits for."""
        rank, flag = self._words.rank, self._words.flag
        pairs = [(slot, peer) for slot in captured for peer in self._words.peers]
        theirs = self._words.read([flag(slot, rank, peer) for slot, peer in pairs])
        own = self._words.read([flag(slot, peer, rank) for slot, peer in pairs])
        unset = {pair for pair, value in zip(pairs, theirs, strict=True) if value == FREE}
        posted = {pair for pair, value in zip(pairs, own, strict=True) if value == SET}
        # A barrier in a graph that holds the stream is one to which this rank has posted.
        return {peer for _, peer in unset & posted} or {peer for _, peer in posted}


class _Queue:
    """How far a stream has come: an event behind its last wait, and marks that show progress.

    An event costs the stream 2 µs, so not every wait has one. Behind the last of many it is the
    watch that records it, once nothing more has come for a while.

    Attributes:
        stream: its handle.
        last: the event.
        is_behind: whether waits were put on the stream since the event was recorded.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.last = _new_event()
        self._marks: deque[Any] = deque()
        self._submitted = self._recorded = self._marked = self._progress = 0.0
        self._is_idle = True
        self.is_behind = False

    def submitted(self) -> None:
        """Note that a wait of ours was put on the stream just now."""
        now = self._submitted = time.monotonic()
        self.is_behind = True
        if self._is_idle:
            self._is_idle, self._progress = False, now
        if now - self._recorded > _RECORD_S:
            self.record()
        if now - self._marked > _MARK_S:
            mark = _new_event()
            check("cuEventRecord", cu.cuEventRecord(mark, self.stream))
            self._marks.append(mark)
            self._marked = now

    def record(self) -> None:
        """Let the event stand for everything so far."""
        check("cuEventRecord", cu.cuEventRecord(self.last, self.stream))
        self._recorded, self.is_behind = time.monotonic(), False

    def is_resting(self) -> bool:
        """Whether the event should be recorded anew, and the thread that launches is elsewhere."""
        return self.is_behind and time.monotonic() - self._submitted > _LOOK_S

    def stuck_s(self) -> float:
        """Seconds since the stream was last seen to have come any further."""
        now = time.monotonic()
        if _is_done(self.last):
            self._is_idle, self._progress = not self.is_behind, now
        while self._marks and _is_done(self._marks[0]):
            check("cuEventDestroy", cu.cuEventDestroy(self._marks.popleft()))
            self._progress = now
        return 0.0 if self._is_idle else now - self._progress

    def close(self) -> None:
        """Give the events back."""
        for event in (self.last, *self._marks):
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
