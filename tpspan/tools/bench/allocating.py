"""What it takes to make a span: own blocks, descriptors to and from all ranks, mappings."""

from __future__ import annotations

import time

import torch

from tpspan.spans import Layout, Span, balanced
from tpspan.spans.allocation import pool_of
from tpspan.tools.bench import values
from tpspan.tools.bench.measuring import Bench

GROUP = "allocate"
_STEPS = ("create", "exchange", "map", "total", "close")


def measure(bench: Bench, nbytes: int) -> None:
    """Figures of a span of ``nbytes``, with new blocks and with blocks of the pool. Collective."""
    pool = bench.world.resource("pool", pool_of)

    def once() -> tuple[float, ...]:
        start = time.perf_counter()
        span = values.allocate(bench.world, nbytes)
        took = time.perf_counter() - start
        return _steps(span, took)

    def fresh() -> tuple[float, ...]:
        pool.trim()
        bench.start_together()
        return once()

    size = shown(nbytes)
    _add(bench, size, bench.sample(fresh, least=5, most=50), new_blocks=True)
    _add(bench, f"{size} again", bench.sample(once, least=5, most=50), new_blocks=False)


def measure_large(bench: Bench, nbytes: int) -> None:
    """Figures of a span that may fill the device; blocks are touched at their ends. Collective."""
    world = bench.world
    size = shown(nbytes)
    page_nbytes = world.driver.page_nbytes
    sizes = balanced(max(1, nbytes // page_nbytes), world.world_size)
    layout = Layout.blocked([n * page_nbytes for n in sizes], page_nbytes=page_nbytes)
    free, _ = world.driver.memory_info()
    sharers = world.local_world_size if world.shares_device or not bench.is_cuda else 1
    free_here = min(bench.board.all_gather(free))
    needed = layout.owned_nbytes(0) * sharers
    if bench.is_cuda and needed > 0.95 * free_here:
        reason = f"{shown(free_here)} are free, {shown(needed)} are needed"
        bench.leave_out(GROUP, f"{size}, total", "ms", reason)
        return
    pool = world.resource("pool", pool_of)

    def once() -> tuple[float, ...]:
        pool.trim()
        bench.start_together()
        start = time.perf_counter()
        span = Span.allocate_bytes(world, layout)
        took = time.perf_counter() - start
        if not checked:
            _check_large(bench, span)
            checked.append(True)
        return _steps(span, took)

    checked: list[bool] = []
    samples = bench.sample(once, least=3, most=10)
    pool.trim()
    _add(bench, size, samples, new_blocks=True)


def shown(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a short number."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def _steps(span: Span, took_s: float) -> tuple[float, ...]:
    stats = span.stats()
    start = time.perf_counter()
    span.close()
    closed = time.perf_counter() - start
    return stats.create_s, stats.exchange_s, stats.map_s, took_s, closed


def _add(bench: Bench, size: str, samples: list[tuple[float, ...]], *, new_blocks: bool) -> None:
    notes = {
        "create": "new blocks, and the vote" if new_blocks else "blocks of the pool, and the vote",
        "total": "" if bench.is_cuda else "pages come with the first write, which is not in here",
    }
    for step, times in zip(_STEPS, zip(*samples, strict=True), strict=True):
        bench.add_ms(GROUP, f"{size}, {step}", times, notes.get(step, ""))


def _check_large(bench: Bench, span: Span) -> None:
    """The first and the last byte of every block come from its owner and reach every rank."""
    board = bench.board
    ends = torch.tensor(
        [at for run in span.layout.runs for at in (run.offset_bytes, run.end - 1)],
        device=bench.world.device,
    )
    owners = torch.tensor([run.owner for run in span.layout.runs for _ in range(2)])
    owners = owners.to(bench.world.device)
    marks = (torch.arange(len(ends), device=ends.device) % 251 + 1).to(torch.uint8)
    own = owners == bench.world.rank
    gathered = span.gathered
    gathered[ends[own]] = marks[own]
    bench.start_together()

    def compare() -> None:
        if not torch.equal(gathered[ends], marks):
            raise values.WrongValues("a large span: bytes at the ends of its blocks are wrong")

    board.together("checking a large span", compare)
