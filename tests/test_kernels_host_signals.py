"""Signals on the host against their reference: alone, and between real processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import counts
from kernel_team import NEAR_WRAP, PAGE_NBYTES, SLOT, TEAM_SIZE, Team, words
from tpspan import kernels
from tpspan.kernels import reference
from tpspan.kernels.board import COUNT_MASK


@settings(deadline=None)
@given(counts, st.integers(0, 1 << 31))
def test_arrival_is_cyclic(count: int, ahead: int) -> None:
    difference = np.subtract(*np.array([count + ahead, count]).astype(np.uint32), dtype=np.uint32)
    arrived = kernels.has_arrived((count + ahead) & COUNT_MASK, count)
    assert arrived == (difference.view(np.int32) >= 0) == (ahead < 1 << 31)


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_every_counter_has_a_line_of_its_own(world_size: int) -> None:
    num_slots = kernels.num_slots(PAGE_NBYTES, world_size)
    ranks = range(world_size)
    addresses = {
        kernels.counter_address(1 << 40, PAGE_NBYTES, world_size, slot, receiver, sender)
        for slot in range(num_slots)
        for receiver in ranks
        for sender in ranks
    }
    assert len(addresses) == num_slots * world_size**2
    assert min(addresses) == 1 << 40
    assert max(addresses) + kernels.LINE_NBYTES <= (1 << 40) + world_size * PAGE_NBYTES
    assert all(address % kernels.LINE_NBYTES == 0 for address in addresses)


# ---------------------------------------------------------------- alone


@settings(deadline=None)
@given(counts, counts)
def test_host_post_and_wait_equal_the_reference(own: int, there: int) -> None:
    ours, theirs = words(own, there), words(own, there)
    kernels.host_post(ours[1:].ctypes.data, ours.ctypes.data)
    reference.reference_post(theirs[1:].ctypes.data, theirs.ctypes.data)
    assert ours.tolist() == theirs.tolist() == [(own + 1) & COUNT_MASK] * 2

    line = np.zeros(16, np.uint32)
    line[0] = there
    ours, theirs = words(own), words(own)
    missing = kernels.host_wait(line.ctypes.data, ours.ctypes.data, 0.0, peer=3)
    expected = reference.reference_wait(line.ctypes.data, theirs.ctypes.data, peer=3)
    assert missing == expected
    assert ours.tolist() == theirs.tolist()
    assert line.tolist() == [there] + [0] * 15, "no sleeper is left behind"


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), counts, st.data())
def test_host_barrier_equals_the_reference(
    world_size: int, slot: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    page_nbytes = 4096
    before = np.zeros(world_size * page_nbytes // 4, np.uint32)
    for peer in range(world_size):
        place = kernels.counter_address(0, page_nbytes, world_size, slot, rank, peer)
        before[place // 4] = (epoch + data.draw(st.sampled_from([0, 1, 2]))) & COUNT_MASK
    ours, theirs = before.copy(), before.copy()
    our_epoch, their_epoch = words(epoch), words(epoch)
    shape = (page_nbytes, slot, rank, world_size)
    missing = kernels.host_barrier(ours.ctypes.data, *shape, our_epoch.ctypes.data, 0.0)
    expected = reference.reference_barrier(theirs.ctypes.data, *shape, their_epoch.ctypes.data)
    assert missing == expected
    assert our_epoch.tolist() == their_epoch.tolist()
    assert np.array_equal(ours, theirs), "the same words were written, and no sleeper is left"


def test_a_waiting_thread_lets_python_run_and_is_woken() -> None:
    line, sent, expected = np.zeros(16, np.uint32), words(0), words(0)
    results: list[tuple[tuple[int, ...], float]] = []

    def wait() -> None:
        start = time.monotonic()
        missing = kernels.host_wait(line.ctypes.data, expected.ctypes.data, 20.0)
        results.append((missing, time.monotonic() - start))

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 10
    while line[1] == 0 and time.monotonic() < deadline:  # until it sleeps
        time.sleep(0.001)
    kernels.host_post(line.ctypes.data, sent.ctypes.data)
    thread.join(10)
    assert results and results[0][0] == () and results[0][1] < 10
    assert line.tolist() == [1, 0] + [0] * 14


def test_a_waiting_host_can_be_interrupted() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    line, expected = np.zeros(16, np.uint32), words(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(Interrupted):
            kernels.host_wait(line.ctypes.data, expected.ctypes.data, 30.0)
        assert time.monotonic() - start < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert line.tolist() == [0] * 16


# ---------------------------------------------------------------- between processes


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team()
    yield team
    team.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_rounds", "delay_s"), [(4000, 0.0), (400, 0.002)])
def test_barriers_between_processes(
    team: Team, world_size: int, num_rounds: int, delay_s: float
) -> None:
    members = range(world_size)
    wrong = team.run(members, "barriers", world_size, num_rounds, delay_s, num_rounds)
    assert wrong == [[]] * world_size
    board = np.frombuffer(team.memory, np.uint32).reshape(TEAM_SIZE, -1, 16)
    sleepers = board[:world_size, : (SLOT + 1) * world_size, [1, 3]]
    assert not sleepers.any()


@pytest.mark.parametrize(("world_size", "absent"), [(2, {1}), (3, {0}), (4, {1, 3})])
def test_invariant_9_a_barrier_ends_at_its_deadline_and_names_who_did_not_come(
    team: Team, world_size: int, absent: set[int]
) -> None:
    members = [rank for rank in range(world_size) if rank not in absent]
    for missing, seconds in team.run(members, "late_barrier", world_size, 0.3):
        assert missing == tuple(sorted(absent))
        assert 0.3 <= seconds < 3


def test_a_rank_that_comes_late_wakes_all_that_sleep(team: Team) -> None:
    board = np.frombuffer(team.memory, np.uint32)
    board[:] = 0
    board[:: kernels.LINE_NBYTES // 4] = NEAR_WRAP
    team.start([0, 2, 3], "late_barrier", 4, 30.0)
    bell_sleepers = SLOT * 4 * kernels.LINE_NBYTES // 4 + 3
    deadline = time.monotonic() + 10
    while board[bell_sleepers] < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert board[bell_sleepers] == 3
    team.start([1], "late_barrier", 4, 30.0)
    assert all(missing == () and seconds < 15 for missing, seconds in team.finish(range(4)))
    assert board[bell_sleepers] == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("num_rounds", "delay_s"), [(2000, 0.0), (100, 0.002)])
def test_post_and_wait_around_a_ring(
    team: Team, world_size: int, num_rounds: int, delay_s: float
) -> None:
    wrong = team.run(range(world_size), "ring", world_size, num_rounds, delay_s)
    assert wrong == [[]] * world_size
