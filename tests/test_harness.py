"""The harness itself: what it must report, and that it goes on afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness import LeakError, RankFailure, Ranks

# Nothing here differs from launcher to launcher, except how ranks come and go.
PAIR = pytest.mark.ranks(2, launchers=("mpirun",), backends=("host",))


@pytest.mark.ranks()
def test_values_come_in_order_from_one_process_per_rank(ranks: Ranks) -> None:
    values = ranks.run("bodies.selfcheck:identify", greeting="hello")
    expected = [("hello", rank, ranks.size, ranks.backend) for rank in range(ranks.size)]
    assert [value[:4] for value in values] == expected
    pids = {value[4] for value in values}
    assert len(pids) == ranks.size
    again = ranks.run("bodies.selfcheck:identify", greeting="again")
    assert {value[4] for value in again} == pids, "the group lives on between bodies"


@PAIR
def test_an_exception_is_reported_with_rank_and_traceback(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"(?s)--- rank 1 ---.*raise_on.*on purpose on rank 1"):
        ranks.run("bodies.selfcheck:raise_on", rank=1)
    assert len(ranks.run("bodies.selfcheck:identify", greeting="after")) == 2


@PAIR
def test_peers_of_a_failed_rank_are_not_waited_for_until_the_deadline(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 0 did not answer.*on purpose on rank 1"):
        ranks.run("bodies.selfcheck:wait_for_failed_peer", rank=1, deadline_s=50, grace_s=2)
    assert time.monotonic() - start < 40


@PAIR
def test_a_hang_is_killed_and_shows_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 did not answer.*hang_on"):
        ranks.run("bodies.selfcheck:hang_on", rank=0, deadline_s=1)
    assert len(ranks.run("bodies.selfcheck:identify", greeting="after")) == 2


@PAIR
def test_a_death_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="rank 1 died"):
        ranks.run("bodies.selfcheck:die_on", rank=1)
    assert len(ranks.run("bodies.selfcheck:identify", greeting="after")) == 2


@PAIR
@pytest.mark.parametrize(
    ("body", "kwargs", "named"),
    [
        ("leak_descriptor", {}, "rank 0, descriptors of"),
        ("leak_memfd_mapping", {"rank": 1}, "rank 1, bytes of mapped memfds"),
        ("leak_thread", {}, "threads named leaked"),
        ("leak_socket_file", {}, "socket files"),
        ("warn_of_resource", {}, "ResourceWarning: a span was not closed"),
        ("fail_in_finalizer", {}, "raised in a finalizer"),
    ],
)
def test_what_is_left_behind_is_named(
    ranks: Ranks, body: str, kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(LeakError, match=named):
        ranks.run(f"bodies.selfcheck:{body}", **kwargs)


@PAIR
def test_a_first_use_is_no_leak(ranks: Ranks) -> None:
    ranks.run("bodies.selfcheck:keep_once")


@PAIR
def test_what_a_body_may_leave_is_no_leak_of_the_next(ranks: Ranks) -> None:
    ranks.run("bodies.selfcheck:leak_descriptor", leaks=False)
    ranks.run("bodies.selfcheck:identify", greeting="hello")
    ranks.run("bodies.selfcheck:leak_descriptor", leaks=False)
    with pytest.raises(LeakError, match="threads named leaked"):
        ranks.run("bodies.selfcheck:leak_thread")


@PAIR
def test_a_value_that_cannot_travel_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        ranks.run("bodies.selfcheck:return_lambda")


@PAIR
def test_a_body_can_skip(ranks: Ranks) -> None:
    with pytest.raises(pytest.skip.Exception, match="asked to"):
        ranks.run("bodies.selfcheck:skip")


@pytest.mark.ranks(3, backends=("host",))
def test_survivors_go_on_in_a_group_of_their_own(ranks: Ranks) -> None:
    outcome = ranks.fresh("bodies.selfcheck:die_on", rank=1, then_wait_s=1.0)
    assert outcome.died == (1,)
    assert outcome.hung == ()
    assert outcome.values == [0, None, 2]


@pytest.mark.ranks(2, backends=("host",))
def test_without_survivors_the_launcher_ends_the_job(ranks: Ranks) -> None:
    outcome = ranks.fresh("bodies.selfcheck:die_on", rank=1, then_wait_s=60.0, survive=False)
    assert outcome.died == (0, 1), outcome.output
    assert outcome.returncode not in (None, 0), outcome.output
    assert outcome.ended_after_s is not None
    assert outcome.ended_after_s < 30
