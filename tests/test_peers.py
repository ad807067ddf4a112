"""Ranks that do not come, ranks that die, and sizes that ordinary use does not reach."""

from __future__ import annotations

import pytest

from harness import Ranks

GIB = 1 << 30


@pytest.mark.ranks(3, launchers=("mpirun",))
@pytest.mark.parametrize("operation", ["allocate", "remap", "new_block", "close", "barrier"])
def test_a_rank_that_never_calls_is_named_at_the_deadline(ranks: Ranks, operation: str) -> None:
    """Invariant 9."""
    if ranks.backend == "cuda" and operation == "barrier":
        pytest.skip("a barrier on a stream has its own test: the host does not wait there")
    ranks.run("bodies.peers:absent", victim=1, operation=operation)
    assert all(ranks.run("bodies.peers:agree_after"))


@pytest.mark.ranks(2, launchers=("torchrun",))
def test_a_deadline_for_one_call(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.peers:short_timeout", victim=0)


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_a_rank_that_comes_late_does_not_go_on_alone(ranks: Ranks) -> None:
    """Invariant 4: a call fails on all ranks or on none."""
    ranks.run("bodies.peers:late")


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("host",))
def test_a_forked_child_is_not_a_rank(ranks: Ranks) -> None:
    ranks.run("bodies.peers:forked")


@pytest.mark.ranks(3)
def test_a_killed_rank_is_known_soon_and_its_shard_stays(ranks: Ranks) -> None:
    """Invariants 9 and 11: its memory outlives it."""
    outcome = ranks.fresh("bodies.peers:killed", victim=1)
    assert outcome.died == (1,), outcome.output
    for rank in (0, 2):
        report = outcome.reports[rank]
        assert report is not None
        assert report.error is None, report.error
        assert report.value["known_s"] < 5
        assert report.value["barrier_s"] < 10


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_a_thousand_blocks_a_rank(ranks: Ranks) -> None:
    """On CUDA a block takes no descriptor once it is exchanged, on the host one on each rank."""
    limit = 256 if ranks.backend == "cuda" else 4096
    ranks.run("bodies.peers:many_blocks", num_blocks=1000, limit=limit)


@pytest.mark.ranks(1, 2, launchers=("mpirun",), backends=("host",))
def test_300_gib_of_addresses(ranks: Ranks) -> None:
    ranks.run("bodies.peers:huge", nbytes=300 * GIB + 12345)
