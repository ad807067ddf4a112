"""The kernels of collective calls: sums and pulls, on the host and on a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tpspan.kernels.host_exchange import host_pull
from tpspan.kernels.host_reduce import HOST_SUM_DTYPES, host_sum
from tpspan.kernels.stream_fused import (
    FUSED_COUNTS,
    FusedPlace,
    FusedShape,
    fused_gather,
    fused_region_nbytes,
    fused_scatter,
    plan_fused_sum,
)
from tpspan.kernels.stream_reduce import DEVICE_SUM_DTYPES, device_sum, pull

NUMELS = (1, 7, 8, 4095, 4096, 4097, 100_003)


def expected_sum(sources: list[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
    dtype = sources[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = sources[0].to(wide)
    for more in sources[1:]:
        total = total + more.to(wide)
    return (total / divisor).to(dtype)


def random_sources(numel: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    torch.manual_seed(numel + count)
    sources = [torch.randn(numel).to(dtype) for _ in range(count)]
    special = torch.tensor([float("inf"), float("nan"), -0.0, 3e38]).to(dtype)
    for source in sources[:2]:
        source[: min(4, numel)] = special[: min(4, numel)]
    return sources


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN it is."""
    nan = one.isnan()
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    return nan.equal(other.isnan()) and one[~nan].view(bits).equal(other[~nan].view(bits))


def addresses(tensors: list[torch.Tensor]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@pytest.mark.parametrize("name", HOST_SUM_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_host_sums_are_those_of_torch_bit_for_bit(name: str, count: int) -> None:
    dtype = getattr(torch, name)
    for numel in NUMELS:
        sources = random_sources(numel, dtype, count)
        table = addresses(sources)
        for divisor in (1.0, float(count)):
            target = torch.full((numel + 1,), 7.0, dtype=dtype)
            host_sum(name, target.data_ptr(), ctypes.addressof(table), count, numel, divisor)
            assert same(target[:-1], expected_sum(sources, divisor))
            assert float(target[-1]) == 7, "nothing is written behind the target"


@pytest.mark.parametrize("name", HOST_SUM_DTYPES)
def test_a_host_sum_may_overwrite_a_source(name: str) -> None:
    sources = random_sources(10_000, getattr(torch, name), 3)
    expected = expected_sum(sources)
    table = addresses(sources)
    host_sum(name, sources[1].data_ptr(), ctypes.addressof(table), 3, 10_000)
    assert same(sources[1], expected)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 33])
@pytest.mark.parametrize(("piece", "total"), [(1000, 4000), (300_001, 900_000), (5, 11)])
def test_host_pull_takes_the_others_pieces(
    past_caches: bool, shift: int, piece: int, total: int
) -> None:
    size, rank, stride = 4, 2, piece + 13
    source = (torch.arange(size * stride) % 251).to(torch.uint8)
    target = torch.full((shift + size * piece + 64,), 255, dtype=torch.uint8)
    expected = target.clone()
    for peer in range(size):
        length = max(min(piece, total - peer * piece), 0)
        if peer != rank and length:
            begin = shift + peer * piece
            given = source[peer * stride : peer * stride + length]
            expected[begin : begin + length] = given
    host_pull(
        target.data_ptr() + shift,
        piece,
        source.data_ptr(),
        stride,
        piece,
        total,
        rank,
        size,
        past_caches,
    )
    assert target.equal(expected)


@pytest.fixture(scope="module")
def stream() -> int:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch sees none")
    return int(torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("name", DEVICE_SUM_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_device_sums_are_those_of_torch_bit_for_bit(stream: int, name: str, count: int) -> None:
    dtype = getattr(torch, name)
    for numel in NUMELS:
        sources = random_sources(numel, dtype, count)
        stride = (numel * dtype.itemsize + 255) // 256 * 256
        regions = torch.zeros(count, stride // dtype.itemsize, dtype=dtype).cuda()
        for row, each in zip(regions, sources, strict=True):
            row[:numel] = each.cuda()
        own = sources[count - 1].cuda()
        regions[count - 1].zero_()  # this rank's is read from elsewhere
        target, second = (torch.full((numel + 1,), 7.0, dtype=dtype).cuda() for _ in range(2))
        device_sum(
            name,
            target.data_ptr(),
            second.data_ptr(),
            regions.data_ptr(),
            stride,
            own.data_ptr(),
            numel,
            count - 1,
            count,
            count,
            device=0,
            stream=stream,
        )
        for result in (target.cpu(), second.cpu()):
            assert same(result[:-1], expected_sum(sources, count))
            assert float(result[-1]) == 7


@pytest.mark.parametrize(("piece", "total"), [(1000, 4000), (3_000_001, 9_000_000), (5, 11)])
@pytest.mark.parametrize("num_pieces", [3, 4])
def test_device_pull_takes_pieces(stream: int, piece: int, total: int, num_pieces: int) -> None:
    size, rank, stride = 4, 2, piece + 13
    source = (torch.arange(size * stride) % 251).to(torch.uint8).cuda()
    target = torch.full((size * piece + 64,), 255, dtype=torch.uint8).cuda()
    expected = target.clone()
    for peer in range(size):
        length = max(min(piece, total - peer * piece), 0)
        if length and (peer != rank or num_pieces == size):
            given = source[peer * stride : peer * stride + length]
            expected[peer * piece : peer * piece + length] = given
    pull(
        target.data_ptr(),
        piece,
        source.data_ptr(),
        stride,
        piece,
        total,
        rank,
        size,
        num_pieces,
        device=0,
        stream=stream,
    )
    assert target.equal(expected)


def test_fused_calls_of_one_rank(stream: int) -> None:
    """With nobody to wait for they copy and add; how ranks meet needs several GPUs."""
    staging = torch.zeros(fused_region_nbytes(), dtype=torch.uint8).cuda()
    board = torch.zeros(FUSED_COUNTS // 2 * 64, dtype=torch.uint8).cuda()
    epochs = torch.zeros(FUSED_COUNTS, dtype=torch.int32).cuda()
    status = torch.zeros(1, dtype=torch.int32).pin_memory()
    place = FusedPlace(
        staging.data_ptr(),
        len(staging),
        board.data_ptr(),
        2 << 20,
        0,
        1,
        epochs.data_ptr(),
        status.data_ptr(),
        10**9,
        0,
    )
    num_rounds = torch.zeros(FUSED_COUNTS // 2, dtype=torch.int32)
    for numel in (8, 1000, 200_000, 9_000_008):
        for shift in (0, 1):
            x = torch.randn(numel + shift).bfloat16().cuda()[shift:]
            out = torch.empty(numel + shift, dtype=torch.bfloat16).cuda()[shift:]
            fused_gather(place, out.data_ptr(), x.data_ptr(), numel * 2, stream)
            assert out.equal(x)
            plan_fused_sum(place, "bfloat16", out.data_ptr(), x.data_ptr(), numel * 2, 2)(stream)
            assert out.equal((x.float() / 2).bfloat16())
            fused_scatter(place, "bfloat16", out.data_ptr(), x.data_ptr(), numel * 2, 2, stream)
            assert out.equal((x.float() / 2).bfloat16())
            shape = FusedShape.of(numel * 2)
            num_rounds[: 2 * shape.num_pairs] += 3 * shape.num_rounds
            assert epochs[::2].tolist() == num_rounds.tolist()
    assert not bool(epochs[1::2].any())
    assert int(status) == 0
