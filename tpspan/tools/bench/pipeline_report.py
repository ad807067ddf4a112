"""Steps of pipelines of several sizes in one table: where handing over matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.console
import rich.table

from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.report import short

_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """A model under a schedule.

    Attributes:
        schedule, hidden, seq: which.
        activation_nbytes: what one stage hands to the next for a microbatch.
        theirs_ms, ours_ms: a step with torch's stage and with hand-overs; medians.
        ratio: ours by theirs, the median over pairs of steps.
        computing: the share of torch's step that no way of handing over can shorten.
        memory: our peak by theirs; None if there was none to be seen.
    """

    schedule: str
    hidden: int
    seq: int
    activation_nbytes: int
    theirs_ms: float
    ours_ms: float
    ratio: float
    computing: float
    memory: float | None


def print_rows(rows: Sequence[Row], peer: str) -> None:
    """Print a table for each schedule, one line a model."""
    console = rich.console.Console(
        width=_WIDTH, color_system=None, force_terminal=False, highlight=False
    )
    for schedule in dict.fromkeys(row.schedule for row in rows):
        console.print(_table(schedule, [row for row in rows if row.schedule == schedule], peer))
    console.print("computing alone: of torch's step, which no way of handing over can shorten")


def _table(schedule: str, rows: Sequence[Row], peer: str) -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, title=schedule, title_justify="left", pad_edge=False
    )
    headers = ("hidden x seq", "activation", f"torch, {peer}", "hand-overs")
    for header in (*headers, "of torch's", "computing alone", "peak memory, of torch's"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.hidden} x {row.seq}",
            shown(row.activation_nbytes),
            f"{short(row.theirs_ms)} ms",
            f"{short(row.ours_ms)} ms",
            short(row.ratio),
            short(row.computing),
            "-" if row.memory is None else short(row.memory),
        )
    return table
