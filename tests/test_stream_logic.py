"""Waits of streams that share a GPU, carried out by threads: order, deadlines, who is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness import Ranks

pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")

from tpspan.kernels.board import LINE_NBYTES, counter_address, num_slots
from tpspan.spans.stream_words import StreamWords

HERE = pytest.mark.ranks(2, 3, 4, backends=("host",), launchers=("mpirun",))
FEW = pytest.mark.ranks(2, 3, backends=("host",), launchers=("mpirun",))


@HERE
@pytest.mark.parametrize("captured", [False, True])
def test_no_stream_leaves_a_barrier_before_all_have_come(ranks: Ranks, captured: bool) -> None:
    ranks.run("bodies.stream_logic:barriers", captured=captured)


@HERE
def test_a_wait_takes_one_post(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:posts")


@HERE
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_late_rank_is_named_by_all_others(ranks: Ranks, captured: bool, on_device: bool) -> None:
    for victim in range(ranks.size):
        ranks.run("bodies.stream_logic:late", victim=victim, captured=captured, on_device=on_device)


@HERE
def test_only_waits_that_a_stream_may_not_have_come_to_are_kept(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:books")


@HERE
def test_any_thread_may_launch(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:fresh_thread")


@HERE
def test_a_post_that_never_comes_is_missed(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:silent")


@HERE
def test_a_full_stream_holds_no_other_and_has_a_deadline(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:full")


@FEW
def test_a_driver_that_fails_ends_no_job(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:broken")


@FEW
def test_a_host_is_never_far_ahead_of_a_stream(ranks: Ranks) -> None:
    """Invariant 9, and the driver keeps room."""
    ranks.run("bodies.stream_logic:ahead", victim=ranks.size - 1)


@FEW
def test_a_job_whose_driver_lets_nobody_look_is_ended(ranks: Ranks) -> None:
    """Invariant 9, also then."""
    ranks.run("bodies.stream_logic:held")


@FEW
@pytest.mark.parametrize(
    "body",
    ["slot_of_two_streams", "replayed_beside", "behind_a_graph", "posted_after_all", "many_stuck"],
)
def test_streams_beside_each_other(ranks: Ranks, body: str) -> None:
    ranks.run(f"bodies.stream_logic:{body}")


@FEW
def test_what_comes_behind_puts_no_deadline_off(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:late_by")


@pytest.mark.ranks(3, backends=("host",), launchers=("mpirun",))
def test_who_waits_for_another_is_not_late(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:who_is_late")


@HERE
def test_a_stream_that_is_busy_is_left_alone(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:busy")


def test_words_lie_apart_and_those_of_a_barrier_side_by_side() -> None:
    size, page_nbytes = 3, 4096

    def counter(slot: int, receiver: int, sender: int) -> int:
        return counter_address(0, page_nbytes, size, slot, receiver, sender)

    words: StreamWords = object.__new__(StreamWords)
    vars(words)["_pages"] = SimpleNamespace(counter=counter)
    ranks, slots = range(size), range(num_slots(page_nbytes, size))
    pairs = [(slot, r, s) for slot in slots for r in ranks for s in ranks if r != s]
    places = [words.arrived(slot, rank) for slot in slots for rank in ranks]
    places += [place(*pair) for pair in pairs for place in (words.posted, words.flag)]
    assert len(set(places)) == len(places)
    assert all(0 <= place <= size * page_nbytes - 4 and place % 4 == 0 for place in places)
    for slot in slots:
        together = [words.arrived(slot, rank) for rank in ranks]
        assert max(together) - min(together) < size * LINE_NBYTES <= page_nbytes
