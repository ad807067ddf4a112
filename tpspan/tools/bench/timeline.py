"""When a GPU copied and when it multiplied in one call, as a picture: do they overlap?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpspan.tools.bench.matmul_report import pyplot
from tpspan.tools.bench.measuring import Bench


@dataclass(frozen=True)
class Interval:
    """Something that a GPU did: on which stream, from when to when in microseconds, and what."""

    stream: int
    start_us: float
    duration_us: float
    name: str
    is_copy: bool


def profile(bench: Bench, body: Callable[[], object], path: Path) -> None:
    """Draw when rank 0's GPU copied and when it multiplied in one call. Collective.

    The other ranks wait: one that shares the GPU would take its time slices. Without a GPU there is
    nothing beside the call to be seen, and no picture is made.
    """
    if not bench.is_cuda:
        if bench.world.rank == 0:
            print("no timeline: on the host backend copies are done before they return")
        return
    bench.start_together()
    if bench.world.rank == 0:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        for _ in range(3):  # the first calls under a profiler are slow
            with torch.profiler.profile(activities=activities) as profiler:
                body()
                bench.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            found = intervals(json.loads(trace.read_text()))
        overlap = overlap_us(found)
        copies = sum(each.duration_us for each in found if each.is_copy)
        print(f"of {copies:.0f} us of copies {overlap:.0f} us go on beside a multiplication")
        draw(found, path)
    bench.start_together()


def intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """Kernels and copies of a trace of torch.profiler, by their start."""
    found = [
        Interval(
            int(event["args"]["stream"]),
            float(event["ts"]),
            float(event["dur"]),
            str(event["name"]),
            event["cat"] == "gpu_memcpy",
        )
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy") and "stream" in event.get("args", {})
    ]
    return sorted(found, key=lambda each: each.start_us)


def overlap_us(found: Sequence[Interval]) -> float:
    """How long something was copied while something was multiplied."""
    total = 0.0
    for copy in found:
        for kernel in found:
            if copy.is_copy and not kernel.is_copy:
                end = min(copy.start_us + copy.duration_us, kernel.start_us + kernel.duration_us)
                total += max(0.0, end - max(copy.start_us, kernel.start_us))
    return total


def draw(found: Sequence[Interval], path: Path) -> None:
    """A line for each stream; copies and multiplications in colours of their own."""
    plots = pyplot()
    streams = sorted({each.stream for each in found})
    begin = min((each.start_us for each in found), default=0.0)
    figure, axis = plots.subplots(figsize=(11, 1.5 + len(streams)), layout="constrained")
    for is_copy, colour, label in ((True, "tab:orange", "copy"), (False, "tab:blue", "kernel")):
        for line, stream in enumerate(streams):
            bars = [
                (each.start_us - begin, each.duration_us)
                for each in found
                if each.stream == stream and each.is_copy == is_copy
            ]
            name = label if line == 0 else None
            axis.broken_barh(bars, (line - 0.35, 0.7), color=colour, edgecolor="white", label=name)
    axis.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axis.set_xlabel("microseconds")
    axis.set_title("one staged product of rank 0", fontsize=10)
    axis.legend()
    figure.savefig(path, dpi=120)
    plots.close(figure)
