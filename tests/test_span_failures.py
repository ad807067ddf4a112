"""A collective call that fails on one rank fails on all and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from harness import Ranks

# Which launcher started the ranks makes no difference to a driver call.
ONE_LAUNCHER = pytest.mark.ranks(1, 3, launchers=("mpirun",))


@ONE_LAUNCHER
@pytest.mark.parametrize("layout", ["blocked", "striped"])
def test_allocate_with_every_driver_call_failing(ranks: Ranks, layout: str) -> None:
    """Invariant 4: prepare, vote, commit; on a failure all is undone on all ranks."""
    victim = ranks.size - 1
    counts = ranks.run("bodies.failures:allocate", victim=victim, layout=layout)
    assert counts[0] >= 4 + 2 * (ranks.size - 1), "create, reserve, map, protect; export, import"


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_first_use_with_every_driver_call_failing(ranks: Ranks) -> None:
    """Invariant 4: nobody waits for the deadline, and the next call makes what is missing."""
    assert ranks.run("bodies.failures:first_use", victim=ranks.size - 1)[0] >= 4


@ONE_LAUNCHER
def test_new_block_with_every_driver_call_failing(ranks: Ranks) -> None:
    """Invariant 4, at the rank that brings the block and at one that imports it."""
    assert ranks.run("bodies.failures:new_block", victim=ranks.size - 1)[0] >= 1
    if ranks.size > 1:
        assert ranks.run("bodies.failures:new_block", victim=0)[0] == 1


@ONE_LAUNCHER
@pytest.mark.parametrize("view", [False, True], ids=["gathered", "gathered and local"])
@pytest.mark.parametrize("operation", ["remap", "remap at once", "swap", "remap_many"])
def test_remaps_with_every_driver_call_failing(ranks: Ranks, operation: str, view: bool) -> None:
    """Invariant 4: the old mapping and its data stay."""
    num_failed = ranks.run(
        "bodies.failures:remap", victim=ranks.size - 1, operation=operation, view=view
    )[0]
    assert num_failed >= _least_calls(ranks, operation)


@ONE_LAUNCHER
@pytest.mark.parametrize("view", [False, True], ids=["gathered", "gathered and local"])
@pytest.mark.parametrize("operation", ["remap", "remap at once", "swap"])
def test_a_mapping_is_lost_when_even_the_undo_fails(
    ranks: Ranks, operation: str, view: bool
) -> None:
    """Never silent, never half: that rank says so from then on, and the others name it."""
    num_failed = ranks.run(
        "bodies.failures:lost_mapping", victim=0, operation=operation, view=view
    )[0]
    assert num_failed >= _least_calls(ranks, operation) * (1 + view), "of the local view as well"


def _least_calls(ranks: Ranks, operation: str) -> int:
    """Of a driver, to change one mapping."""
    if operation in ("remap", "remap at once"):
        return 1 if ranks.config.backend == "cuda" else 4  # all in one; that, then each of three
    return 3  # unmap, map, protect


@ONE_LAUNCHER
def test_close_with_every_driver_call_failing(ranks: Ranks) -> None:
    """Invariants 4 and 6: all are told; a block that is still mapped somewhere is not reused."""
    assert ranks.run("bodies.failures:close", victim=ranks.size - 1)[0] >= 3


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_the_first_call_has_the_deadline_that_it_was_given(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.failures:first_deadline")


@pytest.mark.ranks(2, backends=("host",))
def test_a_forked_child_closes_nothing_of_its_parent(ranks: Ranks) -> None:
    ranks.run("bodies.failures:forked_close")


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_ranks_that_ask_for_different_things(ranks: Ranks) -> None:
    """Invariant 3: all ranks raise, all see what each asked for, nothing was done."""
    ranks.run("bodies.failures:mismatch")


@pytest.mark.ranks(1, 2, 4, launchers=("mpirun",), backends=("host",))
def test_out_of_memory_on_one_rank(ranks: Ranks) -> None:
    """Invariant 4."""
    ranks.run("bodies.failures:out_of_memory", victim=ranks.size - 1)


@pytest.mark.ranks(3, launchers=("mpirun",), backends=("host",))
@pytest.mark.parametrize(("victim", "room"), [(0, 0), (0, 2), (1, 1)])
def test_no_descriptor_is_left_for_the_sockets(ranks: Ranks, victim: int, room: int) -> None:
    """Said before any rank waits for a connection, and the folder of the sockets goes."""
    outcome = ranks.fresh("bodies.failures:no_sockets", victim=victim, room=room)
    assert [r.error for r in outcome.reports if r] == [None] * 3
    assert outcome.values[victim] == "socket EMFILE"


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_a_full_table_of_descriptors_on_one_rank(ranks: Ranks) -> None:
    """Wherever the last descriptor goes: own blocks, exports, a message, imports."""

    def said(own: int, others: int, room: int) -> str:
        body = "bodies.failures:full_table"
        counts: dict[str, Any] = {"num_blocks": own, "num_others": others, "room": room}
        return str(ranks.run(body, victim=ranks.size - 1, **counts)[-1])

    first, export, message, last = (
        said(70, 70, 0),
        said(70, 70, 100),
        said(2, 70, 40),
        said(70, 70, 70 + 64 + 64),
    )
    if ranks.backend == "host":
        assert (first, export, message, last) == ("memfd_create", "dup", "recvmsg", "dup")
    assert said(70, 70, 70 * ranks.size + 64 + 64) == ""


@pytest.mark.ranks(2, 3)
def test_invariant_4_a_call_that_is_left_by_an_interrupted_rank(ranks: Ranks) -> None:
    ranks.run("bodies.failures:interrupted")


@pytest.mark.ranks(2, 3, backends=("host",))
def test_a_barrier_that_is_left_by_an_interrupted_rank(ranks: Ranks) -> None:
    ranks.run("bodies.failures:interrupted_barrier")


@pytest.mark.ranks(2, backends=("host",))
def test_a_world_that_is_closed_in_the_middle_of_a_call(ranks: Ranks) -> None:
    ranks.run("bodies.failures:closed_by_a_handler")


@pytest.mark.ranks(2, 3)
def test_invariant_3_a_rank_that_is_at_another_step(ranks: Ranks) -> None:
    ranks.run("bodies.failures:out_of_step")
