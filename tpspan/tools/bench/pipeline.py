"""``tpspan bench pipeline`` on one rank: what pipeline stages hand over, ours and torch's."""

from __future__ import annotations

import argparse

import torch

from tpspan.errors import LaunchError
from tpspan.launch.world import World
from tpspan.tools.bench import handover, pipeline_schedules, sweep_report, torch_peers
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Row

_LARGEST = {"host": 256 << 20, "cuda": 1 << 30}


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    if options.schedules:
        return pipeline_schedules.run_rank(options, command_line)
    torch_peers.without_multicast()
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        LaunchError: there is only one rank.
        WrongValues: somebody handed over something else.
        TpspanError: a channel could not be made.
    """
    if world.world_size < 2:
        raise LaunchError("handing over takes two ranks: --ranks 2")
    options.sizes = options.sizes or default_sizes(world.backend)
    options.dtype = options.dtype or ("float32" if world.backend == "host" else "bfloat16")

    def measure(bench: Bench, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Row]:
        return handover.measure(bench, sizes, dtype, depth=options.depth)

    sweep_report.run(world, options, command_line, measure)


def default_sizes(backend: str) -> tuple[int, ...]:
    """From 1 MiB on in steps of four."""
    return tuple(1 << shift for shift in range(20, _LARGEST[backend].bit_length(), 2))
