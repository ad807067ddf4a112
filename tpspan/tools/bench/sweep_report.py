"""The figures of a sweep over sizes: one table for people, JSON for programs, and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import rich.box
import rich.console
import rich.table
import torch

from tpspan.launch.world import World
from tpspan.tools.bench import report
from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.measuring import Bench, Figure
from tpspan.tools.bench.sweep import Row

_WIDTH = 160
# Of a contender's figures, those that are said no more of than of the first.
_PARTS = (", host time", ", alone")
_LARGEST = {"host": 256 << 20, "cuda": 2 << 30}

Measure: TypeAlias = Callable[[Bench, tuple[int, ...], torch.dtype], list[Row]]


def default_sizes(backend: str) -> tuple[int, ...]:
    """From 1 KiB on in steps of four; the largest in any case."""
    largest = _LARGEST[backend]
    sizes = [1 << shift for shift in range(10, largest.bit_length(), 2)]
    return tuple(sorted({*sizes, largest}))


def run(world: World, options: argparse.Namespace, command_line: str, measure: Measure) -> None:
    """Run a sweep with the options of the command line; report on rank 0. Collective."""
    start = time.perf_counter()
    gc.collect()
    gc.freeze()  # collections between the figures need not walk torch's modules
    bench = Bench(world, seconds=options.seconds)
    sizes = options.sizes or default_sizes(world.backend)
    rows = measure(bench, sizes, getattr(torch, options.dtype))
    found = document(world, bench.figures, rows, options, command_line, start)
    if world.rank == 0:
        print_tables(found, bench.figures, rows)
        if options.json:
            report.write(found, options.json)
        if options.plot:
            plot(found, options.plot)
    bench.board.barrier()


def document(
    world: World,
    figures: Sequence[Figure],
    rows: Sequence[Row],
    options: argparse.Namespace,
    command_line: str,
    start: float,
) -> dict[str, Any]:
    """Everything of one run, ready for JSON. Collective."""
    found = report.document(
        world,
        figures,
        None,
        command_line=command_line,
        nbytes=max(row.nbytes for row in rows),
        seconds=time.perf_counter() - start,
    )
    del found["scaling"]
    found["schema"] = f"tpspan-bench-{options.which}/1"
    found["dtype"] = options.dtype
    found["rows"] = [dataclasses.asdict(row) for row in rows]
    return found


def print_tables(found: dict[str, Any], figures: Sequence[Figure], rows: Sequence[Row]) -> None:
    """Print a table for each operation, one line a size, and what the columns are."""
    console = rich.console.Console(
        width=_WIDTH, color_system=None, force_terminal=False, highlight=False
    )
    where = found["hardware"]["gpu"] or found["hardware"]["cpu"]
    console.print(
        f"{found['ranks']} ranks, {found['backend']}, {found['dtype']}, {where}: microseconds, "
        "medians, the slowest rank of every sample"
    )
    for operation in dict.fromkeys(row.operation for row in rows):
        console.print(_table(operation, [row for row in rows if row.operation == operation]))
        for name, note in _notes(figures, operation).items():
            console.print(f"{name}: {note}")


def _table(operation: str, rows: Sequence[Row]) -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, title=operation, title_justify="left", pad_edge=False
    )
    names = list(rows[0].us)
    has_in_place = any(row.barriers_in_place for row in rows)
    table.add_column("size", justify="right", no_wrap=True)
    for name in (*names, *(f"{name}, alone" for name in rows[0].alone_us)):
        table.add_column(name, justify="right")
    table.add_column("times best peer", justify="right")
    if rows[0].alone_us:
        table.add_column("alone", justify="right")
    table.add_column("share of floor", justify="right")
    if has_in_place:
        table.add_column("in place, barriers", justify="right")
    for row in rows:
        cells = [_cell(row.us[name]) for name in names]
        cells += [_cell(row.alone_us.get(name)) for name in rows[0].alone_us]
        ratio = f"{report.short(row.ratio)} x {row.best_peer}" if row.ratio else "-"
        share = f"{row.share_of_floor:.0%}" if row.share_of_floor else "-"
        cells.append(ratio)
        if rows[0].alone_us:
            cells.append(f"{report.short(row.ratio_alone)} x" if row.ratio_alone else "-")
        cells.append(share)
        if has_in_place:
            cells.append(_cell(row.barriers_in_place))
        table.add_row(shown(row.nbytes), *cells)
    return table


def _cell(number: float | None) -> str:
    return "-" if number is None else report.short(number)


def _notes(figures: Sequence[Figure], operation: str) -> dict[str, str]:
    """What is said of each column; of several things the one at the largest size."""
    of_operation = [each for each in figures if each.group.startswith(f"{operation}, ")]
    named = {each.name: each.note for each in of_operation if each.note}
    return {name: note for name, note in named.items() if not name.endswith(_PARTS)}


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw times and ratios over sizes into an image file; needs matplotlib.

    Args:
        found: a ``document``, be it one that was read from a file of an older release.
    """
    unknown = dict.fromkeys(field.name for field in dataclasses.fields(Row))
    rows = [Row(**{**unknown, **row}) for row in found["rows"]]
    where = found["hardware"]["gpu"] or found["hardware"]["cpu"]
    title = f"tpspan {found['versions']['tpspan']}: {found['ranks']} ranks, {found['backend']}"
    backend: Any = importlib.import_module("matplotlib")
    backend.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    operations = list(dict.fromkeys(row.operation for row in rows))
    figure, axes = pyplot.subplots(
        len(operations), 2, figsize=(12, 4.5 * len(operations)), layout="constrained", squeeze=False
    )
    for operation, (times, ratios) in zip(operations, axes, strict=True):
        chosen = [row for row in rows if row.operation == operation]
        for name in chosen[0].us:
            points = [(row.nbytes, row.us[name]) for row in chosen if row.us[name] is not None]
            style = {"tpspan": "o-", "in place": "s-", "floor": "k:", "barrier": "k--"}
            if points:
                times.loglog(*zip(*points, strict=True), style.get(name, ".-"), label=name)
        points = [(row.nbytes, row.ratio) for row in chosen if row.ratio is not None]
        if points:
            ratios.loglog(*zip(*points, strict=True), "o-", label="best peer / tpspan")
        points = [(r.nbytes, r.share_of_floor) for r in chosen if r.share_of_floor is not None]
        if points:
            ratios.loglog(*zip(*points, strict=True), "k:", label="floor / tpspan")
        ratios.axhline(1, color="grey", linewidth=1)
        times.set_title(f"{operation}: microseconds", fontsize=10)
        ratios.set_title(f"{operation}: times faster", fontsize=10)
        for axis in (times, ratios):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("bytes")
            axis.grid(alpha=0.3)
            axis.legend()
    figure.suptitle(f"{title}, {found['dtype']}, {where}", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
