"""What allocating costs against the number of blocks and ranks: measured on a grid, and fitted."""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpspan.spans import Layout, Span
from tpspan.spans.allocation import pool_of
from tpspan.tools.bench.measuring import Bench, summarise

_REPEATS = 3


@dataclass(frozen=True)
class Point:
    """One allocation of the grid.

    Attributes:
        num_ranks, blocks_per_rank: of the span; every block is one page.
        seconds: until the slowest rank had it, median.
        cpu_seconds: of the processor, on the rank that used most, median.
    """

    num_ranks: int
    blocks_per_rank: int
    seconds: float
    cpu_seconds: float

    @property
    def num_blocks(self) -> int:
        """Blocks that every rank maps: blocks x ranks."""
        return self.num_ranks * self.blocks_per_rank


@dataclass(frozen=True)
class Fit:
    """``fixed + each * blocks x ranks`` by least squares; ``r_squared`` of a line is 1."""

    fixed: float
    each: float
    r_squared: float


@dataclass(frozen=True)
class Scaling:
    """The grid and its fits: by the clock, and by each rank's own processor time."""

    points: tuple[Point, ...]
    wall: Fit
    cpu: Fit
    note: str


def fit(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """The straight line of least squares.

    Raises:
        ValueError: fewer than two different ``xs``.
    """
    num = len(xs)
    if len(set(xs)) < 2 or num != len(ys):
        raise ValueError("a line needs at least two different numbers of blocks")
    mean_x, mean_y = sum(xs) / num, sum(ys) / num
    spread = sum((x - mean_x) ** 2 for x in xs)
    each = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    fixed = mean_y - each * mean_x
    residual = sum((y - fixed - each * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - mean_y) ** 2 for y in ys)
    return Fit(fixed, each, 1 - residual / total if total else 1.0)


def measure(bench: Bench, blocks: Sequence[int]) -> Scaling:
    """Allocate on the first 1, 2, 4, ... ranks with ever more blocks. Collective."""
    world = bench.world
    sizes = sorted({*(1 << k for k in range(world.world_size.bit_length())), world.world_size})
    sizes = [size for size in sizes if size <= world.world_size]
    allowed, left_out = [], set()
    for count in blocks:
        # Of the host backend every block, own or a peer's, is an open file.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256
        fits = bench.is_cuda or count * world.world_size < limit
        allowed.append(count) if bench.agree(not fits) == 0 else left_out.add(count)
    note = ""
    if left_out:
        note = f"{sorted(left_out)} blocks per rank left out: the limit of open files (ulimit -n)"
    points: list[Point] = []
    for size in sizes:
        measured: list[Point] = []
        if world.rank < size:
            part = world.subset(range(size))
            try:
                measured = [_point(Bench(part, seconds=0), count) for count in allowed]
            finally:
                part.close()
        points += bench.board.all_gather(measured)[0]
    xs = [point.num_blocks for point in points]
    return Scaling(
        tuple(points),
        fit(xs, [point.seconds for point in points]),
        fit(xs, [point.cpu_seconds for point in points]),
        "; ".join(filter(None, [note, bench.crowd])),
    )


def _point(bench: Bench, blocks_per_rank: int) -> Point:
    world = bench.world
    page_nbytes = world.driver.page_nbytes
    nbytes = blocks_per_rank * world.world_size * page_nbytes
    layout = Layout.striped(
        nbytes, world.world_size, stripe_nbytes=page_nbytes, page_nbytes=page_nbytes
    )
    pool = world.resource("pool", pool_of)

    def once() -> tuple[float, float]:
        pool.trim()
        bench.start_together()
        cpu, start = time.process_time(), time.perf_counter()
        span = Span.allocate_bytes(world, layout)
        took = time.perf_counter() - start, time.process_time() - cpu
        span.close()
        return took

    samples = bench.sample(once, least=_REPEATS, most=_REPEATS)
    by_rank = bench.board.all_gather(samples)
    medians = [
        summarise("", "", "s", [[one[index] for one in samples] for samples in by_rank]).median
        for index in (0, 1)
    ]
    return Point(world.world_size, blocks_per_rank, medians[0] or 0.0, medians[1] or 0.0)


def plot(scaling: Scaling, path: Path, title: str) -> None:
    """Draw the grid and its fits into an image file; needs matplotlib, which nothing else does."""
    backend: Any = importlib.import_module("matplotlib")
    backend.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    kinds = (
        ("until the slowest rank has it", scaling.wall, "seconds"),
        ("processor time of the busiest rank", scaling.cpu, "cpu_seconds"),
    )
    for axis, (name, line, attribute) in zip(axes, kinds, strict=True):
        for size in sorted({point.num_ranks for point in scaling.points}):
            of_size = [point for point in scaling.points if point.num_ranks == size]
            xs = [point.num_blocks for point in of_size]
            ys = [getattr(point, attribute) * 1e3 for point in of_size]
            axis.plot(xs, ys, "o", label=f"{size} rank{'s' * (size > 1)}")
        most = max(point.num_blocks for point in scaling.points)
        ends = [0, most]
        axis.plot(ends, [(line.fixed + line.each * x) * 1e3 for x in ends], "k--", linewidth=1)
        axis.set_title(
            f"{name}\n{line.fixed * 1e3:.2f} ms + {line.each * 1e6:.1f} µs per block, "
            f"R² = {line.r_squared:.4f}",
            fontsize=10,
        )
        axis.set_xlabel("blocks per rank × ranks")
        axis.set_ylabel("ms")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
