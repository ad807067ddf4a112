"""Collective calls that once went wrong: stale values, silent mixtures, waits without an end."""

from __future__ import annotations

import pytest

from harness import Ranks

HERE = pytest.mark.ranks(1, 2, 3, backends=("host",), launchers=("mpirun",))
TOGETHER = pytest.mark.ranks(2, 3, backends=("host",), launchers=("mpirun",))
ENGINES = pytest.mark.parametrize("engine", ["host", "cuda"])


@HERE
def test_a_forked_child_is_no_rank(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:forked")


@TOGETHER
@ENGINES
def test_gathers_in_different_spans_differ(ranks: Ranks, engine: str) -> None:
    """Invariant 3."""
    ranks.run("bodies.distributed_defects:other_span", engine=engine)


@HERE
def test_callbacks_make_calls(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:callbacks")


@HERE
def test_a_callback_that_waits(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.distributed_defects:callback_that_waits")


@HERE
def test_copies_are_made_in_order(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:copies_in_order")


@TOGETHER
def test_a_rank_that_refuses_sees_its_own_error(ranks: Ranks) -> None:
    """Invariant 4."""
    ranks.run("bodies.distributed_defects:refused_by_one")


@TOGETHER
def test_a_refusal_that_nobody_answers(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.distributed_defects:left_by_a_peer")


@HERE
def test_what_every_rank_refuses(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:every_rank_refuses")


@HERE
def test_odd_tensors_that_torch_serves(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:served")


@HERE
@ENGINES
def test_an_input_that_overlaps_the_output(ranks: Ranks, engine: str) -> None:
    ranks.run("bodies.distributed_defects:overlapping", engine=engine)


@HERE
def test_lists_of_tensors(ranks: Ranks) -> None:
    ranks.run("bodies.distributed_defects:lists_of_tensors", leaks=False)
