"""Hand-overs between streams that share a GPU, carried out by threads: one channel after another.

Each of these would hang, or read what is being written, if a channel left a signal behind in a slot
that the next channel gets.
"""

from __future__ import annotations

import pytest

from harness import Ranks

pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")

HERE = pytest.mark.ranks(2, backends=("host",), launchers=("mpirun",))
MODES = pytest.mark.parametrize("mode", ["window", "remap"])


@pytest.mark.ranks(2, 3, backends=("host",), launchers=("mpirun",))
@MODES
def test_channels_leave_no_signal_behind(ranks: Ranks, mode: str) -> None:
    """Invariant 6."""
    ranks.run("bodies.handoff_streams:one_after_another", mode=mode)


@HERE
def test_without_the_guard_signals_stay(ranks: Ranks) -> None:
    assert ranks.run("bodies.handoff_streams:unsettled") == [2, 0]


@HERE
def test_an_exception_leaves_no_signal_behind(ranks: Ranks) -> None:
    ranks.run("bodies.handoff_streams:put_back")


@HERE
def test_a_host_that_is_far_ahead_overwrites_no_header(ranks: Ranks) -> None:
    """Invariant 6; and without the guard it does."""
    assert ranks.run("bodies.handoff_streams:far_ahead", is_guarded=True) == [0, 0]
    assert ranks.run("bodies.handoff_streams:far_ahead", is_guarded=False)[1] > 0


@HERE
@MODES
def test_two_channels_at_once(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff_streams:both_ways", mode=mode)
