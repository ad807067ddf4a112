"""The process group: whole programs of torch on it; and gathers between domains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import Ranks
from tpspan.distributed.domains import Routes


# What is built on the group is the same under every launcher, and takes long.
@pytest.mark.ranks(1, 2, 4, launchers=("mpirun",))
def test_programs_of_torch_run_unmodified(ranks: Ranks, tmp_path: Path) -> None:
    run_programs(ranks, "tpspan", tmp_path)


@pytest.mark.ranks(1, 2, launchers=("torchrun",))
def test_programs_of_torch_with_a_backend_for_each_device(ranks: Ranks, tmp_path: Path) -> None:
    run_programs(ranks, "cpu:tpspan,cuda:tpspan", tmp_path)


def run_programs(ranks: Ranks, backend: str, folder: Path) -> None:
    has_nccl = ranks.backend == "cuda" and torch.cuda.device_count() >= ranks.size
    reference = "nccl" if has_nccl else "gloo"
    ranks.run(
        "bodies.process_groups:programs",
        folder=str(folder),
        backend=backend,
        reference=reference,
        leaks=False,  # torch keeps what its own groups and meshes have made
    )


@pytest.mark.ranks(2, 3, launchers=("mpirun",), backends=("host",))
def test_functions_take_groups_of_torch(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:functions_over_torch_groups", leaks=False)


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("host",))
def test_destroyed_groups_are_given_back(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:destroyed", leaks=False)


@pytest.mark.ranks(2, 3, launchers=("mpirun",), backends=("host",))
@pytest.mark.parametrize("backend", ["tpspan", "gloo"])
def test_a_destroyed_group_is_gone_at_once(ranks: Ranks, backend: str) -> None:
    """Invariant 10: nothing is left to the garbage collector."""
    ranks.run("bodies.process_groups:gone_at_once", backend=backend, leaks=False)


@pytest.mark.ranks(2, launchers=("mpirun",))
@pytest.mark.parametrize("backend", ["tpspan", "gloo"])
def test_compiled_programs(ranks: Ranks, backend: str) -> None:
    ranks.run("bodies.process_groups:compiled", backend=backend, leaks=False)


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_gloo_by_way_of_host_memory(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:through_host_memory", leaks=False)


@pytest.mark.ranks(2, 3, 4, launchers=("mpirun",))
def test_subgroups(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:subgroups", backend="tpspan", leaks=False)


@pytest.mark.ranks(1, 2, 3, launchers=("mpirun",))
def test_many_calls_as_one(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:coalesced", backend="tpspan", leaks=False)


@pytest.mark.ranks(2, 3, 4, launchers=("mpirun",))
def test_gathers_between_domains_and_the_rest_is_delegated(ranks: Ranks) -> None:
    ranks.run("bodies.process_groups:between_domains", leaks=False)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_each_remote_byte_enters_a_domain_once(sizes: list[int], dice: object) -> None:
    ranks = list(range(sum(sizes)))
    dice.shuffle(ranks)  # type: ignore[attr-defined]
    domains = []
    for size in sizes:
        domains.append(tuple(sorted(ranks[:size])))
        ranks = ranks[size:]
    routes = Routes(tuple(sorted(domains)))
    everyone = range(sum(sizes))
    for domain in routes.domains:
        received = sorted(r for mate in domain for r in routes.received_by(mate))
        assert received == routes.remote(domain)
        shares = [len(routes.received_by(mate)) for mate in domain]
        assert max(shares) - min(shares) <= 1
    for rank in everyone:
        targets = routes.targets_of(rank)
        assert len(targets) == len(routes.domains) - 1
        assert all(rank in routes.received_by(target) for target in targets)
