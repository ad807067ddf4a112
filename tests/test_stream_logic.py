"""Waits of streams that share a GPU, carried out by threads: order, deadlines, who is named."""

from __future__ import annotations

import pytest

from harness import Ranks

pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")

HERE = pytest.mark.ranks(2, 3, 4, backends=("host",), launchers=("mpirun",))


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
def test_a_post_that_never_comes_is_missed(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:silent")


@HERE
def test_a_stream_that_is_busy_is_left_alone(ranks: Ranks) -> None:
    ranks.run("bodies.stream_logic:busy")
