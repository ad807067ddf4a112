"""Write the table of the project's README from the JSON files that stand beside this script.

    python docs/measurements/fill_readme.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tpspan.tools.bench.report import short

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
BEGIN = "<!-- measured: begin (written from docs/measurements, see the README there) -->"
END = "<!-- measured: end -->"

# What the README shows: the figure's group and the names it may have, and what it is called there.
ROWS = [
    ("allocate", r"64 GiB, total", "64 GiB span: allocate, exchange, map"),
    ("allocate", r"256 MiB, total", "256 MiB span: allocate, exchange, map"),
    ("barrier", r"on the stream, of many.*", "barrier on the stream"),
    ("barrier", r"host time of a call|of the host.*", "barrier, host time"),
    ("launch", r".*of ours.*", "launch of one of our kernels, host time"),
    (
        "remap",
        r"2 MiB, driver part, one after another, beside products",
        "remap of 2 MiB beside running kernels",
    ),
    (
        "remap",
        r"64 MiB, driver part, one after another, beside products",
        "remap of 64 MiB beside running kernels",
    ),
    (
        "remap",
        r"64 MiB, products slower, beside driver part, one after another",
        "how much such remaps, one after another, slow those kernels",
    ),
    (
        "remap",
        r"64 MiB, whole collective call, one every ms, beside products",
        "`Span.remap` of 64 MiB, all ranks, both votes",
    ),
    ("gather", r"256 MiB, read in place", "256 MiB of all ranks read in place"),
    ("gather", r"256 MiB, copy_to", "the same copied into a local tensor"),
    ("gather", r"256 MiB, (gloo|nccl) all_gather_into_tensor", "the same by gloo or NCCL"),
    ("gather", r".*sooner.*", None),
]


def main() -> None:
    """Replace what stands between the two comments."""
    runs = [json.loads(path.read_text()) for path in sorted(HERE.glob("span-*.json"))]
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{after}")


def table(runs: list[dict[str, Any]]) -> str:
    """One column a run, one row a figure."""
    heads = [_head(run) for run in runs]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(runs)}"]
    for group, pattern, title in ROWS:
        names = _names(runs, group, pattern) if title is None else [pattern]
        for name in names:
            cells = [_cell(run, group, name) for run in runs]
            if any(cells):
                shown = title or f"{name[0].upper()}{name[1:]}"
                lines.append(f"| {shown} | {' | '.join(cell or '–' for cell in cells)} |")
    dates = ", ".join(sorted({run["date"][:10] for run in runs}))
    lines.append("")
    lines.append(f"Medians; all ranks start together, the slowest counts. Measured {dates}.")
    return "\n".join(lines)


def _head(run: dict[str, Any]) -> str:
    hardware, versions = run["hardware"], run["versions"]
    if run["backend"] == "cuda":
        shared = " sharing" if run["ranks_share_gpu"] else ""
        where = f"{hardware['num_gpus_used']} × {hardware['gpu']}"
        return f"{where}, {run['ranks']} ranks{shared}, torch {versions['torch']}"
    cores = hardware["num_cores"]
    return f"{hardware['cpu']}, {cores} cores, {run['ranks']} ranks, torch {versions['torch']}"


def _names(runs: list[dict[str, Any]], group: str, pattern: str) -> list[str]:
    found = {
        figure["name"]: None
        for run in runs
        for figure in run["figures"]
        if figure["group"] == group and re.fullmatch(pattern, figure["name"])
    }
    return [re.escape(name).replace(r"\ ", " ") for name in found]


def _cell(run: dict[str, Any], group: str, pattern: str) -> str:
    for figure in run["figures"]:
        if figure["group"] == group and re.fullmatch(pattern, figure["name"]):
            if figure["median"] is None:
                return ""
            return f"{short(figure['median'])} {figure['unit']}".replace("us", "µs")
    return ""


if __name__ == "__main__":
    main()
