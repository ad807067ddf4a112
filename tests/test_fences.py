"""Fences wait on the host for every stream, and nothing changes during a capture."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Ranks
from tpspan.errors import PeerError
from tpspan.spans import Fence

CUDA = pytest.mark.ranks(1, 2, 4, backends=("cuda",))


class FakeStream:
    """A stream whose work is finished when the test says so."""

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.given: Any = None

    def record_event(self, event: Any = None) -> Any:
        self.given = event
        return self

    def query(self) -> bool:
        return self.is_done.is_set()


class FakeSignals:
    def __init__(self, missing: tuple[int, ...] = ()) -> None:
        self.missing = missing
        self.num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.missing:
            raise PeerError(self.missing, "did not come before a stream's wait ran out of time")


def fence(streams: list[FakeStream], signals: FakeSignals, timeout_s: float = 10.0) -> Fence:
    world = SimpleNamespace(rank=3, timeout_s=timeout_s)
    return Fence(None, streams, signals, world)  # type: ignore[arg-type]


def test_a_fence_of_no_stream_is_passed_at_once() -> None:
    made = fence([], FakeSignals())
    assert made.is_done()
    made.wait()


def test_events_go_on_to_the_next_fence_only_when_given_back() -> None:
    streams, spare = [FakeStream(), FakeStream()], []  # type: ignore[var-annotated]
    world: Any = SimpleNamespace(rank=3, timeout_s=1.0)

    def made() -> Fence:
        of: Any = None
        signals: Any = FakeSignals()
        kinds: Any = streams
        return Fence(of, kinds, signals, world, spare)

    first = made()
    made()
    assert [stream.given for stream in streams] == [None, None]
    first.give_back()
    first.give_back()
    made()
    assert {id(stream.given) for stream in streams} == {id(stream) for stream in streams}
    assert not spare


def test_a_fence_waits_for_every_stream() -> None:
    """Invariant 5: it is the host that waits."""
    streams = [FakeStream(), FakeStream()]
    signals = FakeSignals()
    made = fence(streams, signals)
    streams[0].is_done.set()
    assert not made.is_done()
    timer = threading.Timer(0.1, streams[1].is_done.set)
    start = time.monotonic()
    timer.start()
    made.wait()
    timer.join()
    assert time.monotonic() - start >= 0.1
    assert made.is_done()
    assert signals.num_checks == 1


def test_a_fence_has_a_deadline() -> None:
    """Invariant 9."""
    made = fence([FakeStream()], FakeSignals(), timeout_s=0.05)
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 3: work .* has not finished within 0.05 s"):
        made.wait()
    with pytest.raises(PeerError, match="within 0.01 s"):
        made.wait(0.01)
    assert time.monotonic() - start < 1


def test_a_fence_names_the_ranks_that_its_streams_waited_for() -> None:
    """Invariant 9: what a stream computed after such a wait is void."""
    stream = FakeStream()
    made = fence([stream], FakeSignals((1, 2)), timeout_s=0.01)
    with pytest.raises(PeerError, match="ranks 1, 2"):
        made.wait()
    stream.is_done.set()
    with pytest.raises(PeerError, match="ranks 1, 2"):
        made.wait()


@CUDA
def test_a_remap_waits_for_the_kernels_of_every_rank(ranks: Ranks) -> None:
    """Invariant 5."""
    ranks.run("bodies.streams:waits_for_kernels", slow=ranks.size - 1)


@CUDA
def test_nothing_is_remapped_during_a_capture_and_replays_see_remaps(ranks: Ranks) -> None:
    """Invariant 7."""
    ranks.run("bodies.streams:capture")


@CUDA
def test_a_captured_barrier_can_be_replayed(ranks: Ranks) -> None:
    ranks.run("bodies.streams:captured_barrier")


@pytest.mark.ranks(2, 4, backends=("cuda",))
def test_a_wait_on_a_stream_has_a_deadline(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.streams:late_on_a_stream", victim=ranks.size - 1)


@pytest.mark.ranks(2, 4, launchers=("mpirun",), backends=("cuda",))
@pytest.mark.parametrize("num_kernels", [0, 3])
def test_a_host_far_ahead_of_a_late_rank_is_told(ranks: Ranks, num_kernels: int) -> None:
    """Invariant 9, although the driver has no room on the stream."""
    ranks.run("bodies.streams:far_ahead", victim=ranks.size - 1, num_kernels=num_kernels)


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("cuda",))
def test_a_host_that_fills_the_driver_with_kernels_is_told_or_ended(ranks: Ranks) -> None:
    """Invariant 9: if a launch waits inside the driver, that may keep anybody from being told."""
    outcome = ranks.fresh(
        "bodies.streams:far_ahead", survive=False, victim=1, num_kernels=40, patience_s=2.0
    )
    told = [report for report in outcome.reports if report is not None]
    if outcome.died:
        assert "a launch has waited in the driver" in outcome.output, outcome.output
    else:
        assert [report.error for report in told] == [None, None], outcome.output


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("cuda",))
def test_a_stray_write_loses_its_writer_and_no_data(ranks: Ranks) -> None:
    """Invariant 12."""
    outcome = ranks.fresh("bodies.streams:stray_write", victim=1)
    assert outcome.died == (1,), outcome.output
    report = outcome.reports[0]
    assert report is not None and report.error is None, outcome.output
    assert report.value == 1
