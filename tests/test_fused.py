"""Calls in one launch, of ranks that have a GPU each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import Ranks
from tpspan.distributed import fused
from tpspan.distributed.fused import (
    LL_NBYTES,
    ODD_GATHER_NBYTES,
    Fused,
    sum_limit_nbytes,
)
from tpspan.errors import PeerError

HERE = pytest.mark.ranks(2, 3, 4, backends=("cuda",), launchers=("mpirun",))


@HERE
def test_every_size(ranks: Ranks) -> None:
    ranks.run("bodies.fused:every_size", deadline_s=600.0)


@HERE
def test_invariant_6_calls_in_any_order(ranks: Ranks) -> None:
    ranks.run("bodies.fused:mixed", num_calls=2000, seed=ranks.size, deadline_s=300.0)


@HERE
def test_planned_calls_right_behind_each_other(ranks: Ranks) -> None:
    ranks.run("bodies.fused:in_flight", num_calls=2000, deadline_s=300.0)


@HERE
def test_captured_calls(ranks: Ranks) -> None:
    ranks.run("bodies.fused:captured", num_replays=1000, deadline_s=300.0)


@HERE
def test_large_calls(ranks: Ranks) -> None:
    ranks.run("bodies.fused:large", deadline_s=600.0)


@HERE
@pytest.mark.parametrize("nbytes", [1024, 1 << 20, 32 << 20])
def test_a_late_rank_is_named(ranks: Ranks, nbytes: int) -> None:
    for victim in range(ranks.size):
        ranks.run("bodies.fused:late", victim=victim, nbytes=nbytes)


noted: list[tuple[Any, ...]] = []


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Fused:
    """Without a GPU: kernels only note what they were called with."""

    def noting(name: str) -> Callable[..., Any]:
        def call(place: Any, *arguments: Any) -> Callable[[int], None]:
            noted.append((name, *arguments))
            return lambda stream: noted.append((f"launch {name}", stream))

        return call

    monkeypatch.setattr(fused, "fused_scatter", noting("fused_scatter"))
    for name in ("ll_gather", "ll_sum", "fused_gather", "fused_sum"):
        monkeypatch.setattr(fused, name, noting(name))
        monkeypatch.setattr(fused, f"plan_{name}", noting(f"plan_{name}"))
    made: Fused = object.__new__(Fused)
    status = torch.zeros(2, dtype=torch.int32)
    vars(made).update(
        _place=SimpleNamespace(rank=1),
        _ll_place=None,
        _world_size=2,
        _ll_nbytes=LL_NBYTES,
        _sum_nbytes=sum_limit_nbytes(2),
        _status=status,
        _status_bytes=memoryview(status.numpy()).cast("B"),  # type: ignore[arg-type]
        _all_well=bytes(8),
    )
    noted.clear()
    return made


def test_the_way_follows_from_what_ranks_have_in_common(played: Fused) -> None:
    for nbytes, way in ((1, "ll"), (LL_NBYTES, "ll"), (LL_NBYTES + 1, "fused")):
        played.gather(1, 2, nbytes, 3)
        assert noted.pop() == (f"{way}_gather", 1, 2, nbytes, 3)
        played.plan_gather(1, 2, nbytes)(3)
        assert noted == [
            (f"plan_{way}_gather", 1, 2, nbytes),
            (f"launch plan_{way}_gather", 3),
        ]
        noted.clear()
    served = (1, ODD_GATHER_NBYTES - 1, ODD_GATHER_NBYTES + 16, 1 << 34)
    assert all(played.serves_gather(nbytes) for nbytes in served)
    refused = (0, ODD_GATHER_NBYTES + 1, (1 << 34) + 1)
    assert not any(played.serves_gather(nbytes) for nbytes in refused)


def test_sums_serve_any_alignment(played: Fused) -> None:
    for numel, way in ((3, "ll"), (LL_NBYTES // 2, "ll"), (LL_NBYTES, "fused")):
        for shift in (0, 1):
            tensor = torch.ones(numel + 8, dtype=torch.bfloat16)[shift : shift + numel]
            address, nbytes = tensor.data_ptr(), 2 * numel
            assert played.serves_sum(nbytes, tensor.dtype)
            played.sum(tensor, 2, 3)
            assert noted.pop() == (f"{way}_sum", "bfloat16", address, address, nbytes, 2, 3)
            played.plan_sum(tensor, 2)(3)
            assert noted.pop() == (f"launch plan_{way}_sum", 3)
            noted.clear()


def test_which_sums_are_served(played: Fused) -> None:
    most = sum_limit_nbytes(2)
    assert most > sum_limit_nbytes(3) == sum_limit_nbytes(8) > sum_limit_nbytes(9) == 0
    for nbytes, is_served in ((0, 0), (2, 1), (LL_NBYTES, 1), (LL_NBYTES + 2, 0), (most, 1)):
        assert played.serves_sum(nbytes, torch.float16) == bool(is_served)
        assert not played.serves_sum(nbytes, torch.float64)
    assert not played.serves_sum(most + 16, torch.float16)


def test_parts_are_added_up_and_gathered(played: Fused) -> None:
    tensor = torch.ones(LL_NBYTES, dtype=torch.float32)
    assert played.serves_sum_in_parts(tensor.nbytes, tensor.dtype)
    played.sum_in_parts(tensor, 2, 3)
    address, half = tensor.data_ptr(), tensor.nbytes // 2
    assert noted == [
        ("fused_scatter", "float32", address + half, address, half, 2, 3),
        ("fused_gather", address, address + half, half, 3),
    ]
    assert not played.serves_sum_in_parts(tensor.nbytes + 16, tensor.dtype), "parts are vectors"
    assert not played.serves_sum_in_parts(tensor.nbytes, torch.float64)
    assert not played.serves_scatter(0, torch.float32)


def test_a_plan_looks_for_late_ranks(played: Fused) -> None:
    plan = played.plan_gather(1, 2, 3)
    played._status[1] = 1
    for call in (lambda: plan(0), lambda: played.gather(1, 2, 3, 0)):
        with pytest.raises(PeerError, match="rank 1"):
            call()
