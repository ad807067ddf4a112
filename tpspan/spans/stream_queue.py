"""What was put on a stream of waits and posts, and how far the stream has come.

Marks tell how far: events, which the host can ask for. Not every operation has one behind it, since
that takes a barrier of two ranks on one GPU 1 to 2 µs (16 to 17 instead of 14 to 16 in one loop).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from tpspan.memory.cuda import CudaDriver, check

_MARK_S = 0.5
_MARK_OPERATIONS = 64

Wait = tuple[int, int, int]  # a slot, a peer, and for how many of its posts
Goal = tuple[int, int, int]  # a peer, the address of a word of its, and what it has to come to


@dataclass
class _Mark:
    """An event on the stream.

    Attributes:
        num_put: operations before it.
        num_waits: those of them that are waits for posts, as far as they are kept.
        put_s: since when the stream can have been waiting at one of those behind the mark before.
    """

    event: Any
    num_put: int
    num_waits: int
    put_s: float


class Queue:
    """The books of one stream.

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
        self.waits: deque[Wait] = deque()
        self.owed: set[Goal] = set()
        self.seen_s = 0.0
        self._marks: deque[_Mark] = deque()
        # For marks to come: taken under ``order``, given back under the lock of the watch.
        self._events: list[Any] = []
        self._num_put = self._num_marked = self._num_done = 0
        self._first_s = self._last_s = self._marked_s = self._progress_s = 0.0

    def mark(self, num_operations: int, *, always: bool) -> Any:
        """An event behind operations that were put there just now, or None if none is due."""
        num_unmarked = self._num_put + num_operations - self._num_marked
        is_due = num_unmarked >= _MARK_OPERATIONS or time.monotonic() - self._marked_s > _MARK_S
        if not num_unmarked or not (always or is_due):
            return None
        with self._driver.current():
            event = self._events.pop() if self._events else _new_event()
            try:
                check("cuEventRecord", cu.cuEventRecord(event, self._stream))
            except BaseException:
                self._events.append(event)
                raise
        self._marked_s = time.monotonic()
        return event

    def noted(self, num_operations: int, event: Any) -> None:
        """Note operations, with what ``mark`` returned."""
        now = time.monotonic()
        if self._num_put == self._num_marked:
            self._first_s = now
        if num_operations:
            self._last_s = now
        self._num_put += num_operations
        if event is not None:
            self._marks.append(_Mark(event, self._num_put, len(self.waits), self._since_s()))
            self._num_marked = self._num_put

    @property
    def num_ahead(self) -> int:
        """Operations that the stream may have before it, as far as it was last seen to be."""
        return self._num_put - self._num_done

    @property
    def is_before_mark(self) -> bool:
        """Whether the stream has a mark before it, as far as it was last seen to be."""
        return bool(self._marks)

    def catch_up(self) -> None:
        """See how far the stream has come."""
        while self._marks and _is_done(self._marks[0].event):
            mark = self._marks.popleft()
            self._events.append(mark.event)
            self._num_done = mark.num_put
            for _ in range(mark.num_waits):
                self.waits.popleft()
            for later in self._marks:
                later.num_waits -= mark.num_waits
            self._progress_s, self.seen_s = time.monotonic(), 0.0
            self.owed.clear()

    def stuck_s(self) -> float:
        """How long the stream may have been waiting, in seconds; 0 if it is through everything."""
        if not self.num_ahead:
            return 0.0
        put_s = self._marks[0].put_s if self._marks else self._since_s()
        return time.monotonic() - max(put_s, self._progress_s)

    def close(self) -> None:
        """Give the events back."""
        self._events += [mark.event for mark in self._marks]
        self._marks.clear()
        while self._events:
            check("cuEventDestroy", cu.cuEventDestroy(self._events.pop()))

    def _since_s(self) -> float:
        """It cannot have waited for longer than the last has been there, which may be passed; nor
        for longer than marks are apart before the first was."""
        return min(self._last_s, self._first_s + _MARK_S)


def _new_event() -> Any:
    flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
    return check("cuEventCreate", cu.cuEventCreate(flags))


def _is_done(event: Any) -> bool:
    (code,) = cu.cuEventQuery(event)
    if code == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    check("cuEventQuery", (code,))
    return True
