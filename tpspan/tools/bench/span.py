"""``tpspan bench span`` on one rank: check the values, measure everything, report."""

from __future__ import annotations

import argparse
import gc
import time

import torch

import tpspan
from tpspan.launch.world import World
from tpspan.tools.bench import (
    allocating,
    peers,
    reading,
    remapping,
    report,
    scaling,
    values,
    waiting,
)
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench

_TRAIN_S = 0.04


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: a span did not hold what was written; nothing was measured.
        TpspanError: a span could not be made.
    """
    start = time.perf_counter()
    gc.collect()
    gc.freeze()  # collections between the figures need not walk torch's modules
    bench = Bench(world, seconds=options.seconds)
    check_values(world, options.size)
    allocating.measure(bench, options.size)
    if options.large_size:
        allocating.measure_large(bench, options.large_size)
    waiting.measure_barrier(bench)
    waiting.measure_launch(bench)
    remapping.measure(bench, min(_TRAIN_S, options.seconds))
    reading.measure(bench, options.size)
    peers.measure(bench, options.size)
    measured = scaling.measure(bench, options.blocks) if options.scaling else None
    found = report.document(
        world,
        bench.figures,
        measured,
        command_line=command_line,
        nbytes=options.size,
        seconds=time.perf_counter() - start,
    )
    if world.rank == 0:
        report.print_table(found, bench.figures, measured)
        if options.json:
            report.write(found, options.json)
        if options.plot and measured is not None:
            where = found["hardware"]["gpu"] or found["hardware"]["cpu"]
            title = f"tpspan {tpspan.__version__}: allocating a span, {world.backend}, {where}"
            scaling.plot(measured, options.plot, title)
    bench.board.barrier()


def check_values(world: World, nbytes: int) -> None:
    """See that every rank reads what the others wrote: after allocate, remap and copy. Collective.

    Raises:
        WrongValues: it does not, here; PeerError on the other ranks.
    """
    span = values.allocate(world, nbytes)
    values.fill(span, 1)
    span.barrier()
    values.check(span, 1, "after allocate")
    span.barrier()

    placed = span.blocks[0]
    stop = placed.block.nbytes // values.DTYPE.itemsize
    stop = min(stop, span.shape[0])
    fresh = span.new_block(placed.block.owner, placed.block.nbytes)
    old = span.remap(0, fresh, after=span.fence())
    values.check(span, 1, "beside a remapped block", start=stop)
    span.barrier()
    values.fill(span, 2)
    span.barrier()
    values.check(span, 2, "after remap")
    span.remap(0, old, after=span.fence())
    # A page at a border may hold elements of two ranks: what came back is the whole old block.
    values.check(span, 1, "in a block that came back", stop=stop)
    values.check(span, 2, "beside a block that came back", start=stop)

    values.fill(span, 5)
    span.barrier()
    out = torch.zeros(span.shape, dtype=span.dtype, device=world.device)
    span.copy_to(out)
    values.check_copy(world, out, 5, "after copy_to")
    span.barrier()
    span.close()
