"""``tpspan bench gather-matmul`` on one rank: ``x @ W.T`` with the rows of W on all ranks.

Every rank multiplies its own x by all of W. Ours read W where it lies or copy it in pieces
meanwhile; the others gather it first. No barrier is in ours: weights are written rarely.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tpspan.launch.world import World
from tpspan.parallel.linear import GatheredLinear
from tpspan.spans import Span
from tpspan.tools.bench import matmul_report, timeline, torch_peers
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.matmul_contenders import READS, contenders_of
from tpspan.tools.bench.matmul_report import Row
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender
from tpspan.tools.bench.values import WrongValues

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Long enough that the host has queued every call before the first one runs.
_AHEAD_CYCLES = 3_000_000
_DEFAULT = {"host": (512, 2048, "float32"), "cuda": (7168, 8192, "bfloat16")}
_DEFAULT_ROWS = {"host": (1, 16, 64, 256, 1024), "cuda": (1, 16, 64, 256, 1024, 2048, 4096)}


@dataclass(frozen=True)
class Case:
    """What is multiplied.

    Attributes:
        rows_of_w, k: W is (rows_of_w, k).
        dtype: of x, W and the product.
        layout: of the span with W.
        rows: of x, one after the other.
    """

    rows_of_w: int
    k: int
    dtype: torch.dtype
    layout: str
    rows: tuple[int, ...]

    @classmethod
    def of(cls, world: World, options: argparse.Namespace) -> Case:
        """What the options ask for; the rest suits the machine. Every rank gets as many rows."""
        each, k, dtype = _DEFAULT[world.backend]
        size = world.world_size
        rows_of_w = -(-(options.rows_of_w or each * size) // size) * size
        return cls(
            rows_of_w,
            options.k or k,
            getattr(torch, options.dtype or dtype),
            options.layout,
            options.rows or _DEFAULT_ROWS[world.backend],
        )


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    torch_peers.without_multicast()
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: somebody's product is wrong; nothing was measured.
        TpspanError: a span could not be made.
    """
    start = time.perf_counter()
    gc.collect()
    gc.freeze()  # collections between the figures need not walk torch's modules
    bench = Bench(world, seconds=options.seconds)
    case = Case.of(world, options)
    with _prepared(bench, case) as (layers, shards, whole):
        rows = [_measure(bench, case, count, layers, shards, whole) for count in case.rows]
        if options.profile:
            x = _values(case, 1000 + world.rank, case.rows[-1], world.device)
            timeline.profile(bench, lambda: layers["staged"](x), options.profile)
        stats = {read: layer.stats() for read, layer in layers.items()}
    matmul_report.report(bench, options, command_line, rows, case, stats, start)


@contextlib.contextmanager
def _prepared(
    bench: Bench, case: Case
) -> Iterator[tuple[dict[str, GatheredLinear], torch.Tensor, torch.Tensor]]:
    """Layers over one span by their policy, this rank's rows apart, and all rows in local memory.

    The latter two come from the formula, not through the span. Collective.
    """
    world = bench.world
    parts = [
        _values(case, rank, case.rows_of_w // world.world_size, world.device)
        for rank in range(world.world_size)
    ]
    whole = torch.cat(parts)
    shards = parts[world.rank]
    del parts
    span = Span.allocate(world, whole.shape, case.dtype, layout=case.layout)
    layers = {}
    try:
        for read in READS:
            layers[read] = GatheredLinear(
                case.k,
                case.rows_of_w,
                False,
                span=span,
                read=read,  # type: ignore[arg-type]
            )
        with torch.no_grad():
            target, itemsize = layers["auto"].weight.view(-1), case.dtype.itemsize
            cut = [
                whole.view(-1)[at // itemsize : (at + nbytes) // itemsize]
                for at, nbytes in span.layout.shards[world.rank]
            ]
            target.copy_(torch.cat(cut))
        del target
        bench.start_together()
        with torch.no_grad():
            yield layers, shards, whole
    finally:
        for layer in layers.values():
            layer.close()
        bench.synchronize()
        span.close(force=True)


def _measure(
    bench: Bench,
    case: Case,
    rows: int,
    layers: dict[str, GatheredLinear],
    shard: torch.Tensor,
    whole: torch.Tensor,
) -> Row:
    world = bench.world
    x = _values(case, 1000 + world.rank, rows, world.device)
    contenders = list(contenders_of(bench, x, layers, shard, whole))
    expected = torch.cat([x.float() @ part.float().T for part in whole.split(1024)], 1)
    usable = [_tried(bench, each, expected, f"{rows} rows of x") for each in contenders]
    del expected
    bodies = [each for each in usable if each.body is not None]
    timed = [_timed(bench, each.body) for each in bodies if each.body is not None]

    def once() -> list[float]:
        """Everybody by turns, so that all meet the same machine; each after a call of its own.

        Otherwise the caches would hold what the one before has read, and that may be the same.
        """
        taken = []
        for each, timed_call in zip(bodies, timed, strict=True):
            if each.body is not None:
                each.body()
            bench.start_together()
            taken.append(timed_call())
        return taken

    samples = bench.sample(once, least=7, most=300)
    figures = {}
    group = f"{rows} rows of x"
    for contender in usable:
        if contender.body is None:
            bench.leave_out(group, contender.name, "us", contender.note)
    for index, contender in enumerate(bodies):
        note = "; ".join(filter(None, [contender.note, "" if bench.is_cuda else bench.crowd]))
        times = [sample[index] for sample in samples]
        figures[contender.name] = bench.add_us(group, contender.name, times, note)
    return Row.of(rows, usable, figures)


def _tried(bench: Bench, given: Contender, expected: torch.Tensor, what: str) -> Contender:
    """A contender whose product was checked; a peer that refuses is left out. Collective."""
    if given.body is None:
        return given
    bench.start_together()
    result, refusal = None, ""
    try:
        result = given.body()
        bench.synchronize()
    except (RuntimeError, AttributeError) as error:  # torch's ways to say what it does not have
        if given.role != "peer":
            raise
        refusal = f"n/a: {str(error).splitlines()[0][:120]}"
    refusal = next(filter(None, bench.board.all_gather(refusal)), "")
    if refusal:
        return Contender(given.name, given.role, None, refusal)

    def compare() -> None:
        if result is None:
            return
        scale = float(expected.abs().max())
        worst = float((result.float() - expected).abs().max())
        if not worst <= _TOLERANCE[result.dtype] * max(scale, 1.0):
            raise WrongValues(f"{what}, {given.name}: off by {worst}, of values up to {scale}")

    bench.board.together(f"checking values, {what}, {given.name}", compare)
    return given


def _timed(bench: Bench, body: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a call; on CUDA those of the device, whose work is queued ahead."""
    if not bench.is_cuda:
        return bench.wall(body)

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[attr-defined]
        begin.record()
        body()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return once


def _values(case: Case, seed: int, rows: int, device: torch.device) -> torch.Tensor:
    """Rows of a seed, the same wherever they are made, between -0.5 and 0.5."""
    random = torch.Generator(device).manual_seed(seed)
    values = torch.rand(rows, case.k, generator=random, device=device).sub_(0.5)
    return values.to(case.dtype)
