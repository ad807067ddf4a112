"""``tpspan bench all-reduce`` on one rank: all-reduces and reduce-scatters, ours and torch's.

A size is what every rank brings. All-reduces are in place, as torch's.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import tpspan.distributed as distributed
from tpspan.launch.world import World
from tpspan.tools.bench import sweep_report, torch_peers
from tpspan.tools.bench.gather import barrier
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import (
    Contender,
    Row,
    Stage,
    integers,
    modulus_of_sums,
    sweep,
)
from tpspan.tools.bench.values import allocate

ALL_REDUCE = "all-reduce"
REDUCE_SCATTER = "reduce-scatter"
_WITH_WAIT = "torch symmetric memory, its wait included"


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    torch_peers.without_multicast()
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: somebody gave a wrong sum.
        TpspanError: memory could not be shared.
    """
    sweep_report.run(world, options, command_line, measure)


def measure(bench: Bench, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Row]:
    """The rows of all sizes, of both operations. Collective."""
    return [
        *sweep(bench, ALL_REDUCE, set_up_all_reduce, sizes, dtype),
        *sweep(bench, REDUCE_SCATTER, set_up_reduce_scatter, sizes, dtype),
    ]


@contextlib.contextmanager
def set_up_all_reduce(bench: Bench, nbytes: int, dtype: torch.dtype) -> Iterator[Stage]:
    """Tensors of ``nbytes`` to be added up over the ranks. Collective."""
    world = bench.world
    numel = max(1, nbytes // dtype.itemsize)
    tensor = torch.zeros(numel, dtype=dtype, device=world.device)
    memory = torch_peers.symmetric(bench, numel, dtype)

    def fill() -> None:
        own = integers(world.rank, 0, numel, modulus_of_sums(world.world_size), dtype, world.device)
        tensor.copy_(own)
        if isinstance(memory, torch.Tensor):
            memory.copy_(own)

    def rest() -> None:
        for each in (tensor, memory):
            if isinstance(each, torch.Tensor):
                each.zero_()

    def ours() -> torch.Tensor:
        distributed.all_reduce(tensor, group=world)
        return tensor

    def theirs() -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def one_shot() -> torch.Tensor:
        name = torch_peers.group_name()
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", name)
        return result

    def two_shot() -> torch.Tensor:
        name = torch_peers.group_name()
        result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(memory, "sum", name)
        return result

    contenders = [
        Contender("tpspan", "ours", ours, "in place, in an ordinary tensor"),
        *torch_peers.collective(bench, theirs),
        torch_peers.of_symmetric("one-shot", memory, one_shot, "torch symmetric memory"),
        torch_peers.of_symmetric("two-shot", memory, two_shot, "torch symmetric memory"),
    ]
    with _common(bench, tensor) as common:
        yield Stage([*contenders, *common], fill, _sums(bench, dtype, 0), rest)


@contextlib.contextmanager
def set_up_reduce_scatter(bench: Bench, nbytes: int, dtype: torch.dtype) -> Iterator[Stage]:
    """Tensors of ``nbytes``, of whose sum over the ranks each rank gets a part. Collective."""
    world = bench.world
    part = max(1, nbytes // dtype.itemsize // world.world_size)
    whole = torch.zeros(part * world.world_size, dtype=dtype, device=world.device)
    output = torch.zeros(part, dtype=dtype, device=world.device)
    memory = torch_peers.symmetric(bench, whole.numel(), dtype)

    def fill() -> None:
        modulus = modulus_of_sums(world.world_size)
        whole.copy_(integers(world.rank, 0, whole.numel(), modulus, dtype, world.device))
        if isinstance(memory, torch.Tensor):
            memory.copy_(whole)
        output.zero_()

    def ours() -> torch.Tensor:
        distributed.reduce_scatter_tensor(output, whole, group=world)
        return output

    def theirs() -> torch.Tensor:
        torch_peers.reduce_scatter(output, whole)
        return output

    def low_contention() -> torch.Tensor:
        name = torch_peers.group_name()
        scatter = torch.ops.symm_mem._low_contention_reduce_scatter
        return torch_peers.wait(scatter(memory, "sum", name))

    contenders = [
        Contender("tpspan", "ours", ours, "into an ordinary tensor"),
        *torch_peers.collective(bench, theirs),
        torch_peers.of_symmetric("low contention", memory, low_contention, _WITH_WAIT),
    ]
    with _common(bench, whole) as common:
        first = world.rank * part
        yield Stage([*contenders, *common], fill, _sums(bench, dtype, first), lambda: None)


def _sums(bench: Bench, dtype: torch.dtype, offset: int) -> Callable[[int, int], torch.Tensor]:
    world = bench.world
    modulus = modulus_of_sums(world.world_size)

    def expected(start: int, stop: int) -> torch.Tensor:
        place = (offset + start, offset + stop, modulus, torch.float32, world.device)
        total = integers(0, *place)
        for rank in range(1, world.world_size):
            total += integers(rank, *place)
        return total.to(dtype)

    return expected


@contextlib.contextmanager
def _common(bench: Bench, tensor: torch.Tensor) -> Iterator[list[Contender]]:
    """A barrier of ours, and one plain copy of the bytes as the floor."""
    span = allocate(bench.world, 1)
    copy = torch.zeros_like(tensor)

    def plain() -> None:
        copy.copy_(tensor)

    try:
        yield [
            Contender("barrier", "barrier", barrier(span), "ours alone"),
            Contender("floor", "floor", plain, "one plain copy of the bytes, no waiting"),
        ]
    finally:
        bench.start_together()
        span.close(force=True)
