"""tpspan.distributed: names, semantics and errors of torch.distributed, over spans."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed
from torch.distributed import ReduceOp

import tpspan.distributed as dist
from harness import Ranks
from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Operation, Reduction, describe, reduction_of, words

OWN = {
    *("Stats", "SpanProcessGroup", "register", "stats"),
    *("SpanAllGather", "SpanReduceScatter", "use_spans"),
}
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
)


@pytest.mark.ranks(1, 2, 3, 4, launchers=("mpirun",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_call_of_every_dtype(ranks: Ranks, dtype: str) -> None:
    ranks.run("bodies.distributed:every_call", dtype=dtype)


@pytest.mark.ranks(2, 4, launchers=("torchrun",))
def test_every_call_under_torchrun(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:every_call", dtype="bfloat16")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_every_call_without_waiting(ranks: Ranks, dtype: str) -> None:
    ranks.run("bodies.distributed:every_call", dtype=dtype, async_op=True)


@pytest.mark.ranks()
def test_reductions(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:every_reduction")


@pytest.mark.ranks()
def test_odd_tensors(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:odd_tensors")


@pytest.mark.ranks()
def test_gathered_in_place(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:gathered_in_place")


@pytest.mark.ranks()
def test_wrong_arguments_raise_as_torch_does(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:refused")


@pytest.mark.ranks(2, 3, backends=("host",))
def test_different_requests_raise_everywhere(ranks: Ranks) -> None:
    """Invariants 3 and 4."""
    ranks.run("bodies.distributed:mismatched")


@pytest.mark.ranks(2, 3, backends=("host",))
def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    """Invariant 9."""
    ranks.run("bodies.distributed:left_alone")


@pytest.mark.ranks(2, 4)
def test_a_writer_waits_for_a_slow_reader(ranks: Ranks) -> None:
    """Invariant 6; and the test sees it if the guard is taken out."""
    assert all(all(right) for right in ranks.run("bodies.distributed:write_after_read"))
    unguarded = ranks.run("bodies.distributed:write_after_read", guarded=False)
    assert not all(unguarded[0]), "rank 0, the slow reader, must have seen overwritten bytes"


@pytest.mark.ranks()
def test_calls_happen_in_order(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:in_order")


@pytest.mark.ranks(2, 4)
def test_random_calls(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:random_calls", num_calls=300, seed=ranks.size)


@pytest.mark.slow
@pytest.mark.ranks(2, 3, 4, launchers=("mpirun",))
def test_very_many_random_calls(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:random_calls", num_calls=100_000, seed=1, deadline_s=900.0)


@pytest.mark.ranks(2, 4, backends=("cuda",))
def test_captured_calls(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:replayed", num_replays=1000)


@pytest.mark.ranks(1, 3, backends=("host",))
def test_a_journal_finds_differences_without_waiting(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:journal_finds")


@pytest.mark.ranks(2)
def test_codes_agree(ranks: Ranks) -> None:
    ranks.run("bodies.distributed:words_agree")


@pytest.mark.parametrize("name", sorted(set(dist.__all__) - OWN))
def test_signatures_are_torchs(name: str) -> None:
    if not hasattr(torch.distributed, name):
        pytest.skip(f"torch.distributed has no {name}: it is a name of newer releases")
    theirs = inspect.signature(getattr(torch.distributed, name)).parameters
    ours = inspect.signature(getattr(dist, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    newer = list(ours.values())[len(theirs) :]  # arguments that this release of torch has not
    assert all(parameter.default is not parameter.empty for parameter in newer)


def test_everything_else_is_torchs_own() -> None:
    assert dist.ReduceOp is ReduceOp
    assert dist.init_process_group is torch.distributed.init_process_group
    with pytest.raises(AttributeError):
        dist.no_such_name  # noqa: B018


def test_operations_are_recognised_after_torchs_options() -> None:
    options = torch.distributed.AllreduceOptions()
    for reduction in list(Reduction)[1:]:
        op = getattr(ReduceOp, reduction.name)
        options.reduceOp = op
        assert reduction_of(op) is reduction
        assert reduction_of(options.reduceOp) is reduction
    assert reduction_of(None) is None


def test_requests_in_words() -> None:
    request = words(Operation.ALL_REDUCE, torch.bfloat16, 12, reduction=int(Reduction.SUM))
    assert describe(request) == "all_reduce of 12 bytes of torch.bfloat16 by SUM"
    assert describe(words(Operation.BARRIER)) == "barrier"
    broadcast = words(Operation.BROADCAST, torch.int8, 3, root=2)
    assert describe(broadcast) == "broadcast of 3 bytes of torch.int8 from rank 2"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.PRODUCT, Reduction.MAX])
def test_combining_rounds_once(dtype: torch.dtype, reduction: Reduction) -> None:
    sources = [torch.tensor([1.0, 0.0, 2.0]).to(dtype) for _ in range(3)]
    target = torch.empty(3, dtype=dtype)
    combine(target, sources, reduction)
    expected = {
        Reduction.SUM: [3.0, 0.0, 6.0],
        Reduction.PRODUCT: [1.0, 0.0, 8.0],
        Reduction.MAX: [1.0, 0.0, 2.0],
    }[reduction]
    assert target.float().tolist() == torch.tensor(expected).to(dtype).float().tolist()
