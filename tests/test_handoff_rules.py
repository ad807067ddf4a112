"""Turns, packing and the helper that remaps: without ranks, drivers or devices."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tpspan.errors import CaptureError, DriverError, InUseError, PeerError
from tpspan.memory.host import HostDriver
from tpspan.parallel.packing import HEADER_WORDS, Packing, decode, encode, strides_of
from tpspan.parallel.ring import Ring
from tpspan.parallel.side import MOST_AHEAD, Side
from tpspan.parallel.turns import StreamTurns
from tpspan.spans.remapper import Lane, Remapper


@pytest.mark.parametrize("seed", range(30))
def test_no_block_is_ever_on_both_sides(seed: int) -> None:
    """Invariant 6, by counts alone: whatever order turns are taken and released in."""
    rng = random.Random(seed)
    depth, num_consumers = rng.randint(1, 6), rng.randint(1, 3)
    producer = Ring(depth)
    consumers = [Ring(depth) for _ in range(num_consumers)]
    given = [0] * depth
    freed = [[0] * depth for _ in consumers]
    content: list[int | None] = [None] * depth
    for _ in range(600):
        side = rng.choice([producer, *consumers])
        if side.held and rng.random() < 0.5:
            turn = rng.choice(side.held)
            side.release(turn)
            block = side.block_of(turn)
            if side is producer:
                content[block] = turn
                given[block] += 1
            else:
                assert content[block] == turn, "overwritten while it was held"
                freed[consumers.index(side)][block] += 1
            continue
        if side is producer and side.held and rng.random() < 0.1:
            side.put_back(side.next_turn - 1) if side.next_turn - 1 in side.held else None
            continue
        try:
            turn = side.check()
        except InUseError:
            continue
        block = side.block_of(turn)
        if side is producer:
            if all(count[block] >= side.num_freed(turn) for count in freed):
                side.take()
                assert all(block not in {c.block_of(t) for t in c.held} for c in consumers)
                content[block] = None
        elif given[block] >= side.num_given(turn):
            side.take()
            assert content[block] == turn, "read before it was given, or in the wrong order"
    assert all(producer.next_turn >= consumer.next_turn for consumer in consumers)
    assert producer.num_released > 5


def test_a_ring_refuses_what_it_cannot_do() -> None:
    ring = Ring(2, side="producer")
    assert (ring.take(), ring.take()) == (0, 1)
    with pytest.raises(InUseError, match="the producer holds 2 of at most 2 slots"):
        ring.take()
    with pytest.raises(ValueError, match="not the one that was taken last"):
        ring.put_back(0)
    ring.release(1)
    with pytest.raises(InUseError, match="still holds turn 0, whose block is the next one"):
        ring.take()
    with pytest.raises(ValueError, match="turn 1 is not held"):
        ring.release(1)
    ring.release(0)
    assert (ring.take(), ring.held, ring.num_released) == (2, (2,), 2)
    ring.put_back(2)
    assert (ring.take(), ring.num_given(2), ring.num_freed(2)) == (2, 2, 1)
    with pytest.raises(ValueError, match="at least one block"):
        Ring(0)


def test_tensors_are_packed_at_multiples_of_256_bytes() -> None:
    packing = Packing(2048)
    places = [
        packing.place(shape, dtype)
        for shape, dtype in [
            ((3,), torch.int8),
            ((), torch.float64),
            ((0, 7), torch.int32),
            ((2, 128), torch.bfloat16),
        ]
    ]
    assert [(place.offset_bytes, place.nbytes) for place in places] == [
        (0, 3),
        (256, 8),
        (512, 0),
        (512, 512),
    ]
    assert packing.end_bytes == 1024
    with pytest.raises(ValueError, match="1025 bytes at offset 1024 do not fit"):
        packing.place((1025,), torch.uint8)
    assert len(packing.specs) == 4, "what was refused takes no place"
    packing.place((1024,), torch.uint8)
    with pytest.raises(TypeError, match="not a dtype that can be handed over"):
        packing.place((1,), torch.quint8)


def test_headers_say_what_was_packed() -> None:
    rng = random.Random(0)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    for _ in range(100):
        specs = [
            (tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 8))), rng.choice(dtypes))
            for _ in range(rng.randint(0, 20))
        ]
        words = encode(specs)
        assert words[0] == len(words) <= HEADER_WORDS
        assert decode(words) == tuple(specs)
    for wrong in ([2, 0xFF], [2, 7 | 3 << 8]):
        with pytest.raises(ValueError, match="does not describe tensors"):
            decode(wrong)
    packing = Packing(1 << 20)
    with pytest.raises(ValueError, match="more than 511 tensors"):
        for _ in range(HEADER_WORDS):
            packing.place((), torch.int8)


def test_strides_are_those_of_torch() -> None:
    for shape in [(), (3,), (2, 3, 4), (1, 5, 1), (0, 3)]:
        assert strides_of(shape) == torch.empty(shape).stride()


class FakeAfter:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self.num_given_back = 0

    def is_done(self) -> bool:
        return self.is_set.is_set()

    def give_back(self) -> None:
        assert self.is_set.is_set()
        self.num_given_back += 1


class FakeGate:
    """Remembers what it was opened for."""

    def __init__(self) -> None:
        self.count = 0
        self.held: list[tuple[int, int]] = []

    def open(self, count: int) -> None:
        self.count = count

    def hold(self, stream: int, count: int) -> bool:
        self.held.append((stream, count))
        return self.count < count


class Captures:
    """Whether something is being captured."""

    def __init__(self) -> None:
        self.is_going_on = False

    def refuse(self) -> None:
        if self.is_going_on:
            raise CaptureError("captured")


@pytest.fixture
def remapper() -> Iterator[Remapper]:
    made = Remapper(HostDriver())
    yield made
    made.close()
    assert not any(thread.name == "tpspan-remap" for thread in threading.enumerate())


def lane_of(
    remapper: Remapper,
    gate: FakeGate | None,
    captures: Captures | None = None,
    timeout_s: float = 10.0,
) -> Lane:
    refuse = (captures or Captures()).refuse
    return remapper.lane(refuse, gate=gate, rank=3, timeout_s=timeout_s)  # type: ignore[arg-type]


def until(condition: object, what: str = "in time") -> None:
    assert callable(condition)
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def test_a_remap_waits_for_its_fence_and_then_opens_the_gate(remapper: Remapper) -> None:
    """Invariant 5."""
    gate, after, changes = FakeGate(), FakeAfter(), []
    lane = lane_of(remapper, gate)
    lane.submit(after, lambda: changes.append(gate.count), 1)
    lane.hold(77, 1)
    time.sleep(0.05)
    assert (changes, gate.count, gate.held) == ([], 0, [(77, 1)])
    after.is_set.set()
    until(lambda: gate.count == 1)
    assert changes == [0], "first the remap, then the gate"
    until(lambda: lane.is_idle)
    assert (lane.num_done, after.num_given_back) == (1, 1)
    remapper.end(lane)


def test_a_remap_waits_for_the_end_of_a_capture(remapper: Remapper) -> None:
    """Invariant 7."""
    gate, after, captures = FakeGate(), FakeAfter(), Captures()
    captures.is_going_on = True
    after.is_set.set()
    lane = lane_of(remapper, gate, captures)
    lane.submit(after, lambda: None, 1)
    time.sleep(0.05)
    assert gate.count == 0
    captures.is_going_on = False
    until(lambda: gate.count == 1)
    remapper.end(lane)


def test_lanes_do_not_wait_for_each_other(remapper: Remapper) -> None:
    gates = [FakeGate(), FakeGate()]
    stuck, free = FakeAfter(), FakeAfter()
    first, second = (lane_of(remapper, gate) for gate in gates)
    first.submit(stuck, lambda: None, 1)
    second.submit(free, lambda: None, 1)
    free.is_set.set()
    until(lambda: gates[1].count == 1)
    assert gates[0].count == 0
    stuck.is_set.set()
    remapper.end(first)
    remapper.end(second)


def test_a_fence_that_never_ends_is_named_at_the_deadline(remapper: Remapper) -> None:
    """Invariant 9: the stream is let go, and the next call raises."""
    gate, changes = FakeGate(), []
    lane = lane_of(remapper, gate, timeout_s=0.1)
    start = time.monotonic()
    lane.submit(FakeAfter(), lambda: changes.append(1), 1)
    until(lambda: gate.count == 1)
    assert 0.1 <= time.monotonic() - start < 1
    assert changes == []
    with pytest.raises(PeerError, match=r"rank 3: work that uses an address") as caught:
        lane.hold(0, 1)
    assert caught.value.ranks == (3,)
    lane.submit(FakeAfter(), lambda: changes.append(2), 2)
    until(lambda: gate.count == 2)
    assert changes == [], "behind a failure nothing is remapped"
    remapper.end(lane)


def test_without_a_gpu_the_caller_remaps_who_needs_it(remapper: Remapper) -> None:
    after = FakeAfter()
    after.is_set.set()
    lane = lane_of(remapper, None)
    threads: list[str] = []
    for count in range(1, 200):
        lane.submit(after, lambda: threads.append(threading.current_thread().name), count)
        lane.hold(0, count)
        assert len(threads) == count == lane.num_done

    def fail() -> None:
        raise DriverError("cuMemMap", 1, "INJECTED")

    lane.submit(after, fail, 200)
    with pytest.raises(DriverError, match="INJECTED"):
        lane.hold(0, 200)
    remapper.end(lane)


class FakeHosts:
    """What the hosts tell each other, as a list of what was asked."""

    def __init__(self, *, ahead: bool, dead: bool = False) -> None:
        self.ahead, self.dead = ahead, dead
        self.log: list[tuple[object, ...]] = []

    def has_come(self, turn: int) -> bool:
        return not self.ahead

    def wait_on_host(self, turn: int, timeout_s: float) -> None:
        raise AssertionError("no host waits for a stream's sake")

    def wait_until_freed(self, turn: int, timeout_s: float) -> None:
        raise AssertionError("no host is as far ahead as that")

    def check_alive(self) -> None:
        if self.dead:
            raise PeerError([1], "left the world, or ended")

    def finish(self, turn: int, stream: int) -> None:
        self.log.append(("host", turn))


class FakeSignals:
    """Signals that write down what is put on which stream."""

    def __init__(self, log: list[tuple[object, ...]]) -> None:
        self.log = log

    def check(self) -> None:
        self.log.append(("check",))

    def post(self, slot: int, peer: int, stream: int) -> None:
        self.log.append(("post", slot, peer, stream))

    def wait(self, slot: int, peer: int, stream: int) -> None:
        self.log.append(("wait", slot, peer, stream))


def stream_turns(hosts: FakeHosts, *, is_producer: bool) -> StreamTurns:
    peers = (1, 2) if is_producer else (0,)
    fake: Any = hosts
    signals: Any = FakeSignals(hosts.log)
    return StreamTurns(fake, signals, [10, 11], Ring(2), peers, is_producer=is_producer)


def test_streams_wait_for_streams_and_hosts_for_nobody() -> None:
    """A slot of the signals for each block; the first blocks are free without a word."""
    hosts = FakeHosts(ahead=True)
    producer = stream_turns(hosts, is_producer=True)
    producer.wait(1, 7, 1.0, has_come=False)
    producer.finish(1, 7)
    assert hosts.log == [("check",), ("post", 11, 1, 7), ("post", 11, 2, 7), ("host", 1)]
    hosts.log.clear()
    producer.wait(2, 7, 1.0, has_come=False)
    assert hosts.log == [("wait", 10, 1, 7), ("wait", 10, 2, 7)]
    hosts.log.clear()
    consumer = stream_turns(hosts, is_producer=False)
    consumer.wait(0, 8, 1.0, has_come=False)
    consumer.finish(0, 8)
    assert hosts.log == [("wait", 10, 0, 8), ("post", 10, 0, 8), ("host", 0)]


def test_a_host_that_is_ahead_sees_that_the_other_side_is_dead() -> None:
    """Invariant 9: at once, and not only when the stream's deadline has passed."""
    hosts = FakeHosts(ahead=True, dead=True)
    with pytest.raises(PeerError, match="rank 1"):
        stream_turns(hosts, is_producer=True).wait(2, 7, 1.0, has_come=False)
    assert hosts.log == []
    stream_turns(hosts, is_producer=True).wait(2, 7, 1.0, has_come=True)
    assert len(hosts.log) == 2, "what it has given may still be read"


def test_the_host_is_not_too_far_ahead_of_its_remaps(remapper: Remapper) -> None:
    """A launch that waits for room in a full queue might keep the helper from remapping."""
    side = Side.__new__(Side)
    after, gate = FakeAfter(), FakeGate()
    side.lane = lane_of(remapper, gate)
    for turn in range(1, MOST_AHEAD + 2):
        side.lane.submit(after, lambda: None, turn)
    side.hold(0, MOST_AHEAD)  # nothing has been remapped, and it goes on
    finished = threading.Event()

    def hold() -> None:
        side.hold(0, MOST_AHEAD + 1)
        finished.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert not finished.wait(0.05)
    after.is_set.set()
    assert finished.wait(5)
    thread.join()
    until(lambda: side.lane is not None and side.lane.is_idle)
    side.end_remaps(remapper)
