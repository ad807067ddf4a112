"""What the stages of a pipeline do when in one step, as numbers and as a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from tpspan.parallel.pipeline import SpanPipelineStage
from tpspan.parallel.pipeline_boundary import Boundary
from tpspan.tools.bench.matmul_report import pyplot

_COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:green",
    "weights": "tab:olive",
    "waits for a neighbour": "tab:red",
    "hands over": "tab:orange",
}
COMPUTES = ("forward", "backward", "weights")


@dataclass(frozen=True)
class Stretch:
    """Something that a stage did.

    Attributes:
        stage, what: which stage, and what it did.
        begin_s, end_s: since the step began.
    """

    stage: int
    what: str
    begin_s: float
    end_s: float


class Recorder:
    """Notes what the stages of a rank do; on CUDA by events of the current stream.

    Args:
        device: of the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start: Any = None
        self._noted: list[tuple[int, str, Any, Any]] = []

    def begin(self) -> None:
        """A step begins."""
        self._noted = []
        self._start = self._now()

    @contextmanager
    def note(self, stage: int, what: str) -> Iterator[None]:
        """Something begins, and ends with the context."""
        begin = self._now()
        yield
        self._noted.append((stage, what, begin, self._now()))

    def end(self) -> list[Stretch]:
        """What was noted; the device must be idle."""
        return [
            Stretch(stage, what, self._since(begin), self._since(end))
            for stage, what, begin, end in self._noted
        ]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if not self._is_cuda:
            return float(moment - self._start)
        return float(self._start.elapsed_time(moment)) / 1e3


def _kind(backward_type: str) -> str:
    return "weights" if backward_type == "weight" else "backward"


class TimedTorchStage(PipelineStage):
    """torch's stage, watched; what it waits for is not to be seen from here."""

    recorder: Recorder

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        with self.recorder.note(self.stage_index, "forward"):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        with self.recorder.note(self.stage_index, _kind(backward_type)):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)


class TimedSpanStage(SpanPipelineStage):
    """Ours, watched."""

    recorder: Recorder

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        with self.recorder.note(self.stage_index, "forward"):
            return super().run_module(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        with self.recorder.note(self.stage_index, _kind(backward_type)):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def receive(self, boundary: Boundary, microbatch: int) -> list[torch.Tensor]:
        """As the original."""
        with self.recorder.note(self.stage_index, "waits for a neighbour"):
            return super().receive(boundary, microbatch)

    def hand_over(self, boundary: Boundary, values: Sequence[Any], left: Sequence[int]) -> None:
        """As the original."""
        with self.recorder.note(self.stage_index, "hands over"):
            super().hand_over(boundary, values, left)


def share_outside(stretches: Sequence[Stretch], step_s: float) -> float:
    """The share of a step in which a rank did not compute."""
    busy = sum(each.end_s - each.begin_s for each in stretches if each.what in COMPUTES)
    return max(0.0, 1 - busy / step_s)


def draw(pictures: Mapping[str, Sequence[Sequence[Stretch]]], path: Path) -> None:
    """A picture for each title, with a line for each stage; needs matplotlib."""
    plots = pyplot()
    figure, axes = plots.subplots(
        len(pictures), 1, figsize=(12, 1.8 * len(pictures) + 1), layout="constrained", squeeze=False
    )
    longest = max(
        (each.end_s for ranks in pictures.values() for rank in ranks for each in rank), default=1.0
    )
    for axis, (title, ranks) in zip(axes[:, 0], pictures.items(), strict=True):
        stages = sorted({each.stage for rank in ranks for each in rank})
        for what, colour in _COLOURS.items():
            for line, stage in enumerate(stages):
                bars = [
                    (each.begin_s * 1e3, (each.end_s - each.begin_s) * 1e3)
                    for rank in ranks
                    for each in rank
                    if each.stage == stage and each.what == what
                ]
                axis.broken_barh(
                    bars, (line - 0.4, 0.8), color=colour, label=what if not line else None
                )
        axis.set_yticks(range(len(stages)), [f"stage {stage}" for stage in stages])
        axis.invert_yaxis()
        axis.set_xlim(0, longest * 1e3)
        axis.set_title(title, fontsize=9)
    axes[-1, 0].set_xlabel("milliseconds")
    axes[0, 0].legend(fontsize=7, loc="lower right", ncols=len(_COLOURS))
    figure.savefig(path, dpi=120)
    plots.close(figure)
