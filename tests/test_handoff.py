"""Hand-overs: right data without a copy, back-pressure, deadlines, and nothing left behind."""

from __future__ import annotations

import pytest

from harness import Ranks

MODES = pytest.mark.parametrize("mode", ["window", "remap"])
PAIR = pytest.mark.ranks(2, launchers=("mpirun",))
HOST_PAIR = pytest.mark.ranks(2, launchers=("mpirun",), backends=("host",))
CUDA_PAIR = pytest.mark.ranks(2, launchers=("mpirun",), backends=("cuda",))


@pytest.mark.ranks(2, 3, 4)
@MODES
def test_all_shapes_arrive_in_order_and_nothing_is_copied(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff:varied", mode=mode, depth=2)


@PAIR
@pytest.mark.parametrize(("mode", "depth"), [("window", 1), ("window", 256), ("remap", 3)])
def test_rings_of_other_depths(ranks: Ranks, mode: str, depth: int) -> None:
    ranks.run("bodies.handoff:varied", mode=mode, depth=depth, num=23)


@PAIR
@pytest.mark.parametrize(
    "body", ["held", "small_blocks", "one_address_one_slot", "without_waiting"]
)
def test_slots(ranks: Ranks, body: str) -> None:
    ranks.run(f"bodies.handoff:{body}")


@PAIR
@MODES
def test_tensors_are_placed_once_for_all_slots(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff:packed", mode=mode)


@HOST_PAIR
def test_tensors_that_torch_carries_are_placed_once(ranks: Ranks) -> None:
    ranks.run("bodies.handoff:packed_by_torch")


@PAIR
def test_wrong_arguments_are_refused(ranks: Ranks) -> None:
    ranks.run("bodies.handoff_faults:misused")


@PAIR
@MODES
def test_a_block_that_is_being_read_is_not_written(ranks: Ranks, mode: str) -> None:
    """Invariant 6: and without the guard it is."""
    body = "bodies.handoff:slow_consumer"
    assert ranks.run(body, mode=mode, guarded=True)[1] == 0
    assert ranks.run(body, mode=mode, guarded=False)[1] > 0, "the test sees nothing"


@PAIR
def test_a_fixed_address_stays_for_ever(ranks: Ranks) -> None:
    found = ranks.run("bodies.handoff:fixed", num=10_000)
    assert found == [{"wrong": 0, "num": 10_000, "copied": 0}] * 2


@PAIR
@MODES
def test_an_exception_hands_nothing_over(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff:ended_by_an_exception", mode=mode)


@pytest.mark.ranks(3, 4, launchers=("mpirun",))
@MODES
def test_several_consumers_read_one_block(ranks: Ranks, mode: str) -> None:
    """Invariants 6 and 12."""
    ranks.run("bodies.handoff:fan_out", mode=mode)


@pytest.mark.ranks(1)
@MODES
@pytest.mark.parametrize("threads", [False, True])
def test_one_process_on_both_sides(ranks: Ranks, mode: str, threads: bool) -> None:
    ranks.run("bodies.handoff:in_one_process", mode=mode, threads=threads)


@PAIR
def test_ranks_that_disagree_make_nothing(ranks: Ranks) -> None:
    """Invariant 3."""
    ranks.run("bodies.handoff_faults:disagreed")


@PAIR
@pytest.mark.parametrize("body", ["still_used", "closed_with_the_world"])
def test_closing(ranks: Ranks, body: str) -> None:
    """Invariant 10: what is forgotten is named, and closed by the world."""
    ranks.run(f"bodies.handoff_faults:{body}")


@pytest.mark.ranks(2, 3, launchers=("mpirun",), backends=("host",))
def test_between_domains_torch_carries_it(ranks: Ranks) -> None:
    ranks.run("bodies.handoff:by_torch")


@HOST_PAIR
@pytest.mark.parametrize("side", [0, 1])
def test_a_peer_that_is_late_is_named_and_may_still_come(ranks: Ranks, side: int) -> None:
    """Invariant 9."""
    ranks.run("bodies.handoff_faults:late", side=side)


@PAIR
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("making", 0),
        ("idle", 1),
        pytest.param("holding", 0, marks=pytest.mark.slow),
        ("holding", 1),
        ("finished", 0),
        pytest.param("finished", 1, marks=pytest.mark.slow),
        ("closing", 1),
    ],
)
def test_a_killed_peer_is_named_in_every_phase(ranks: Ranks, phase: str, victim: int) -> None:
    """Invariants 9 and 11: by the deadline, and nothing is left."""
    mode = "remap" if victim else "window"
    outcome = ranks.fresh("bodies.handoff_faults:killed", victim=victim, phase=phase, mode=mode)
    assert outcome.died == (victim,), outcome.output
    report = outcome.reports[1 - victim]
    assert report is not None and report.error is None, report
    assert report.value < 6


@PAIR
@MODES
@pytest.mark.parametrize("victim", [0, 1])
def test_whatever_driver_call_fails_all_is_undone(ranks: Ranks, mode: str, victim: int) -> None:
    """Invariant 4."""
    is_one_step = ranks.config.backend == "cuda"  # a remap
    least = 4 if mode == "window" else 7 if is_one_step else 8
    assert (
        min(ranks.run("bodies.handoff_faults:each_driver_call", victim=victim, mode=mode)) >= least
    )


@PAIR
@pytest.mark.parametrize("victim", [0, 1])
def test_a_remap_that_fails_is_raised_by_the_next_call(ranks: Ranks, victim: int) -> None:
    ranks.run("bodies.handoff_faults:remap_fails", victim=victim)


@CUDA_PAIR
def test_a_remap_waits_for_the_kernel_that_still_runs(ranks: Ranks) -> None:
    """Invariant 5: and without the guard it does not."""
    assert ranks.run("bodies.handoff_guards:remap_waits", guarded=True) == [[True], [True]]
    assert ranks.run("bodies.handoff_guards:remap_waits", guarded=False) == [[False], [False]]


@CUDA_PAIR
def test_nothing_is_taken_or_remapped_during_a_capture(ranks: Ranks) -> None:
    """Invariant 7: and without the guard it is."""
    assert ranks.run("bodies.handoff_guards:during_a_capture", guarded=True) == [[False], [False]]
    assert ranks.run("bodies.handoff_guards:during_a_capture", guarded=False) == [[True], [True]]


@CUDA_PAIR
def test_a_captured_graph_stays_right_through_remaps(ranks: Ranks) -> None:
    """Invariant 7."""
    assert ranks.run("bodies.handoff_guards:through_a_graph", num=1000)[1] == 0


@CUDA_PAIR
@MODES
def test_a_steady_state_never_synchronises(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff_guards:never_synchronises", mode=mode, num=1000)


@HOST_PAIR
def test_remaps_do_without_a_quick_exchange(ranks: Ranks) -> None:
    found = ranks.run("bodies.handoff:without_exchange")
    assert found == [{"wrong": 0, "num": 200, "copied": 0}] * 2


@pytest.mark.ranks(1, launchers=("mpirun",), backends=("cuda",))
@MODES
def test_one_process_hands_over_between_two_gpus(ranks: Ranks, mode: str) -> None:
    ranks.run("bodies.handoff:between_two_devices", mode=mode)
