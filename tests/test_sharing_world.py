"""Worlds of ranks that publish and attach as one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import Ranks
from sharing_processes import own_keeper


@pytest.fixture
def keeper() -> Iterator[str]:
    with own_keeper() as directory:
        yield directory


@pytest.mark.ranks(1, 2, 3, launchers=("mpirun",))
def test_a_world_publishes_one_span(ranks: Ranks, keeper: str) -> None:
    ranks.run("bodies.sharing_world:one_span", directory=keeper, layout="blocked")


@pytest.mark.ranks(3, launchers=("mpirun",))
def test_a_world_publishes_one_striped_span(ranks: Ranks, keeper: str) -> None:
    ranks.run("bodies.sharing_world:one_span", directory=keeper, layout="striped")


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_a_shared_module_is_published_from_where_it_lies(ranks: Ranks, keeper: str) -> None:
    ranks.run("bodies.sharing_world:shared_parameters", directory=keeper)


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_what_is_refused_is_refused_on_all_ranks(ranks: Ranks, keeper: str) -> None:
    ranks.run("bodies.sharing_world:taken", directory=keeper)


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_a_rank_that_fails_leaves_alone(ranks: Ranks, keeper: str) -> None:
    ranks.run("bodies.sharing_world:leaving_alone", directory=keeper)
