"""The command line of ``tpspan bench``, and the start of its ranks where nobody has started any.

Outside a launcher the command starts itself on ``--ranks`` ranks; inside one it is a rank. torch is
imported on ranks only.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpspan.errors import LaunchError
from tpspan.launch.environment import detect
from tpspan.launch.run import LAUNCHERS, run

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps")
DEFAULT_RANKS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv")
MODULE = "tpspan.tools.bench.command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, as a rank or by starting ranks; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    if options.which == "span" and options.plot and not options.scaling:
        parser().error("--plot shows what --scaling measures: give both")
    for name in ("plot", "profile", "timeline"):
        if getattr(options, name, None) and importlib.util.find_spec("matplotlib") is None:
            parser().error(f"--{name} needs matplotlib: pip install matplotlib")
    try:
        inside = detect(os.environ).launcher != "alone"
        if inside or options.ranks == 1:
            # Every bench is a module of its own that offers ``run_rank``.
            name = options.which.replace("-", "_")
            rank = importlib.import_module(f"tpspan.tools.bench.{name}")
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
    _add_common(span)
    add("--size", type=_size, default=256 << 20, metavar="BYTES", help="default 256MiB")
    add(
        "--large-size",
        type=num_bytes,
        default=64 << 30,
        metavar="BYTES",
        help="also allocate a span of this size and touch it at the ends of its blocks only "
        "(default 64GiB; 0 leaves it out)",
    )
    add("--scaling", action="store_true", help="also fit allocation time to blocks x ranks")
    add(
        "--blocks",
        type=_counts,
        default=(1, 4, 16, 64, 256, 1000),
        metavar="N,N,...",
        help="blocks per rank for --scaling (default 1,4,16,64,256,1000)",
    )
    add("--plot", type=_picture, metavar="FILE.png", help="plot --scaling; needs matplotlib")
    _add_sweep(
        which.add_parser(
            "gather",
            help="all-gather of many sizes, against gloo or NCCL and torch symmetric memory",
            description="Check the values, then measure all-gathers into an ordinary tensor and in "
            "place, a barrier, every peer that this machine has, and a plain copy as the floor.",
        )
    )
    _add_sweep(
        which.add_parser(
            "all-reduce",
            help="all-reduce and reduce-scatter of many sizes, against the same",
            description="Check the values, then measure all-reduces and reduce-scatters, a "
            "barrier, every peer that this machine has, and a plain copy as the floor.",
        )
    )
    _add_gather_matmul(
        which.add_parser(
            "gather-matmul",
            help="x @ W.T with the rows of W on all ranks, against a gather and a product",
            description="Check the values, then measure products with a shared weight read in "
            "place, staged and as `auto` chooses, every peer that this machine has, and as the "
            "floor the larger of the local product and the copies alone.",
        )
    )
    _add_fsdp(
        which.add_parser(
            "fsdp",
            help="training by FSDP2, over spans and by its own communication",
            description="Train the same transformer by FSDP2 with gloo or NCCL and over spans. "
            "Check that the losses agree, then compare the time of a step and the peak memory.",
        )
    )
    _add_pipeline(
        which.add_parser(
            "pipeline",
            help="handing activations from stage to stage, against a copy and gloo or NCCL",
            description="Check the values, then measure hand-overs alone and behind the matrix "
            "product that makes them: in windows, by remaps, by a copy, and by send and recv.",
        )
    )
    _add_share(
        which.add_parser(
            "share",
            help="attaching published weights, against torch.multiprocessing and safetensors",
            description="Publish a model's tensors, let worker processes attach them and flip to "
            "new versions, and check what they read. Compare with handing the tensors over by "
            "torch.multiprocessing (shared memory, CUDA IPC on a GPU), and with loading a "
            "safetensors file from the page cache.",
        )
    )
    return top


def _add_share(bench: argparse.ArgumentParser) -> None:
    """What is published, and who attaches. Nobody is a rank here."""
    add = bench.add_argument
    bench.set_defaults(ranks=1, launcher="mpirun")
    add("--backend", choices=("auto", "host", "cuda"), default="auto")
    add("--size", type=_size, metavar="BYTES", help="default 512MiB, on CUDA 16GiB")
    add("--tensors", type=_positive, default=1000, metavar="N", help="default 1000")
    add("--workers", type=_positive, default=8, metavar="N", help="default 8")
    add("--repeat", type=_positive, default=5, metavar="N", help="times each (default 5)")
    add("--json", type=_writable, metavar="FILE", help="write all figures, and what they are of")


def _add_common(bench: argparse.ArgumentParser) -> None:
    """What every bench takes."""
    add = bench.add_argument
    add("--ranks", type=_positive, metavar="N", help=f"how many ranks (default {DEFAULT_RANKS})")
    add("--json", type=_writable, metavar="FILE", help="write all figures, and what they are of")
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="what starts the ranks")
    add("--backend", choices=("auto", "host", "cuda"), default="auto")
    add(
        "--share-device",
        action="store_true",
        help="let ranks share a GPU, as TPSPAN_SHARE_DEVICE=1 does",
    )
    add(
        "--seconds",
        type=_seconds,
        default=0.5,
        help="about how long one figure takes (default 0.5)",
    )


def _add_sweep(bench: argparse.ArgumentParser) -> None:
    """What the benches over many sizes take."""
    _add_common(bench)
    add = bench.add_argument
    add(
        "--sizes",
        type=_sizes,
        metavar="BYTES,BYTES,...",
        help="default 1KiB to 256MiB, on CUDA to 2GiB, in steps of 4 x",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--plot", type=_picture, metavar="FILE.png", help="draw the table; needs matplotlib")


def _add_gather_matmul(bench: argparse.ArgumentParser) -> None:
    """The weight, and the rows that are multiplied with it."""
    _add_common(bench)
    add = bench.add_argument
    add(
        "--rows-of-w",
        type=_positive,
        metavar="N",
        help="default 512 for each rank, on CUDA 7168; rounded up to as many on every rank",
    )
    add("--k", type=_positive, metavar="N", help="columns of W; default 2048, on CUDA 8192")
    add(
        "--rows",
        type=_rows,
        metavar="N,N,...",
        help="rows of x; default 1,16,64,256,1024, on CUDA to 4096",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default float32, on CUDA bfloat16",
    )
    add("--layout", choices=("blocked", "striped"), default="blocked", help="of W in its span")
    add("--plot", type=_picture, metavar="FILE.png", help="draw the table; needs matplotlib")
    add(
        "--profile",
        type=_picture,
        metavar="FILE.png",
        help="on CUDA, draw when a staged product copies and when it multiplies; needs matplotlib",
    )


def _add_fsdp(bench: argparse.ArgumentParser) -> None:
    """The model, and how long it is trained."""
    _add_common(bench)
    add = bench.add_argument
    sizes = {"layers": 4, "hidden": 512, "seq": 64, "batch": 1, "steps": 20}
    for name, default in sizes.items():
        add(f"--{name}", type=_positive, default=default, metavar="N", help=f"default {default}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--plot", type=_picture, metavar="FILE.png", help="draw both; needs matplotlib")


def _add_pipeline(bench: argparse.ArgumentParser) -> None:
    """What is handed over."""
    _add_common(bench)
    add = bench.add_argument
    add(
        "--sizes",
        type=_sizes,
        metavar="BYTES,BYTES,...",
        help="default 1MiB to 256MiB, on CUDA to 1GiB, in steps of 4 x",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default float32, on CUDA bfloat16",
    )
    add("--depth", type=_positive, default=2, metavar="N", help="blocks of a channel (default 2)")
    add("--plot", type=_picture, metavar="FILE.png", help="draw the table; needs matplotlib")
    add(
        "--schedules",
        type=_schedules,
        metavar="NAME,NAME,...",
        help="instead train a transformer in stages, torch's and ours, under these schedules: "
        f"{', '.join(SCHEDULES)}, or all",
    )
    for name, default in {"layers": 12, "batch": 1, "microbatches": 8}.items():
        add(f"--{name}", type=_positive, default=default, metavar="N", help=f"default {default}")
    add(
        "--models",
        type=_models,
        metavar="HIDDENxSEQ,...",
        help="width and sequence of the transformers; default 64x8 to 256x128, on CUDA 128x128 to "
        "2048x1024",
    )
    add(
        "--steps",
        type=_positive,
        metavar="N",
        help="steps of training that are timed; default 20 to 100, as many as take 20 s",
    )
    add(
        "--split-last",
        action="store_true",
        help="let our stages hand gradients over before the last weights' gradients are made",
    )
    add(
        "--timeline",
        type=_picture,
        metavar="FILE.png",
        help="with --schedules, draw a step of each stage; needs matplotlib",
    )


def num_bytes(text: str) -> int:
    """Bytes of ``268435456``, ``256M``, ``256MiB`` or ``256 MiB``: powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 268435456 or 256MiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def _size(text: str) -> int:
    nbytes = num_bytes(text)
    if not nbytes:
        raise argparse.ArgumentTypeError("0 bytes take no time")
    return nbytes


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _schedules(text: str) -> tuple[str, ...]:
    names = SCHEDULES if text == "all" else tuple(text.split(","))
    unknown = [name for name in names if name not in SCHEDULES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SCHEDULES)}")
    return names


def _models(text: str) -> tuple[tuple[int, int], ...]:
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 64x8,128x128")
    return tuple((int(each[1]), int(each[2])) for each in found if each)


def _rows(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


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
    try:
        # By trying: rights say nothing of file systems that take no files, such as /proc.
        with tempfile.TemporaryFile(dir=path.parent):
            # A finished file takes the place of what was there, which must not be a device.
            refused = path.exists() and not (path.is_file() and os.access(path, os.W_OK))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error})") from None
    if refused:
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def _picture(text: str) -> Path:
    """A file that can be written, and that matplotlib knows how to draw."""
    path = _writable(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text} does not end in one of {', '.join(_PICTURES)}")
    return path


if __name__ == "__main__":
    sys.exit(main())
