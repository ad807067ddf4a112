"""``tpspan bench gather`` on one rank: all-gathers of many sizes, ours and torch's.

A size is what is gathered, on every rank. What is measured goes from inputs that are ready until
the outputs are complete and the inputs may be written again.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch

import tpspan.distributed as distributed
from tpspan.launch.world import World
from tpspan.spans import Span
from tpspan.tools.bench import sweep_report, torch_peers
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender, Row, Stage, integers, sweep

OPERATION = "all-gather"
_MODULUS = 251


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    torch_peers.without_multicast()
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: somebody gathered what was not given.
        TpspanError: a span could not be made.
    """
    sweep_report.run(world, options, command_line, measure)


def measure(bench: Bench, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Row]:
    """The rows of all sizes. Collective."""
    return sweep(bench, OPERATION, set_up, sizes, dtype)


@contextlib.contextmanager
def set_up(bench: Bench, nbytes: int, dtype: torch.dtype) -> Iterator[Stage]:
    """Tensors that gather ``nbytes``, at least an element of each rank. Collective."""
    world = bench.world
    numel = max(1, nbytes // dtype.itemsize // world.world_size)
    span = Span.allocate(world, (numel * world.world_size,), dtype)
    out = torch.zeros(span.shape, dtype=dtype, device=world.device)
    shard = torch.zeros(numel, dtype=dtype, device=world.device)
    memory = torch_peers.symmetric(bench, numel, dtype)
    gathered, local = span.gathered, span.local

    def fill() -> None:
        own = integers(world.rank, 0, numel, _MODULUS, dtype, world.device)
        for tensor in (shard, local, memory):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(own)
        out.zero_()

    def expected(start: int, stop: int) -> torch.Tensor:
        parts = []
        while start < stop:
            rank, first = divmod(start, numel)
            last = min(numel, first + stop - start)
            parts.append(integers(rank, first, last, _MODULUS, dtype, world.device))
            start += last - first
        return torch.cat(parts)

    def ours() -> torch.Tensor:
        distributed.all_gather_into_tensor(out, shard, world)
        return out

    def in_place() -> torch.Tensor:
        distributed.all_gather_into_tensor(gathered, local, world)
        return gathered

    def theirs() -> torch.Tensor:
        torch_peers.all_gather(out, shard)
        return out

    def low_contention() -> torch.Tensor:
        name = torch_peers.group_name()
        return torch_peers.wait(torch.ops.symm_mem._low_contention_all_gather(memory, name))

    contenders = [
        Contender("tpspan", "ours", ours, "into an ordinary tensor"),
        Contender("in place", "in place", in_place, "the output is the gathered view of a span"),
        *torch_peers.collective(bench, theirs),
        torch_peers.of_symmetric(
            "low contention", memory, low_contention, "torch symmetric memory, its wait included"
        ),
        Contender("barrier", "barrier", barrier(span), "ours alone"),
        _floor(bench, span, out),
    ]
    try:
        yield Stage(contenders, fill, expected, lambda: None)
    finally:
        bench.start_together()
        span.close(force=True)


def barrier(span: Span) -> Callable[[], None]:
    """A barrier of ours, on the stream where there is one."""
    if span.world.backend == "cuda":
        return span.barrier
    return lambda: distributed.barrier(span.world)


def _floor(bench: Bench, span: Span, out: torch.Tensor) -> Contender:
    """Moving the bytes and nothing else: nobody is told, nobody waited for."""
    world = bench.world
    if world.backend == "cuda" and not bench.shares_device:
        peers = [(world.rank + k) % world.world_size for k in range(1, world.world_size)]
        numel = out.numel() // world.world_size
        pairs = [(out[peer * numel : (peer + 1) * numel], span.shard(peer)) for peer in peers]

        def pull() -> None:
            for target, source in pairs:
                target.copy_(source)

        return Contender("floor", "floor", pull, "one plain copy from every peer, no waiting")
    source = torch.ones_like(out)

    def copy() -> None:
        out.copy_(source)

    return Contender("floor", "floor", copy, "one plain copy of the bytes, no waiting")
