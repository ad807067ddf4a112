"""Figures of ``tpspan bench gather-matmul``: a table, JSON, and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

import tpspan
from tpspan.tools.bench import report as reports
from tpspan.tools.bench.measuring import Bench, Figure
from tpspan.tools.bench.sweep import Contender

_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """What a number of rows of x came to.

    Attributes:
        rows: of x.
        us: microseconds of each contender, medians of the slowest rank; None if left out.
        floor_us: the larger of the copies alone and the local product.
        share_of_floor: the floor as a share of ``auto``: 1 is as fast as can be.
        auto_over_better: ``auto`` over the better of ``in_place`` and ``staged``, each by its
            fastest sample: they run the same code, so in medians the machine's noise would show.
        best_peer, ratio: the fastest peer, and how many times longer than ``auto`` it takes.
    """

    rows: int
    us: dict[str, float | None]
    floor_us: float | None
    share_of_floor: float | None
    auto_over_better: float | None
    best_peer: str | None
    ratio: float | None

    @classmethod
    def of(cls, rows: int, contenders: Sequence[Contender], figures: Mapping[str, Figure]) -> Row:
        """Compare what was measured; contenders without a figure were left out."""
        us = {each.name: figures[each.name].median for each in contenders if each.name in figures}
        floor = max((us.get(name) or 0.0 for name in ("local", "wire")), default=0.0)
        auto = us.get("auto")
        peers = [(us.get(each.name), each.name) for each in contenders if each.role == "peer"]
        best, name = min(((found, name) for found, name in peers if found), default=(None, None))
        return cls(
            rows,
            {each.name: us.get(each.name) for each in contenders},
            floor or None,
            floor / auto if auto and floor else None,
            _over_better(figures),
            name,
            best / auto if auto and best else None,
        )


def _over_better(figures: Mapping[str, Figure]) -> float | None:
    fastest = {name: figure.minimum for name, figure in figures.items() if figure.minimum}
    others = [fastest[name] for name in ("in_place", "staged") if name in fastest]
    return fastest["auto"] / min(others) if "auto" in fastest and others else None


def report(
    bench: Bench,
    options: argparse.Namespace,
    command_line: str,
    rows: Sequence[Row],
    case: Any,
    stats: Mapping[str, Any],
    start: float,
) -> None:
    """Print, write and draw on rank 0 what all ranks have measured. Collective.

    Args:
        case: a dataclass: what was multiplied.
        stats: a dataclass for each policy: how it read.
        start: when the bench began, by ``time.perf_counter``.
    """
    world = bench.world
    nbytes = case.rows_of_w * case.k * case.dtype.itemsize
    found = reports.document(
        world,
        bench.figures,
        None,
        command_line=command_line,
        nbytes=nbytes,
        seconds=time.perf_counter() - start,
    )
    del found["scaling"]
    found["schema"] = "tpspan-bench-gather-matmul/1"
    found["case"] = {**dataclasses.asdict(case), "dtype": str(case.dtype).removeprefix("torch.")}
    found["reads"] = {read: dataclasses.asdict(each) for read, each in stats.items()}
    found["rows"] = [dataclasses.asdict(row) for row in rows]
    if world.rank == 0:
        _print(found, rows, bench)
        if options.json:
            reports.write(found, options.json)
        if options.plot:
            _plot(found, rows, options.plot)
    bench.board.barrier()


def _print(found: dict[str, Any], rows: Sequence[Row], bench: Bench) -> None:
    # Launchers give ranks terminals of their own, whose width and colours say nothing.
    console = rich.console.Console(
        width=_WIDTH, color_system=None, force_terminal=False, highlight=False
    )
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    names = list(rows[0].us)
    columns = ("auto / better", "share of floor", "times best peer")
    for header in ("rows of x", *names, "floor", *columns):
        table.add_column(header, justify="right")
    for row in rows:
        ratio = f"{reports.short(row.ratio)} x {row.best_peer}" if row.ratio else "-"
        table.add_row(
            str(row.rows),
            *(_cell(row.us[name]) for name in names),
            _cell(row.floor_us),
            _cell(row.auto_over_better),
            f"{row.share_of_floor:.0%}" if row.share_of_floor else "-",
            ratio,
        )
    console.print(_title(found))
    console.print(table)
    notes = {figure.name: figure.note for figure in bench.figures if figure.note}
    for name, note in notes.items():
        console.print(f"{name}: {note}")
    for read, each in found["reads"].items():
        console.print(
            f"{read}: {each['num_in_place']} products in place, {each['num_staged']} staged, "
            f"local memory up to {each['scratch_nbytes'] / found['size_bytes']:.2f} of W"
        )


def _title(found: dict[str, Any]) -> str:
    case, where = found["case"], found["hardware"]["gpu"] or found["hardware"]["cpu"]
    return (
        f"x @ W.T, W {case['rows_of_w']} x {case['k']} {case['dtype']} {case['layout']}, "
        f"{found['ranks']} ranks, {found['backend']}, {where}: microseconds, medians, the slowest "
        "rank of every sample. Values were checked first."
    )


def _cell(number: float | None) -> str:
    return "-" if number is None else reports.short(number)


def _plot(found: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(9, 5.5), layout="constrained")
    styles = {"auto": "o-", "in_place": "s--", "staged": "^--", "local": "k:", "wire": "k-."}
    for name in rows[0].us:
        points = [(row.rows, row.us[name]) for row in rows if row.us[name] is not None]
        if points:
            axis.loglog(*zip(*points, strict=True), styles.get(name, ".-"), label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("rows of x")
    axis.set_ylabel("microseconds")
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(f"tpspan {tpspan.__version__}: {_title(found)}", fontsize=8, wrap=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def pyplot() -> Any:
    """matplotlib, for files only."""
    backend: Any = importlib.import_module("matplotlib")
    backend.use("Agg")
    return importlib.import_module("matplotlib.pyplot")
