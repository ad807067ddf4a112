"""Kernels that meet, with the streams of one GPU as ranks: small enough to run at the same time."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_cases import prepared_gpu
from tpspan.errors import DriverError
from tpspan.kernels import stream_fused
from tpspan.kernels.compile import kernel, prepare
from tpspan.kernels.stream_fused import (
    FUSED_COUNTS,
    FUSED_KERNELS,
    FusedPlace,
    fused_gather,
    fused_region_nbytes,
    fused_scatter,
    fused_sum,
)
from tpspan.kernels.stream_ll import (
    LL_BLOCKS,
    LL_CAPACITY_NBYTES,
    LL_KERNELS,
    LLPlace,
    ll_gather,
    ll_region_nbytes,
    ll_sum,
    plan_ll_gather,
    plan_ll_sum,
)

SECONDS_NS = 3 * 10**9
LARGE_NBYTES = 9 << 20  # several rounds
BOARD_NBYTES = 1 << 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Ranks:
    """Places of ranks that are streams, and memory that they share."""

    def __init__(self, size: int, start: int = 0) -> None:
        def zeros(nbytes: int) -> torch.Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

        self.size = size
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.words = zeros(size * ll_region_nbytes(size))
        self.staging = zeros(size * fused_region_nbytes())
        self.board = zeros(size * BOARD_NBYTES)
        self.board.view(torch.int32).fill_(start)
        shape = size, LL_BLOCKS + FUSED_COUNTS
        self.epochs = torch.full(shape, start, dtype=torch.int32, device="cuda")
        self.epochs[:, LL_BLOCKS + 1 :: 2] = 0  # the marks of blocks that have given up
        self.status = torch.zeros(size, size, dtype=torch.int32).pin_memory()

    def ll(self, rank: int) -> LLPlace:
        region, counts = ll_region_nbytes(self.size), self.epochs[rank, :LL_BLOCKS].data_ptr()
        ends = (self.status[rank].data_ptr(), SECONDS_NS, 0)
        return LLPlace(self.words.data_ptr(), region, rank, self.size, counts, *ends)

    def fused(self, rank: int) -> FusedPlace:
        return FusedPlace(
            self.staging.data_ptr(),
            fused_region_nbytes(),
            self.board.data_ptr(),
            BOARD_NBYTES,
            rank,
            self.size,
            self.epochs[rank, LL_BLOCKS:].data_ptr(),
            self.status[rank].data_ptr(),
            SECONDS_NS,
            0,
        )


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that all blocks of four ranks have a place to run at the same time."""
    monkeypatch.setattr(stream_fused, "FUSED_PAIRS", 16)


@pytest.fixture(scope="module")
def gpu() -> int:
    """Every kernel has run once: one that is loaded while another waits would wait for that."""
    index = prepared_gpu()
    prepare(index, (*FUSED_KERNELS, *LL_KERNELS))
    alone = Ranks(1)
    x = torch.ones(64, device="cuda")
    y = torch.empty_like(x)
    both, stream = (y.data_ptr(), x.data_ptr()), torch.cuda.current_stream().cuda_stream
    ll_gather(alone.ll(0), *both, 256, stream)
    fused_gather(alone.fused(0), *both, 256, stream)
    for name in DTYPES:
        ll_sum(alone.ll(0), name, *both, 256, 1, stream)
        for reduce in (fused_sum, fused_scatter):
            reduce(alone.fused(0), name, *both, 256, 1, stream)
            torch.cuda.synchronize()
            assert y.equal(x)
    return index


def buffer(nbytes: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8, device="cuda")
    return whole, whole[16 + shift : 16 + shift + nbytes]


def is_clean(whole: torch.Tensor, inner: torch.Tensor) -> bool:
    begin = inner.data_ptr() - whole.data_ptr()
    rest = torch.cat([whole[:begin], whole[begin + inner.numel() :]])
    return bool((rest == 0xA5).all())


# More ranks at sizes that leave every block of all of them a place to run: blocks are started in
# order, and one waits for those of its own number only, so of the last rank a few will do.
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("size", "limit"), [(2, LL_CAPACITY_NBYTES), (3, 64 << 10), (4, 32 << 10), (8, 2048)]
)
@pytest.mark.parametrize("start", [0, (1 << 30) - 40, -40])
def test_gathers_and_sums_of_any_size(gpu: int, size: int, limit: int, start: int) -> None:
    ranks, dice = Ranks(size, start), random.Random(size)
    limits = [0, 1, 7, 8, 9, 255, 256, 257, 1000, 1024, limit // 2 + 1, limit - 1, limit]
    for turn in range(100):
        nbytes = limits[turn] if turn < len(limits) else dice.randint(0, limit)
        shifts = [(dice.randrange(16), dice.randrange(16)) for _ in range(size)]
        by_words = dice.random() < 0.6 or size > 4
        if not by_words and dice.random() < 0.5:
            nbytes = dice.choice([(1 << 20) + 16, (2 << 20) - 16, LARGE_NBYTES - 5, LARGE_NBYTES])
        given = [torch.randint(256, (nbytes,), dtype=torch.uint8).cuda() for _ in range(size)]
        outs = [buffer(size * nbytes, shift[0] * (turn % 2)) for shift in shifts]
        sources = [buffer(nbytes, shift[1] * (turn % 2))[1] for shift in shifts]
        for rank in range(size):
            if dice.random() < 0.5:
                sources[rank] = outs[rank][1][rank * nbytes :][:nbytes]
            sources[rank].copy_(given[rank])
        torch.cuda.synchronize()
        for rank in dice.sample(range(size), size):
            pair = (outs[rank][1].data_ptr(), sources[rank].data_ptr())
            stream = ranks.streams[rank].cuda_stream
            if by_words:
                ll_gather(ranks.ll(rank), *pair, nbytes, stream)
            else:
                fused_gather(ranks.fused(rank), *pair, nbytes, stream)
        torch.cuda.synchronize()
        assert not ranks.status.any(), (turn, ranks.status)
        for whole, out in outs:
            assert out.equal(torch.cat(given)), (turn, nbytes, by_words)
            assert is_clean(whole, out)

        name = dice.choice(list(DTYPES))
        dtype, divisor = DTYPES[name], dice.choice([1, size])
        unit = dtype.itemsize if by_words else 16
        nbytes = nbytes // unit * unit
        numbers = [torch.randn(nbytes // dtype.itemsize).to(dtype).cuda() for _ in range(size)]
        outs = [buffer(nbytes, unit * dice.randrange(16 // unit)) for _ in range(size)]
        tensors = [out.view(dtype) for _, out in outs]
        for tensor, number in zip(tensors, numbers, strict=True):
            tensor.copy_(number)
        torch.cuda.synchronize()
        for rank in dice.sample(range(size), size):
            address, stream = tensors[rank].data_ptr(), ranks.streams[rank].cuda_stream
            if by_words:
                ll_sum(ranks.ll(rank), name, address, address, nbytes, divisor, stream)
            else:
                fused_sum(ranks.fused(rank), name, address, address, nbytes, divisor, stream)
        torch.cuda.synchronize()
        assert not ranks.status.any(), (turn, ranks.status)
        total = numbers[0].float()
        for more in numbers[1:]:
            total = total + more.float()
        expected = (total / torch.full_like(total, divisor)).to(dtype)
        for (whole, out), tensor in zip(outs, tensors, strict=True):
            assert tensor.equal(expected), (turn, name, nbytes, divisor, by_words)
            assert is_clean(whole, out)
        if by_words:
            continue

        part = nbytes // size // 16 * 16 // dtype.itemsize
        for tensor, number in zip(tensors, numbers, strict=True):
            tensor.copy_(number)
        parts = [
            tensor[rank * part : (rank + 1) * part]
            if dice.random() < 0.5
            else torch.empty(part, dtype=dtype, device="cuda")
            for rank, tensor in enumerate(tensors)
        ]
        torch.cuda.synchronize()
        for rank in dice.sample(range(size), size):
            pair = (parts[rank].data_ptr(), tensors[rank].data_ptr())
            stream = ranks.streams[rank].cuda_stream
            amount = part * dtype.itemsize
            fused_scatter(ranks.fused(rank), name, *pair, amount, divisor, stream)
        torch.cuda.synchronize()
        assert not ranks.status.any(), (turn, ranks.status)
        for rank, result in enumerate(parts):
            wanted = expected[rank * part : (rank + 1) * part]
            assert result.equal(wanted), (turn, name, part, divisor, rank)
        for whole, out in outs:
            assert is_clean(whole, out)


@pytest.mark.cuda
@pytest.mark.parametrize("nbytes", [16, 8192, LL_CAPACITY_NBYTES])
def test_planned_calls_right_behind_each_other(gpu: int, nbytes: int) -> None:
    """Nothing but the words themselves holds a fast rank back; invariant 6."""
    size, num_calls = 2, 1000
    ranks = Ranks(size)
    own = [torch.full((nbytes // 4,), float(rank), device="cuda") for rank in range(size)]
    outs = [torch.zeros(size, nbytes // 4, device="cuda") for _ in range(size)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(size)]
    expected = [torch.arange(size, device="cuda").view(-1, 1) for _ in range(size)]
    plans = []
    for rank, (x, out) in enumerate(zip(own, outs, strict=True)):
        address, place = x.data_ptr(), ranks.ll(rank)
        gathers = plan_ll_gather(place, out.data_ptr(), address, nbytes)
        plans.append((gathers, plan_ll_sum(place, "float32", address, address, nbytes, size)))
    torch.cuda.synchronize()
    # Torch's own kernels are loaded, which would wait for one that spins, and its memory is there.
    for rank in range(size):
        with torch.cuda.stream(ranks.streams[rank]):
            own[rank].fill_(rank + 1)
            wrong[rank] += (outs[rank] - 1 != expected[rank]).sum()
            wrong[rank] += (own[rank] - 1 != 0.5).sum()
    torch.cuda.synchronize()
    for each in wrong:
        each.zero_()
    torch.cuda.synchronize()
    for turn in range(num_calls):
        for rank in range(size):
            gathers, mean = plans[rank]
            with torch.cuda.stream(ranks.streams[rank]):
                stream = ranks.streams[rank].cuda_stream
                own[rank].fill_(rank + turn)
                gathers(stream)
                wrong[rank] += (outs[rank] - turn != expected[rank]).sum()
                mean(stream)
                wrong[rank] += (own[rank] - turn != 0.5).sum()
    torch.cuda.synchronize()
    assert not ranks.status.any()
    assert [int(each) for each in wrong] == [0] * size


@pytest.mark.cuda
def test_invariant_9_a_rank_that_does_not_come_is_noted(gpu: int) -> None:
    ranks = Ranks(2)
    x, out = torch.ones(100, device="cuda"), torch.zeros(200, device="cuda")
    ll_gather(ranks.ll(0), out.data_ptr(), x.data_ptr(), 400, ranks.streams[0].cuda_stream)
    torch.cuda.synchronize()
    assert ranks.status.tolist() == [[0, 1], [0, 0]]


@pytest.mark.cuda
def test_a_bound_launch_that_is_refused_says_which_kernel(gpu: int) -> None:
    with pytest.raises(DriverError, match=r"cuLaunchKernel.*kernel='post'.*num_blocks=0"):
        kernel("post", gpu).bind(0, 1, 0, 0)(0)
