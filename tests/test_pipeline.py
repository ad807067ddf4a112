"""Pipelines of torch over hand-overs: the same training, and what surrounds it."""

from __future__ import annotations

import pytest

from harness import Ranks

MPIRUN = ("mpirun",)
SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)

# torch keeps what its groups have made, so leaks are looked for in a body of their own.


@pytest.mark.ranks(2, launchers=MPIRUN)
@pytest.mark.parametrize("name", SCHEDULES)
def test_training_is_what_it_was(ranks: Ranks, name: str) -> None:
    ranks.run("bodies.pipeline:trained_alike", name=name, leaks=False)


@pytest.mark.slow
@pytest.mark.ranks(3, 4, launchers=MPIRUN)
@pytest.mark.parametrize("name", SCHEDULES)
def test_training_in_more_stages(ranks: Ranks, name: str) -> None:
    ranks.run("bodies.pipeline:trained_alike", name=name, leaks=False)


@pytest.mark.ranks(2, launchers=("torchrun",))
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_with_a_block_for_every_microbatch(ranks: Ranks, name: str) -> None:
    body = "bodies.pipeline:trained_alike"
    ranks.run(body, name=name, num_steps=3, fitted=False, direct=None, leaks=False)


@pytest.mark.ranks(3, launchers=MPIRUN)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_last_gradients_may_go_first(ranks: Ranks, hooked: bool) -> None:
    ranks.run("bodies.pipeline:split_last", hooked=hooked, leaks=False)


@pytest.mark.ranks(2, 3, launchers=MPIRUN)
def test_several_tensors_cross(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline:several_tensors", leaks=False)


@pytest.mark.ranks(2, 3, launchers=MPIRUN)
def test_forward_alone(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline:without_backward", leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
def test_gradients_are_not_overwritten(ranks: Ranks) -> None:
    """Invariant 6: a block that has become a gradient would be written again."""
    ranks.run("bodies.pipeline:gradients_that_come_in_whole", leaks=False)


@pytest.mark.ranks(4, launchers=MPIRUN)
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_beside_other_axes(ranks: Ranks, kind: str) -> None:
    ranks.run("bodies.pipeline:other_axes", kind=kind, leaks=False)


@pytest.mark.ranks(2, 4, launchers=MPIRUN, backends=("host",))
def test_between_domains_torch_sends(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline:several_domains", leaks=False)


@pytest.mark.ranks(2, 3, launchers=MPIRUN)
def test_everything_is_given_back(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline:given_back", leaks=False)


@pytest.mark.slow  # the peaks of equal runs differ, and only several of them say something
@pytest.mark.ranks(2, 3, launchers=MPIRUN, backends=("host",))
def test_it_takes_no_more_memory(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline:without_more_memory", leaks=False)


@pytest.mark.ranks(3, launchers=MPIRUN, backends=("host",))
@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        (1, "forward"),
        (1, "backward"),
        *(
            pytest.param(victim, phase, marks=pytest.mark.slow)
            for victim in (0, 2)
            for phase in ("forward", "backward")
        ),
    ],
)
def test_a_stage_dies(ranks: Ranks, victim: int, phase: str) -> None:
    """Invariant 9."""
    outcome = ranks.fresh("bodies.pipeline:dies", victim=victim, phase=phase)
    assert victim in outcome.died
    for rank, report in enumerate(outcome.reports):
        if rank != victim:
            assert report is not None and report.error is None, outcome
            assert "rank" in report.value
