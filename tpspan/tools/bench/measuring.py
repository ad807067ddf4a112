"""How everything is measured: all ranks start together, many times, and the slowest rank counts."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from tpspan.launch.world import World
from tpspan.spans import Board, stream_watch
from tpspan.spans.signals import Signals

# Long enough that the host has queued every call before the first one runs.
_AHEAD_CYCLES = 20_000_000
_FAR = 1 << 20

T = TypeVar("T")
Combine = Literal["slowest", "worst median"]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        group, name: what was measured; together unique.
        unit: of all numbers here.
        median, minimum, maximum: over the samples; None if it was left out, and ``note`` says why.
        num_samples: how many.
        slowest_rank: the rank with the worst median.
        rank_medians: of every rank, by rank.
        note: what to know when reading it.
    """

    group: str
    name: str
    unit: str
    median: float | None
    minimum: float | None
    maximum: float | None
    num_samples: int
    slowest_rank: int | None
    rank_medians: tuple[float, ...]
    note: str = ""


def summarise(
    group: str,
    name: str,
    unit: str,
    by_rank: Sequence[Sequence[float]],
    *,
    more_is_better: bool = False,
    combine: Combine = "slowest",
    note: str = "",
) -> Figure:
    """Make a figure of every rank's samples, the same number on each.

    Args:
        by_rank: per rank, its samples in the order in which all ranks took them together.
        more_is_better: a rate, of which the slowest rank has the least.
        combine: ``slowest`` takes the slowest rank of every sample; ``worst median`` takes all
            samples of the rank with the worst median, for differences around zero, where the worst
            of each sample would be the noise.
    """
    if not by_rank or not by_rank[0] or len({len(samples) for samples in by_rank}) != 1:
        raise ValueError(f"{group}, {name}: every rank must give as many samples, at least one")
    worst = min if more_is_better else max
    medians = tuple(statistics.median(samples) for samples in by_rank)
    slowest_rank = medians.index(worst(medians))
    if combine == "slowest":
        samples = [worst(together) for together in zip(*by_rank, strict=True)]
    else:
        samples = list(by_rank[slowest_rank])
    return Figure(
        group,
        name,
        unit,
        statistics.median(samples),
        min(samples),
        max(samples),
        len(samples),
        slowest_rank,
        medians,
        note,
    )


@contextlib.contextmanager
def _far_ahead() -> Iterator[None]:
    """Let the host go on while its stream has much before it: the stream alone is timed."""
    before = stream_watch.ROOM
    stream_watch.ROOM = _FAR
    try:
        yield
    finally:
        stream_watch.ROOM = before


class Bench:
    """Measures in one world and collects the figures. Every call is collective.

    Args:
        world: the ranks.
        seconds: about how long one figure may take.
    """

    def __init__(self, world: World, *, seconds: float) -> None:
        self.world = world
        self.board = Board.of(world)
        self.shares_device = any(self.board.all_gather(world.shares_device))
        self.seconds = seconds
        self.figures: list[Figure] = []

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device with streams."""
        return self.world.backend == "cuda"

    @property
    def crowd(self) -> str:
        """A note if the ranks of this host outnumber its cores; otherwise nothing."""
        cores, ranks = len(os.sched_getaffinity(0)), self.world.local_world_size
        return f"{ranks} ranks take turns on {cores} cores" if ranks > cores else ""

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.world.device)

    def start_together(self) -> None:
        """Let no rank go on before all are here and their devices idle."""
        self.synchronize()
        self.board.barrier()

    def agree(self, value: float) -> float:
        """The largest value that a rank gave."""
        return max(self.board.all_gather(value))

    def num_repeats(self, once_s: float, *, least: int, most: int) -> int:
        """How often all ranks repeat what took this one ``once_s``."""
        return int(min(most, max(least, self.seconds / max(self.agree(once_s), 1e-6))))

    def sample(
        self,
        once: Callable[[], T],
        *,
        least: int = 5,
        most: int = 200,
        in_turns: bool = False,
    ) -> list[T]:
        """Call ``once`` many times on all ranks, started together each time, after a warm-up.

        Args:
            once: measures itself; on CUDA all ranks' devices are idle when it is called.
            least, most: number of samples, whatever the time.
            in_turns: instead one rank after the other, while the others wait on the host.
        """
        began = 0.0
        for _ in range(2):
            self.start_together()
            began = time.perf_counter()
            once()
            self.synchronize()
        took_s = time.perf_counter() - began
        num = self.num_repeats(took_s, least=least, most=most)
        samples = []
        gc.collect()
        gc.disable()
        try:
            if not in_turns:
                for _ in range(num):
                    self.start_together()
                    samples.append(once())
            for rank in range(self.world.world_size if in_turns else 0):
                self.start_together()
                while rank == self.world.rank and len(samples) < num:
                    samples.append(once())
                    self.synchronize()
        finally:
            gc.enable()
        self.start_together()
        return samples

    def wall(self, body: Callable[[], object], num_calls: int = 1) -> Callable[[], float]:
        """Seconds of one of ``num_calls`` calls by the host's clock, the device's work included."""

        def once() -> float:
            start = time.perf_counter()
            for _ in range(num_calls):
                body()
            self.synchronize()
            return (time.perf_counter() - start) / num_calls

        return once

    def on_stream(self, body: Callable[[], object], num_calls: int = 1) -> Callable[[], float]:
        """Seconds of one of ``num_calls`` calls on the current stream; on the host as ``wall``."""
        if not self.is_cuda:
            return self.wall(body, num_calls)

        def once() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(num_calls):
                body()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / num_calls

        return once

    def queued(
        self, body: Callable[[], object], num_calls: int, num_before: int, *, meets: bool = True
    ) -> tuple[float, float]:
        """Seconds of one of ``num_calls`` calls queued ahead on the stream, and of one on the host.

        On ranks that share a GPU an event, other than a barrier, waits for the time slice of its
        process: the first comes late, and so does the last, by up to 0.6 ms with four ranks. So
        there a shorter train is taken off one that is many such turns longer, and the host may be
        as far ahead as that takes. Which rank's events come late differs from train to train, and
        only the slowest has seen all of it: its time is that of every rank.

        Args:
            num_calls, num_before: so many calls are timed, and so many go before, at least one:
                they take up what the ranks started apart, and nothing holds the host in them yet.
            meets: whether ranks wait for each other in a call; if not, nothing is taken off.
        """

        def train(num: int) -> tuple[float, float]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[attr-defined]
            start = time.perf_counter()
            for _ in range(num_before):
                body()
            host_s = time.perf_counter() - start
            begin.record()
            for _ in range(num):
                body()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3, host_s / num_before

        num_off = num_calls // 5 if self.shares_device and meets else 0
        if not num_off:
            whole_s, host_s = train(num_calls)
            return whole_s / num_calls, host_s
        with _far_ahead():
            off_s = self.agree(train(num_off)[0])
            self.start_together()
            whole_s, host_s = train(num_calls)
        return (self.agree(whole_s) - off_s) / (num_calls - num_off), host_s

    def begun_together(self, body: Callable[[], object], num_calls: int) -> float:
        """Seconds of a call that the devices of all ranks begin together. For a GPU each.

        A barrier of the streams goes before each of ``num_calls``, and all are queued before the
        first begins. The slowest rank of a call counts, and of all calls the median.
        """
        signals = Signals.of(self.world)
        stream = torch.cuda.current_stream(self.world.device).cuda_stream
        slot = signals.acquire()
        spans = []
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[attr-defined]
        for _ in range(num_calls):
            signals.barrier(slot, stream)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            body()
            end.record()
            spans.append((begin, end))
        self.synchronize()
        took = self.board.all_gather([begin.elapsed_time(end) / 1e3 for begin, end in spans])
        signals.release(slot)
        return statistics.median(map(max, zip(*took, strict=True)))

    def add(
        self,
        group: str,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        more_is_better: bool = False,
        combine: Combine = "slowest",
        note: str = "",
    ) -> Figure:
        """Gather every rank's samples into a figure."""
        figure = summarise(
            group,
            name,
            unit,
            self.board.all_gather(list(samples)),
            more_is_better=more_is_better,
            combine=combine,
            note=note,
        )
        self.figures.append(figure)
        return figure

    def add_us(self, group: str, name: str, samples_s: Sequence[float], note: str = "") -> Figure:
        """``add`` of seconds, shown in microseconds."""
        return self.add(group, name, "us", [sample * 1e6 for sample in samples_s], note=note)

    def add_ms(self, group: str, name: str, samples_s: Sequence[float], note: str = "") -> Figure:
        """``add`` of seconds, shown in milliseconds."""
        return self.add(group, name, "ms", [sample * 1e3 for sample in samples_s], note=note)

    def add_rate(
        self, group: str, name: str, nbytes: int, samples_s: Sequence[float], note: str = ""
    ) -> Figure:
        """``add`` of a rate in GB/s."""
        rates = [nbytes / sample / 1e9 for sample in samples_s]
        return self.add(group, name, "GB/s", rates, more_is_better=True, note=note)

    def add_ratio(self, group: str, name: str, over: Figure, under: Figure, note: str = "") -> None:
        """How many times larger one figure is than another of the same unit."""
        if not (over.median and over.minimum and over.maximum):
            return
        if not (under.median and under.minimum and under.maximum):
            return
        self.figures.append(
            Figure(
                group,
                name,
                "x",
                over.median / under.median,
                over.minimum / under.maximum,
                over.maximum / under.minimum,
                min(over.num_samples, under.num_samples),
                None,
                (),
                note,
            )
        )

    def leave_out(self, group: str, name: str, unit: str, reason: str) -> None:
        """Say why a figure is not there."""
        self.figures.append(Figure(group, name, unit, None, None, None, 0, None, (), reason))
