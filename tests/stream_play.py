"""Streams of several ranks, played: operations in any order that they allow, and who races.

What ranks put on streams is kept, then carried out by ``Play.run``. Each stream has a vector clock,
which waits and meetings bring forward, so two accesses that nothing orders are found in whatever
order they were carried out. Streams have a time as well, for what an operation is said to take.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Bytes = tuple[int, int]
"""Address and size."""

MEETING_US = 5.0
SWITCH_US = 3.0  # from one stream to another that has been waiting for it


@dataclass
class Mark:
    """A point of a stream; the clock is there once the stream has come to it."""

    clock: list[int] | None = None
    time_us: float = 0.0


@dataclass
class Operation:
    """Reads and writes, or a wait for a mark, or a mark, or a meeting of all ranks."""

    name: str
    reads: Iterable[Bytes] = ()
    writes: Iterable[Bytes] = ()
    action: Callable[[], object] = lambda: None
    takes_us: float = 0.0
    wait: Mark | None = None
    mark: Mark | None = None
    meets: bool = False


@dataclass(frozen=True)
class Access:
    name: str
    stream: int
    turn: int
    begin: int
    end: int
    is_write: bool


class Event:
    """In the place of ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = Mark()
        stream.put(Operation("mark", mark=self.mark))


class Stream:
    """In the place of ``torch.cuda.Stream``; its number is its handle."""

    def __init__(self, play: Play, rank: int) -> None:
        self.play, self.rank = play, rank
        self.cuda_stream = len(play.streams)
        self.queue: deque[Operation] = deque()
        self.clock: list[int] = []
        self.time_us = 0.0
        self.busy_us: list[tuple[str, float, float]] = []
        play.streams.append(self)

    def put(self, operation: Operation) -> None:
        self.queue.append(operation)

    def wait_event(self, event: Event) -> None:
        """As CUDA does: for the record before this call; for nothing if there was none."""
        if event.mark is not None:
            self.put(Operation("wait", wait=event.mark))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


@dataclass
class Play:
    """The streams of some ranks, and what has been found out about them."""

    num_ranks: int
    streams: list[Stream] = field(default_factory=list)
    races: list[tuple[Access, Access]] = field(default_factory=list)
    _accesses: dict[int, list[Access]] = field(default_factory=dict)
    _areas: list[Bytes] = field(default_factory=list)

    def area(self, address: int, nbytes: int) -> None:
        """Memory in which accesses may overlap; apart from all other areas."""
        bisect.insort(self._areas, (address, address + nbytes))

    def run(self, seed: int) -> None:
        """Carry out everything, one operation at a time of a stream chosen at random."""
        chance = random.Random(seed)
        for stream in self.streams:
            stream.clock = [0] * len(self.streams)
        while any(stream.queue for stream in self.streams):
            ready = [stream for stream in self.streams if stream.queue and self._is_ready(stream)]
            if ready:
                self._step(chance.choice(ready))
                continue
            at_meeting = {s.rank: s for s in reversed(self.streams) if s.queue and s.queue[0].meets}
            assert len(at_meeting) == self.num_ranks, "streams wait for each other"
            self._meet(list(at_meeting.values()))

    def _is_ready(self, stream: Stream) -> bool:
        head = stream.queue[0]
        return not head.meets and (head.wait is None or head.wait.clock is not None)

    def _step(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        number = stream.cuda_stream
        stream.clock[number] += 1
        if operation.wait is not None and operation.wait.clock is not None:
            stream.clock = [
                max(pair) for pair in zip(stream.clock, operation.wait.clock, strict=True)
            ]
            if operation.wait.time_us > stream.time_us:
                stream.time_us = operation.wait.time_us + SWITCH_US
        if operation.takes_us:
            begin, stream.time_us = stream.time_us, stream.time_us + operation.takes_us
            stream.busy_us.append((operation.name, begin, stream.time_us))
        operation.action()
        for place, is_write in (
            *((place, False) for place in operation.reads),
            *((place, True) for place in operation.writes),
        ):
            if place[1]:
                self._touch(stream, operation.name, place, is_write)
        if operation.mark is not None:
            operation.mark.clock, operation.mark.time_us = list(stream.clock), stream.time_us

    def _meet(self, streams: list[Stream]) -> None:
        """Let all ranks leave; a rank's meetings count, so each must be ordered before the next."""
        for stream in streams:
            stream.queue.popleft()
            stream.clock[stream.cuda_stream] += 1
            self._touch(stream, "meet", (-1 - stream.rank, 1), True)
        clocks = zip(*(stream.clock for stream in streams), strict=True)
        clock = [max(each) for each in clocks]
        time_us = max(stream.time_us for stream in streams) + MEETING_US
        for stream in streams:
            stream.clock, stream.time_us = list(clock), time_us

    def _touch(self, stream: Stream, name: str, place: Bytes, is_write: bool) -> None:
        number, (begin, nbytes) = stream.cuda_stream, place
        new = Access(name, number, stream.clock[number], begin, begin + nbytes, is_write)
        others = self._accesses.setdefault(self._area_of(begin, nbytes), [])
        kept = []
        for old in others:
            conflicts = is_write or old.is_write
            if conflicts and old.begin < new.end and new.begin < old.end:
                if stream.clock[old.stream] < old.turn:
                    self.races.append((old, new))
                elif is_write and begin <= old.begin and old.end <= new.end:
                    continue  # whatever is ordered behind the new one is so behind the old one
            kept.append(old)
        others[:] = [*kept, new]

    def _area_of(self, address: int, nbytes: int) -> int:
        if address < 0:
            return address
        index = bisect.bisect_right(self._areas, address, key=lambda area: area[0]) - 1
        begin, end = self._areas[max(index, 0)]
        assert begin <= address and address + nbytes <= end, "an access outside of all areas"
        return begin
