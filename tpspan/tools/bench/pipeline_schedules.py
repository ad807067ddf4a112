"""``tpspan bench pipeline --schedules`` on one rank: training in stages, torch's and ours.

Both train a transformer from the same weights on the same tokens, step by step in turns; the losses
of all steps must agree before anything is reported, on CUDA those of steps of their own. Memory is
watched in runs of their own, too. Models of several sizes show where handing over matters, and
where computing is all there is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed.pipelining import schedules as _schedules

import tpspan
from tpspan.launch.world import World
from tpspan.parallel.pipeline import SpanPipelineStage, fit_rings
from tpspan.tools.bench import peak, report
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench, Figure, summarise
from tpspan.tools.bench.pipeline_floor import least_s
from tpspan.tools.bench.pipeline_model import loss_of, make_stages, stage_numbers
from tpspan.tools.bench.pipeline_report import Row, print_rows
from tpspan.tools.bench.pipeline_timeline import (
    Recorder,
    Stretch,
    TimedSpanStage,
    TimedTorchStage,
    draw,
    share_outside,
)
from tpspan.tools.bench.transformer import Transformer, deterministic
from tpspan.tools.bench.values import WrongValues

SCHEMA = "tpspan-bench-pipeline-schedules/2"
VOCABULARY = 1024
_HEAD_WIDTH = 64
_MODELS = {  # hidden x sequence
    "host": ((64, 8), (64, 32), (128, 32), (128, 128), (256, 128)),
    "cuda": ((128, 128), (512, 512), (2048, 1024)),
}
_FEWEST_STEPS, _MOST_STEPS, _STEPS_S = 20, 100, 20.0
_WATCHED_STEPS = 3
_WATCHED_RUNS = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SMALLEST_PIECE_NBYTES = 128 << 10  # what malloc begins with, and where it ends
_LARGEST_PIECE_NBYTES = 32 << 20
_MIB = 1 << 20
schedules: Any = _schedules

CLASSES: dict[str, type] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


@dataclass
class Contender:
    """A model in stages, and what was measured of it.

    Attributes:
        name: for people.
        stages, schedule, optimizer: of this rank.
        recorder: notes what the stages do.
        losses: of every microbatch, on the last stage's rank.
        step_s: seconds of every step after the first.
        outside: of each such step the share in which this rank did not compute.
        steps: what it did in each such step.
    """

    name: str
    stages: list[Any]
    schedule: Any
    optimizer: Any
    recorder: Recorder
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    steps: list[list[Stretch]] = field(default_factory=list)


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: the two trainings have different losses.
        LaunchError: there is only one rank.
    """
    start = time.perf_counter()
    if world.world_size == 1:
        raise tpspan.LaunchError("one rank has nothing to hand over: give --ranks 2 or more")
    gc.collect()
    gc.freeze()  # collections between the steps need not walk torch's modules
    bench = Bench(world, seconds=options.seconds)
    peer, group = _peer(bench)
    names = (f"torch's stage, {peer}", "hand-overs")
    each = [
        (name, argparse.Namespace(**{**vars(options), "hidden": hidden, "seq": seq}))
        for name in options.schedules
        for hidden, seq in models(options, world.backend)
    ]
    _let_malloc_keep(bench, _SMALLEST_PIECE_NBYTES)
    # before there is anything for malloc to keep
    memory = [_add_memory(bench, chosen, name, group, names) for name, chosen in each]
    _let_malloc_keep(bench, _LARGEST_PIECE_NBYTES)
    pictures: dict[str, list[list[Stretch]]] = {}
    rows = [
        _measure(bench, chosen, name, group, names, of_memory, pictures)
        for (name, chosen), of_memory in zip(each, memory, strict=True)
    ]
    found = report.document(
        world,
        bench.figures,
        None,
        command_line=command_line,
        nbytes=max(row.activation_nbytes for row in rows),
        seconds=time.perf_counter() - start,
    )
    found["schema"] = SCHEMA
    found["rows"] = [asdict(row) for row in rows]
    if world.rank == 0:
        report.print_table(found, bench.figures, None)
        print_rows(rows, peer)
        if options.json:
            report.write(found, options.json)
        if options.timeline:
            draw(pictures, options.timeline)
    bench.board.barrier()


def models(options: argparse.Namespace, backend: str) -> tuple[tuple[int, int], ...]:
    """Hidden and sequence of every model: those asked for, or some sizes."""
    chosen: tuple[tuple[int, int], ...] = options.models or _MODELS[backend]
    return chosen


def _measure(
    bench: Bench,
    options: argparse.Namespace,
    name: str,
    group: Any,
    names: tuple[str, str],
    memory: float | None,
    pictures: dict[str, list[list[Stretch]]],
) -> Row:
    """Train both in turns, and add what was seen."""
    if bench.is_cuda:
        _compare_deterministic(bench, options, name, group)
    pair = [_build(bench, options, name, ours, group) for ours in (False, True)]
    num_steps, step = 2, 0
    while step < num_steps:
        begin = time.perf_counter()
        for contender in pair[:: 1 if step % 2 else -1]:
            _step(bench, options, contender, step)
        if step == 1:
            took_s = bench.agree(time.perf_counter() - begin)
            num_steps = 1 + (options.steps or _num_steps(took_s))
        step += 1
    if not bench.is_cuda:
        _compare(bench, pair)
    notes = f"losses equal; {bench.crowd}".rstrip("; ")
    title = f"{name}, {_shape(options)}"
    times = [
        bench.add_ms(f"a step of {title}", shown, one.step_s, notes)
        for shown, one in zip(names, pair, strict=True)
    ]
    ratio = _add_ratio(bench, f"a step of {title}", pair)
    computing = _add_floor(bench, title, pair, times)
    for shown, one in zip(names, pair, strict=True):
        shares = bench.board.all_gather(statistics.median(one.outside))
        mean = 100 * sum(shares) / len(shares)
        what = "of a step in which a stage does not compute, averaged over the ranks"
        bench.add(f"bubble of {title}", shown, "%", [mean], note=what)
        picture = f"{name}, {options.hidden} x {options.seq}: {shown}"
        pictures[picture] = bench.board.all_gather(one.steps[-1])
    for one in pair:
        _close(one)
    itemsize = _dtype(options, bench.world).itemsize
    return Row(
        name,
        options.hidden,
        options.seq,
        options.batch * options.seq * options.hidden * itemsize,
        times[0].median or 0.0,
        times[1].median or 0.0,
        ratio,
        computing,
        memory,
    )


def _num_steps(took_s: float) -> int:
    return int(min(_MOST_STEPS, max(_FEWEST_STEPS, _STEPS_S / max(took_s, 1e-6))))


def _add_ratio(bench: Bench, title: str, pair: list[Contender]) -> float:
    """Our steps by torch's right beside them; what slows the machine down slows both of a pair."""
    theirs, ours = (list(zip(*bench.board.all_gather(one.step_s), strict=True)) for one in pair)
    ratios = [max(mine) / max(other) for mine, other in zip(ours, theirs, strict=True)]
    note = "of each step beside torch's; median"
    figure = summarise(title, "hand-overs, of torch's", "x", [ratios], note=note)
    bench.figures.append(replace(figure, slowest_rank=None, rank_medians=()))
    return figure.median or 0.0


def _peer(bench: Bench) -> tuple[str, Any]:
    if not bench.is_cuda:
        return "gloo", torch_distributed.new_group(backend="gloo")
    if bench.shares_device:
        return "gloo through the host", torch_distributed.new_group(backend="tpspan")
    return "nccl", torch_distributed.new_group(backend="nccl")


def _build(
    bench: Bench, options: argparse.Namespace, name: str, ours: bool, group: Any
) -> Contender:
    world = bench.world
    schedule_class = CLASSES[name]
    numbers, num_stages = stage_numbers(schedule_class, world.rank, world.world_size)
    torch.manual_seed(3)
    heads = max(1, options.hidden // _HEAD_WIDTH)
    with torch.device(world.device):
        model = Transformer(options.layers, options.hidden, heads, VOCABULARY)
        model = model.to(_dtype(options, world))
    kind = TimedSpanStage if ours else TimedTorchStage
    more: dict[str, Any] = {"split_last": True} if ours and options.split_last else {}
    stages = make_stages(kind, model, numbers, num_stages, world.device, group=group, **more)
    del model
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    schedule = schedule_class(
        stages[0] if single else stages, options.microbatches, loss_fn=loss_of
    )
    if ours:
        fit_rings(schedule)
    recorder = Recorder(world.device)
    for stage in stages:
        stage.recorder = recorder
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return Contender(name, stages, schedule, optimizer, recorder)


def _step(bench: Bench, options: argparse.Namespace, one: Contender, step: int) -> None:
    """A step of training; the first, in which channels are made, is not counted. Collective."""
    device = bench.world.device
    dice = torch.Generator().manual_seed(step)
    shape = (options.batch * options.microbatches, options.seq + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=dice).to(device)
    losses: list[torch.Tensor] = []
    given: tuple[torch.Tensor, ...] = ()
    more: dict[str, Any] = {}
    if any(stage.is_first for stage in one.stages):
        given = (tokens[:, :-1].contiguous(),)
    if any(stage.is_last for stage in one.stages):
        more = {"target": tokens[:, 1:].contiguous(), "losses": losses}
    bench.start_together()
    one.recorder.begin()
    begin = time.perf_counter()
    one.schedule.step(*given, return_outputs=False, **more)
    bench.synchronize()
    seconds = time.perf_counter() - begin
    did = one.recorder.end()
    one.optimizer.step()
    one.optimizer.zero_grad()
    one.losses += [float(each.detach()) for each in losses]
    if step:
        one.step_s.append(seconds)
        one.steps.append(did)
        one.outside.append(share_outside(did, seconds))


def _add_floor(bench: Bench, title: str, pair: list[Contender], times: list[Figure]) -> float:
    """How much of the steps is computing in the schedule's order, which no hand-over shortens.

    Returns:
        Of torch's steps.
    """
    shares = []
    note = "what the stages computed in these steps, as if handing over took no time"
    for one, time_of, whose in zip(pair, times, ("torch's stage", "hand-overs"), strict=True):
        of_steps = zip(*bench.board.all_gather(one.steps), strict=True)
        least = [least_s(ranks) for ranks in of_steps]
        floor = bench.add_ms(f"a step of {title}", f"{whose}, computing alone", least, note)
        shown = f"computing alone, of {whose}"
        bench.add_ratio(f"a step of {title}", shown, floor, time_of)
        shares.append((floor.median or 0.0) / (time_of.median or 1.0))
    return shares[0]


def _compare_deterministic(
    bench: Bench, options: argparse.Namespace, name: str, group: Any
) -> None:
    """Train both a few steps with torch's deterministic algorithms, and compare their losses.

    Without them a GPU makes some sums in whatever order its blocks come, and two trainings of
    torch's own have different losses.

    Raises:
        WrongValues: a loss differs; on all ranks.
    """
    with deterministic():
        pair = [_build(bench, options, name, ours, group) for ours in (False, True)]
        for step in range(options.steps or _FEWEST_STEPS):
            for contender in pair:
                _step(bench, options, contender, step)
    _compare(bench, pair)
    for one in pair:
        _close(one)


def _compare(bench: Bench, pair: list[Contender]) -> None:
    """On the host to the bit; on a GPU sums may still be made in another order.

    Raises:
        WrongValues: a loss differs; on all ranks.
    """
    theirs, ours = (one.losses for one in pair)
    differences = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(theirs, ours, strict=True)]
    largest = bench.agree(max(differences, default=0.0))
    if not largest <= (1e-6 if bench.is_cuda else 0.0):
        raise WrongValues(f"{pair[0].name}: losses differ by up to {largest:.3g} of their value")


def _let_malloc_keep(bench: Bench, nbytes: int) -> None:
    """Let malloc keep freed pieces up to this size, and give larger ones back at once.

    By itself it comes to keep larger and larger ones, which saves time; but it lets the peaks of
    equal runs differ by tens of MiB, more than what a pipeline sends.
    """
    if not bench.is_cuda:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, nbytes)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * nbytes)  # as malloc does


def _add_memory(
    bench: Bench, options: argparse.Namespace, name: str, group: Any, names: tuple[str, str]
) -> float | None:
    """The most memory of a schedule's ranks, for both; the best of a few runs counts.

    Returns:
        Ours, of torch's.
    """
    title = f"peak memory of {name}, {_shape(options)}"
    how = "torch's reserved memory" if bench.is_cuda else "private memory"
    how += " and the rings, beyond what was there before the model"
    seen: dict[bool, list[int]] = {False: [], True: []}
    for _ in range(_WATCHED_RUNS):
        for ours, found in seen.items():
            found.append(_most(bench, options, name, ours, group))
    figures = [
        bench.add(title, shown, "MiB", [min(found) / _MIB], note=how)
        for shown, found in zip(names, seen.values(), strict=True)
    ]
    bench.add_ratio(title, "hand-overs, of torch's", figures[1], figures[0])
    of_torch, of_ours = (figure.median or 0.0 for figure in figures)
    return of_ours / of_torch if of_torch else None


def _most(bench: Bench, options: argparse.Namespace, name: str, ours: bool, group: Any) -> int:
    """The most memory of this rank in a few steps."""
    peak.release(bench)
    with peak.watched(bench, True) as found:
        one = _build(bench, options, name, ours, group)
        for step in range(_WATCHED_STEPS):
            _step(bench, options, one, step)
    rings = sum(stage.ring_nbytes() for stage in one.stages) if ours else 0
    _close(one)
    return found[0] + rings


def _close(one: Contender) -> None:
    for stage in one.stages:
        if isinstance(stage, SpanPipelineStage):
            stage.close()


def _dtype(options: argparse.Namespace, world: World) -> torch.dtype:
    named: torch.dtype = getattr(
        torch, options.dtype or ("float32" if world.backend == "host" else "bfloat16")
    )
    return named


def _shape(options: argparse.Namespace) -> str:
    rows = f"{options.microbatches} microbatches of {options.batch} x {options.seq}"
    return f"{options.layers} x {options.hidden}, {rows}"
