"""Calls in one launch: any size, dtype, alignment and order, graphs, and late ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from bodies.common import failure, finish, gather, short_lived
from tpspan.distributed.fused import LL_NBYTES, Fused, sum_limit_nbytes
from tpspan.errors import PeerError
from tpspan.kernels.compile import prepare
from tpspan.kernels.stream_fused import (
    FUSED_KERNELS,
    FUSED_PAIRS,
    ROUND_NBYTES,
)
from tpspan.kernels.stream_ll import LL_KERNELS
from tpspan.launch.world import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025]
ROUND = FUSED_PAIRS * ROUND_NBYTES
SHIFTS = ((0, 0), (1, 0), (0, 3), (4, 4), (8, 12), (2, 14))


@contextmanager
def small_calls(world: World) -> Iterator[Fused]:
    """What makes them, on a world of the same ranks."""
    if any(gather(world, world.shares_device)):
        pytest.skip("every rank needs a GPU of its own")
    inner = world.subset(range(world.world_size))
    fused = Fused(inner)
    try:
        yield fused
        finish(world)
        fused.check()
    finally:
        world.control.barrier()
        fused.close()
        inner.close()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def around(*limits: int) -> list[int]:
    return [limit + more for limit in limits for more in (-17, -16, -1, 0, 1, 16, 17)]


def given_bytes(rank: int, nbytes: int, turn: int, device: torch.device) -> torch.Tensor:
    """What a rank gives: no two ranks or turns the same."""
    numbers = torch.arange(nbytes, device=device) * 7 + 31 * rank + 3 * turn
    return (numbers % 251).to(torch.uint8)


def given_numbers(
    rank: int, numel: int, turn: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What a rank adds: fractions whose sums are rounded, and some that are no numbers."""
    numbers = (torch.arange(numel, device=device) * (2 * rank + 3) + 17 * turn) % 1009
    values = ((numbers - 500).float() / 7).to(dtype)
    special = torch.tensor([float("inf"), -0.0, float("nan"), 3e38], device=device).to(dtype)
    if turn % 3 == 0:
        values[: min(4, numel)] = special[: min(4, numel)]
    return values


def shifted(nbytes: int, shift: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole buffer, and bytes in it at that distance from a multiple of 16."""
    whole = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8, device=device)
    return whole, whole[16 + shift : 16 + shift + nbytes]


def num_touched(whole: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """How many bytes beside the inner ones were written."""
    begin = inner.data_ptr() - whole.data_ptr()
    return (whole[:begin] != 0xA5).sum() + (whole[begin + inner.numel() :] != 0xA5).sum()


def num_wrong(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many differ, bit for bit but for which NaN it is; without waiting."""
    nan = expected.isnan()
    bits = torch.int32 if got.element_size() == 4 else torch.int16
    differ = (got.view(bits) != expected.view(bits)) & ~nan
    return differ.sum() + (nan != got.isnan()).sum()


def one_gather(
    fused: Fused, world: World, nbytes: int, turn: int, shifts: tuple[int, int], in_place: bool
) -> torch.Tensor:
    """Make a gather; return, on the device, how many bytes are wrong."""
    size, device = world.world_size, world.device
    # Ranks need not be aligned alike.
    source_shift, target_shift = ((shift + 3 * world.rank) % 16 for shift in shifts)
    whole, out = shifted(size * nbytes, target_shift, device)
    _, source = shifted(nbytes, source_shift, device)
    if in_place:
        source = out[world.rank * nbytes :][:nbytes]
    source.copy_(given_bytes(world.rank, nbytes, turn, device))
    fused.gather(out.data_ptr(), source.data_ptr(), nbytes, stream())
    expected = torch.cat([given_bytes(rank, nbytes, turn, device) for rank in range(size)])
    return (out != expected).sum() + num_touched(whole, out)


def one_sum(
    fused: Fused, world: World, numel: int, turn: int, dtype: torch.dtype, shift: int, divisor: int
) -> torch.Tensor:
    """Make a sum; return, on the device, how many elements are wrong."""
    return _one_sum(fused.sum, world, numel, turn, dtype, shift, divisor)


def _one_sum(
    add: Callable[[torch.Tensor, int, int], None],
    world: World,
    numel: int,
    turn: int,
    dtype: torch.dtype,
    shift: int,
    divisor: int,
) -> torch.Tensor:
    size, device = world.world_size, world.device
    shift = (shift + world.rank) * dtype.itemsize % 16
    whole, inner = shifted(numel * dtype.itemsize, shift, device)
    tensor = inner.view(dtype)
    given = [given_numbers(rank, numel, turn, dtype, device) for rank in range(size)]
    tensor.copy_(given[world.rank])
    add(tensor, divisor, stream())
    total = given[0].float()
    for more in given[1:]:
        total = total + more.float()
    # By a tensor: torch multiplies by what a number is the inverse of.
    expected = (total / torch.full_like(total, divisor)).to(dtype)
    return num_wrong(tensor, expected) + num_touched(whole, inner)


def one_scatter(
    fused: Fused, world: World, numel: int, turn: int, dtype: torch.dtype, shift: int, divisor: int
) -> torch.Tensor:
    """Add up and scatter parts; return, on the device, how many elements are wrong."""
    size, rank, device = world.world_size, world.rank, world.device
    shift = (shift + rank) * dtype.itemsize % 16
    whole, inner = shifted(size * numel * dtype.itemsize, shift, device)
    tensor = inner.view(dtype)
    given = [given_numbers(each, size * numel, turn, dtype, device) for each in range(size)]
    tensor.copy_(given[rank])
    begin = rank * numel
    output = torch.empty(numel, dtype=dtype, device=device)
    if turn % 2:  # in place
        output = tensor[begin : begin + numel]
    fused.scatter(output, tensor, divisor, stream())
    total = given[0][begin : begin + numel].float()
    for more in given[1:]:
        total = total + more[begin : begin + numel].float()
    expected = (total / torch.full_like(total, divisor)).to(dtype)
    wrong = num_wrong(output, expected) + num_touched(whole, inner)
    others = torch.ones(size * numel, dtype=torch.bool, device=device)
    others[begin : begin + numel] = False
    return wrong + num_wrong(tensor[others], given[rank][others])


def one_sum_in_parts(
    fused: Fused, world: World, numel: int, turn: int, dtype: torch.dtype, shift: int, divisor: int
) -> torch.Tensor:
    """A sum in two launches; return, on the device, how many elements are wrong."""
    return _one_sum(fused.sum_in_parts, world, numel, turn, dtype, shift, divisor)


def every_size(world: World) -> None:
    """Sizes around every limit, at every kind of alignment."""
    with small_calls(world) as fused:
        limits = around(4096, LL_NBYTES, 256 << 10, 512 << 10, 1 << 20, 2 << 20)
        for turn, nbytes in enumerate(SMALL + limits):
            for shifts in SHIFTS:
                for in_place in (False, True):
                    wrong = int(one_gather(fused, world, nbytes, turn, shifts, in_place))
                    assert not wrong, ("gather", nbytes, shifts, in_place, wrong)
        most = min(sum_limit_nbytes(world.world_size), 4 << 20)
        limits = around(4096, LL_NBYTES, 256 << 10, 1 << 20, most)
        for dtype in DTYPES:
            for turn, nbytes in enumerate(SMALL + limits):
                numel = nbytes // dtype.itemsize
                if not fused.serves_sum(numel * dtype.itemsize, dtype):
                    continue
                for shift in (0, 1, 3):
                    for divisor in (1, world.world_size):
                        wrong = int(one_sum(fused, world, numel, turn, dtype, shift, divisor))
                        assert not wrong, (dtype, nbytes, shift, divisor, wrong)
            for turn, nbytes in enumerate([16, 32, 48, 1024, 1040, *around(4096, 256 << 10)]):
                numel = -(-nbytes // 16) * 16 // dtype.itemsize
                for shift in (0, 1, 3):
                    for divisor in (1, world.world_size):
                        arguments = (fused, world, numel, turn, dtype, shift, divisor)
                        assert not int(one_scatter(*arguments)), (dtype, nbytes, shift, divisor)


def large(world: World) -> None:
    """Calls of several rounds, at every kind of alignment; also sizes that other ways are for."""
    sizes = around(ROUND, 2 * ROUND, 8 * ROUND)
    with small_calls(world) as fused:
        for turn, nbytes in enumerate([*sizes, 7 * ROUND + 48]):
            for shifts in ((0, 0), (1, 0), (0, 8), (2, 14)):
                wrong = int(one_gather(fused, world, nbytes, turn, shifts, turn % 2 == 0))
                assert not wrong, ("gather", nbytes, shifts, wrong)
            dtype, divisor = DTYPES[turn % 3], (1, world.world_size)[turn % 2]
            for shift in (0, 1, 4):
                numel = nbytes // 16 * 16 // dtype.itemsize
                for body in (one_sum, one_scatter):
                    wrong = int(body(fused, world, numel, turn, dtype, shift, divisor))
                    assert not wrong, (body, dtype, nbytes, shift, divisor, wrong)
                numel *= world.world_size
                wrong = int(one_sum_in_parts(fused, world, numel, turn, dtype, shift, divisor))
                assert not wrong, ("in parts", dtype, nbytes, shift, divisor, wrong)


def mixed(world: World, num_calls: int, seed: int = 0) -> None:
    """Calls of all kinds and sizes, queued one behind the other."""
    dice = random.Random(seed)
    with small_calls(world) as fused:
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        for turn in range(num_calls):
            nbytes = max(int(2 ** dice.uniform(0, 21)), 1)
            if dice.random() < 0.3:
                nbytes = dice.choice([LL_NBYTES, LL_NBYTES + 16, LL_NBYTES - 3, 2 << 20])
            if dice.random() < 0.05:
                nbytes = dice.randrange(2 << 20, 4 * ROUND)
            dtype, shifts, in_place = dice.choice(DTYPES), dice.choice(SHIFTS), dice.random() < 0.5
            divisor, is_sum = dice.choice([1, world.world_size]), dice.random() < 0.5
            numel = nbytes // 16 * 16 // dtype.itemsize if nbytes > 64 else 1 + nbytes
            if is_sum and fused.serves_sum(numel * dtype.itemsize, dtype):
                wrong += one_sum(fused, world, numel, turn, dtype, shifts[0], divisor)
            elif fused.serves_scatter(numel * dtype.itemsize, dtype) and dice.random() < 0.5:
                wrong += one_scatter(fused, world, numel, turn, dtype, shifts[0], divisor)
            else:
                wrong += one_gather(fused, world, nbytes, turn, shifts, in_place)
            if turn % 100 == 0:
                time.sleep(0.002 * dice.random() * world.rank)
                assert not int(wrong), f"wrong within the calls up to {turn}"
        assert not int(wrong)


def in_flight(world: World, num_calls: int) -> None:
    """Planned calls right behind each other: nothing between them holds a fast rank back."""
    size, rank, device = world.world_size, world.rank, world.device
    with small_calls(world) as fused:
        for nbytes in (16, 4096, LL_NBYTES, LL_NBYTES + 16, 1 << 20, 3 * ROUND + 16):
            counted = torch.zeros(nbytes // 4, device=device)
            out = torch.zeros(size, nbytes // 4, device=device)
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            gathers = fused.plan_gather(out.data_ptr(), counted.data_ptr(), nbytes)
            mean = fused.plan_sum(counted, size)
            ranks = torch.arange(size, device=device).view(-1, 1)
            for turn in range(num_calls):
                counted.fill_(rank + turn)
                gathers(stream())
                wrong += (out != ranks + turn).sum()
                mean(stream())
                wrong += (counted != (size - 1) / 2 + turn).sum()
                if turn % 7 == rank:
                    torch.cuda._sleep(20_000)  # type: ignore[attr-defined]
            assert not int(wrong), nbytes
            unaligned = torch.zeros(nbytes // 4 + 1, device=device)[1:]
            total = fused.plan_sum(unaligned, 1)
            for turn in range(3):
                unaligned.fill_(rank + turn)
                total(stream())
                assert bool((unaligned == sum(range(size)) + size * turn).all())


def captured(world: World, num_replays: int) -> None:
    """Graphs of an odd number of calls, replayed without waiting, and other calls in between."""
    size, rank, device = world.world_size, world.rank, world.device
    with small_calls(world) as fused:
        x = torch.zeros(LL_NBYTES // 4, device=device)
        large = torch.zeros(LL_NBYTES, device=device)
        out = torch.empty(size, 1001, device=device)
        outs = torch.empty(size, LL_NBYTES, device=device)
        few, many = torch.empty(1001, device=device), torch.empty(LL_NBYTES, device=device)
        most = torch.zeros(ROUND // 2 + 4, device=device)  # two rounds and a bit
        every = torch.empty(size, len(most), device=device)
        part = torch.empty(len(most), device=device)

        def step() -> None:
            fused.gather(out.data_ptr(), x.data_ptr(), 4004, stream())
            few.copy_(x[:1001])
            fused.sum(few, 1, stream())
            fused.sum(x, 1, stream())
            fused.gather(outs.data_ptr(), large.data_ptr(), 4 * LL_NBYTES, stream())
            many.copy_(large)
            fused.sum(many, 1, stream())
            fused.sum(large, 1, stream())
            fused.gather(every.data_ptr(), most.data_ptr(), most.nbytes, stream())
            fused.scatter(part, every.view(-1), 1, stream())
            fused.sum(most, 1, stream())

        step()
        finish(world)
        world.control.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        ranks = torch.arange(size, device=device).view(-1, 1)
        for turn in range(num_replays):
            x.fill_(rank + turn)
            large.fill_(rank - turn)
            most.fill_(rank + turn)
            graph.replay()
            total = sum(range(size))
            wrong += (every != ranks + turn).sum() + (part != size * (rank + turn)).sum()
            wrong += (out != ranks + turn).sum() + (outs != ranks - turn).sum()
            for tensor in (few, x, most):
                wrong += (tensor != total + size * turn).sum()
            for tensor in (many, large):
                wrong += (tensor != total - size * turn).sum()
            if turn % 10 == 3:
                wrong += one_sum(fused, world, 100, turn, torch.float32, 0, 1)
        assert not int(wrong)
        world.control.barrier()
        del graph, step


def late(world: World, victim: int, nbytes: int) -> None:
    """Invariant 9: kernels end at the deadline, and the call after names the rank."""
    if any(gather(world, world.shares_device)):
        pytest.skip("every rank needs a GPU of its own")
    prepare(world.device.index)  # not within half a second
    prepare(world.device.index, (*FUSED_KERNELS, *LL_KERNELS))
    world.control.barrier()
    with short_lived(world, 0.5) as inner:
        fused = Fused(inner)
        tensor = torch.ones(nbytes // 4, device=world.device)
        out = torch.empty(world.world_size, nbytes // 4, device=world.device)
        fused.sum(tensor, 1, stream())
        finish(world)
        world.control.barrier()
        if world.rank == victim:
            time.sleep(1.5)
        else:
            start = time.monotonic()
            fused.gather(out.data_ptr(), tensor.data_ptr(), nbytes, stream())
            finish(world)
            assert 0.4 < time.monotonic() - start < 1.4
            plan = fused.plan_sum(tensor, 1)
            for call in (lambda: fused.sum(tensor, 1, stream()), lambda: plan(stream())):
                error = failure(call)
                assert isinstance(error, PeerError)
                assert error.ranks == (victim,)
        world.control.barrier()
        fused.close()
