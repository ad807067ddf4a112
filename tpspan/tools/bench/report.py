"""Figures for people, as a table, and for programs, as JSON with all that they depend on."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table
import torch

import tpspan
from tpspan.launch.world import World
from tpspan.memory.cuda import cuda_device_count, device_uuid
from tpspan.tools.bench.measuring import Figure
from tpspan.tools.bench.scaling import Fit, Scaling

SCHEMA = "tpspan-bench-span/1"
"""Changes when a reader of the files would have to."""

_WIDTH = 160


def document(
    world: World,
    figures: Sequence[Figure],
    scaling: Scaling | None,
    *,
    command_line: str,
    nbytes: int,
    seconds: float,
) -> dict[str, Any]:
    """Everything of one run, ready for JSON. Collective; the same on all ranks but for the time."""
    uuids = {device_uuid(world.device.index)} if world.backend == "cuda" else set()
    gpus = set().union(*world.control.all_gather(uuids))
    found = origin(command_line, world.device)
    found["hardware"]["num_gpus_used"] = len(gpus)
    return {
        "schema": SCHEMA,
        **found,
        "seconds": round(seconds, 1),
        "backend": world.backend,
        "ranks": world.world_size,
        "launcher": world.launcher,
        "size_bytes": nbytes,
        "ranks_share_gpu": any(world.control.all_gather(world.shares_device)),
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "scaling": None if scaling is None else dataclasses.asdict(scaling),
    }


def origin(command_line: str, device: torch.device) -> dict[str, Any]:
    """When, by which command, and with what figures were measured; the same of every benchmark."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Where somebody's files lie is nobody else's business.
        "command_line": " ".join(word.rsplit("/", 1)[-1] for word in command_line.split(" ")),
        "hardware": {
            "cpu": _cpu_model(),
            "num_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
            "num_gpus_visible": cuda_device_count() if is_cuda else 0,
            "driver": _driver_version() if is_cuda else None,
        },
        "versions": {
            "tpspan": tpspan.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


def write(found: dict[str, Any], path: Path) -> None:
    """Write the document; a file that was there is replaced whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def print_table(found: dict[str, Any], figures: Sequence[Figure], scaling: Scaling | None) -> None:
    """Print what was measured and where, one line a figure."""
    # Launchers give ranks terminals of their own, whose width and colours say nothing.
    console = rich.console.Console(
        width=_WIDTH, color_system=None, force_terminal=False, highlight=False
    )
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, title=_title(found), title_justify="left", pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for header in ("median", "", "min", "max", "n", "slowest", "note"):
        width = len(header) + (header == "note")
        table.add_column(
            header, justify="right" if header else "left", min_width=width, no_wrap=True
        )
    notes = list(dict.fromkeys(figure.note for figure in figures if figure.note))
    group = ""
    for figure in figures:
        if figure.group != group:
            group = figure.group
            table.add_row(group)
        table.add_row(
            f"  {figure.name}",
            *_numbers(figure),
            "" if figure.slowest_rank is None else f"rank {figure.slowest_rank}",
            f"({notes.index(figure.note) + 1})" if figure.note else "",
        )
    console.print(table)
    for number, note in enumerate(notes, 1):
        console.print(f"({number}) {note}")
    if scaling is not None:
        console.print()
        console.print(_scaling_table(scaling))
        for name, line in (("wall", scaling.wall), ("processor", scaling.cpu)):
            console.print(f"{name} time: {_shown(line)}")


def _numbers(figure: Figure) -> tuple[str, str, str, str, str]:
    if figure.median is None or figure.minimum is None or figure.maximum is None:
        return "-", figure.unit, "", "", ""
    least, most = short(figure.minimum), short(figure.maximum)
    return short(figure.median), figure.unit, least, most, str(figure.num_samples)


def short(number: float) -> str:
    """Three digits that matter."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".")


def _scaling_table(scaling: Scaling) -> rich.table.Table:
    title = "allocation against blocks x ranks (blocks of one page, all new), ms"
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption=scaling.note,
        caption_justify="left",
    )
    for header in ("ranks", "blocks per rank", "blocks x ranks", "wall", "processor"):
        table.add_column(header, justify="right")
    for point in scaling.points:
        counts = (point.num_ranks, point.blocks_per_rank, point.num_blocks)
        times = (point.seconds * 1e3, point.cpu_seconds * 1e3)
        table.add_row(*map(str, counts), *map(short, times))
    return table


def _shown(line: Fit) -> str:
    return (
        f"{line.fixed * 1e3:.2f} ms + {line.each * 1e6:.1f} us for each of blocks x ranks, "
        f"R^2 {line.r_squared:.4f}"
    )


def _title(found: dict[str, Any]) -> str:
    hardware, versions = found["hardware"], found["versions"]
    where = hardware["cpu"]
    if found["backend"] == "cuda":
        where = f"{hardware['num_gpus_used']} x {hardware['gpu']}, driver {hardware['driver']}"
    shared = ", sharing" if found["ranks_share_gpu"] else ""
    return (
        f"tpspan {versions['tpspan']}, {found['ranks']} ranks ({found['launcher']}{shared}), "
        f"{found['backend']}: {where}, torch {versions['torch']}, {found['date']}\n"
        "Values were checked first. Ranks start together, the slowest counts; medians."
    )


def _cpu_model() -> str:
    return next(_after_colon("/proc/cpuinfo", r"model name"), platform.machine())


def _driver_version() -> str:
    """The version in what the kernel module says of itself."""
    for line in _lines("/proc/driver/nvidia/version"):
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
        if found:
            return found.group(1)
    return "unknown"


def _after_colon(path: str, name: str) -> Iterator[str]:
    for line in _lines(path):
        if re.match(rf"{name}\s*:", line):
            yield line.split(":", 1)[1].strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
