"""The command line of ``tpspan bench``, and the start of its ranks where nobody has started any.

Outside a launcher the command starts itself on ``--ranks`` ranks; inside one it is a rank. torch is
imported on ranks only.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tpspan.errors import LaunchError
from tpspan.launch.environment import detect
from tpspan.launch.run import LAUNCHERS, run

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_RANKS = 2
MODULE = "tpspan.tools.bench.command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, as a rank or by starting ranks; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    if options.plot and not options.scaling:
        parser().error("--plot shows what --scaling measures: give both")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser().error("--plot needs matplotlib: pip install matplotlib")
    try:
        inside = detect(os.environ).launcher != "alone"
        if inside or options.ranks == 1:
            rank = importlib.import_module("tpspan.tools.bench.span")
            return int(rank.run_rank(options, shlex.join(["tpspan", "bench", *words])))
        num_ranks = options.ranks or DEFAULT_RANKS
        return run(num_ranks, [MODULE, *words], launcher=options.launcher, module=True)
    except (LaunchError, ValueError) as error:
        print(f"tpspan bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(
        prog="tpspan bench", description="Measure what spans cost and give on this machine."
    )
    which = top.add_subparsers(dest="which", required=True, metavar="WHAT")
    span = which.add_parser(
        "span",
        help="allocate, barrier, remap, read in place and copy, against gloo or NCCL",
        description="Check the values of spans, then measure: time to allocate, barrier, remap "
        "idle and under load, reading in place, copy_to against one copy and an all-gather.",
    )
    add = span.add_argument
    add("--ranks", type=_positive, metavar="N", help=f"how many ranks (default {DEFAULT_RANKS})")
    add("--size", type=num_bytes, default=256 << 20, metavar="BYTES", help="default 256MiB")
    add("--json", type=_writable, metavar="FILE", help="write all figures, and what they are of")
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="what starts the ranks")
    add("--backend", choices=("auto", "host", "cuda"), default="auto")
    add(
        "--share-device",
        action="store_true",
        help="let ranks share a GPU, as TPSPAN_SHARE_DEVICE=1 does",
    )
    add(
        "--large-size",
        type=num_bytes,
        default=64 << 30,
        metavar="BYTES",
        help="also allocate a span of this size and touch it at the ends of its blocks only "
        "(default 64GiB; 0 leaves it out)",
    )
    add("--seconds", type=float, default=0.5, help="about how long one figure takes (default 0.5)")
    add("--scaling", action="store_true", help="also fit allocation time to blocks x ranks")
    add(
        "--blocks",
        type=_counts,
        default=(1, 4, 16, 64, 256, 1000),
        metavar="N,N,...",
        help="blocks per rank for --scaling (default 1,4,16,64,256,1000)",
    )
    add("--plot", type=_writable, metavar="FILE.png", help="plot --scaling; needs matplotlib")
    return top


def num_bytes(text: str) -> int:
    """Bytes of ``268435456``, ``256M``, ``256MiB`` or ``256 MiB``: powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 268435456 or 256MiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(_positive(part) for part in text.split(","))
    if len(set(counts)) < 2:
        raise argparse.ArgumentTypeError("a line needs at least two different numbers of blocks")
    return counts


def _writable(text: str) -> Path:
    """A file that can be written: said before the measuring, not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


if __name__ == "__main__":
    sys.exit(main())
