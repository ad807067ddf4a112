"""Remaps, swaps and rights: what lies behind an offset changes on all ranks or on none."""

from __future__ import annotations

import pytest

from harness import Ranks


@pytest.mark.ranks()
@pytest.mark.parametrize("body", ["swapped", "turned", "blocked_remap"])
def test_data_follow_the_blocks(ranks: Ranks, body: str) -> None:
    """Invariant 2: the table stays the same on all ranks; rights stay with the offset."""
    ranks.run(f"bodies.remap:{body}")


@pytest.mark.ranks()
def test_a_new_block_comes_in_and_the_old_goes_out(ranks: Ranks) -> None:
    ranks.run("bodies.remap:replaced", owner=ranks.size - 1)
    ranks.run("bodies.remap:replaced_at_once", owner=ranks.size - 1)


@pytest.mark.ranks()
def test_misuse_is_refused(ranks: Ranks) -> None:
    """Invariant 1: one block at one offset, whole, and of this span."""
    ranks.run("bodies.remap:misused")


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_disagree_change_nothing(ranks: Ranks) -> None:
    """Invariant 3."""
    ranks.run("bodies.remap:disagreed")


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_no_rank_unmaps_before_every_rank_has_waited(ranks: Ranks) -> None:
    """Invariant 5."""
    ranks.run("bodies.remap:fenced", slow=ranks.size - 1)


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_a_fence_that_is_late_on_one_rank_fails_all(ranks: Ranks) -> None:
    """Invariants 4 and 5."""
    ranks.run("bodies.remap:late_fence", slow=ranks.size - 1)


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_a_block_is_free_when_the_slowest_reader_has_unmapped_it(ranks: Ranks) -> None:
    """Invariant 6."""
    ranks.run("bodies.remap:slow_reader", slow=ranks.size - 1)


@pytest.mark.ranks(1, 3, launchers=("mpirun",), backends=("host",))
def test_a_read_only_mapping_cannot_be_written(ranks: Ranks) -> None:
    """Invariant 12."""
    ranks.run("bodies.remap:read_only")
