"""``tpspan bench fsdp`` on one rank: the same training by FSDP2 and by FSDP2 over spans.

Both train a model from the same weights on the same tokens, in turns and in rounds, each time built
anew; the losses of all steps must agree before anything is reported. On a GPU they are those of
rounds of their own with torch's deterministic algorithms: without, FSDP2 itself has other losses in
every round. Memory is watched in rounds of their own, too, since watching takes time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpspan
from tpspan.distributed import use_spans
from tpspan.launch.world import World
from tpspan.tools.bench import peak, report
from tpspan.tools.bench.job import in_job
from tpspan.tools.bench.measuring import Bench, Figure
from tpspan.tools.bench.transformer import Transformer, deterministic, next_token_loss
from tpspan.tools.bench.values import WrongValues

SCHEMA = "tpspan-bench-fsdp/1"
VOCABULARY = 1024
_HEAD_WIDTH = 64
_ROUNDS = 3
_WATCHED_STEPS = 3
_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """One round of one contender on this rank.

    Attributes:
        losses: of every step.
        step_s: seconds of every step after the first, in which FSDP2 and the spans are set up.
        peak_nbytes: the most memory beyond the sharded parameters, spans included.
        span_nbytes: of these, this rank's part of the spans.
    """

    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    peak_nbytes: int
    span_nbytes: int


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Join the job and run this rank's part; returns the exit status, the same on all ranks."""
    return in_job(options, lambda world: run(world, options, command_line))


def run(world: World, options: argparse.Namespace, command_line: str) -> None:
    """Measure in a world that exists, and report on rank 0. Collective.

    Raises:
        WrongValues: the two trainings have different losses.
        LaunchError: there is only one rank.
        TpspanError: a span could not be made.
    """
    start = time.perf_counter()
    gc.collect()
    gc.freeze()
    if world.world_size == 1:
        raise tpspan.LaunchError("one rank has nothing to gather: give --ranks 2 or more")
    bench = Bench(world, seconds=options.seconds)
    peer, mesh, note = _mesh(bench)
    rounds: dict[bool, list[Run]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for over_spans in (False, True):
            rounds[over_spans].append(_train(bench, mesh, options, over_spans, options.steps))
    compared = rounds
    if bench.is_cuda:
        with deterministic():
            compared = {
                over_spans: [_train(bench, mesh, options, over_spans, options.steps)]
                for over_spans in (False, True)
            }
    largest = _compare(bench, options, compared)
    watched = {
        over_spans: _train(bench, mesh, options, over_spans, _WATCHED_STEPS, watch=True)
        for over_spans in (False, True)
    }
    _add_times(bench, options, peer, note, rounds, largest)
    _add_memory(bench, options, peer, watched)
    found = report.document(
        world,
        bench.figures,
        None,
        command_line=command_line,
        nbytes=_model_nbytes(options),
        seconds=time.perf_counter() - start,
    )
    found["schema"] = SCHEMA
    found["losses"] = {"fsdp2": compared[False][0].losses, "spans": compared[True][0].losses}
    if world.rank == 0:
        report.print_table(found, bench.figures, None)
        if options.json:
            report.write(found, options.json)
        if options.plot:
            where = found["hardware"]["gpu"] or found["hardware"]["cpu"]
            title = f"tpspan {tpspan.__version__}: FSDP2, {world.world_size} ranks, {where}"
            plot(bench.figures, options.plot, title)
    bench.board.barrier()


def _mesh(bench: Bench) -> tuple[str, DeviceMesh, str]:
    """Who communicates for FSDP2 itself, the mesh over it, and what to say of it."""
    if not bench.is_cuda:
        return "gloo", _mesh_over(torch_distributed.new_group(backend="gloo"), "cpu"), ""
    if bench.shares_device:
        note = "ranks share a GPU, which NCCL refuses: gloo instead, through the host"
        return "gloo", _mesh_over(torch_distributed.new_group(backend="gloo"), "cuda"), note
    return "nccl", _mesh_over(torch_distributed.new_group(backend="nccl"), "cuda"), ""


def _mesh_over(group: Any, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def _build(mesh: DeviceMesh, options: argparse.Namespace, device: torch.device) -> Transformer:
    torch.manual_seed(3)
    dtype = getattr(torch, options.dtype)
    heads = max(1, options.hidden // _HEAD_WIDTH)
    with torch.device(device):
        model = Transformer(options.layers, options.hidden, heads, VOCABULARY).to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(
    bench: Bench,
    mesh: DeviceMesh,
    options: argparse.Namespace,
    over_spans: bool,
    num_steps: int,
    *,
    watch: bool = False,
) -> Run:
    """Build a model, train it and drop it. Collective."""
    world = bench.world
    model = _build(mesh, options, world.device)
    peak.release(bench)
    with peak.watched(bench, watch) as most:
        used = use_spans(model) if over_spans else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, step_s = [], []
        dice = torch.Generator().manual_seed(world.rank)
        for _ in range(num_steps):
            shape = (options.batch, options.seq + 1)
            tokens = torch.randint(VOCABULARY, shape, generator=dice).to(world.device)
            bench.start_together()
            begin = time.perf_counter()
            loss = next_token_loss(model, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            bench.synchronize()
            step_s.append(time.perf_counter() - begin)
            losses.append(float(loss.detach()))
            del loss, tokens
        span_nbytes = 0 if used is None else used.stats().most_nbytes
    if used is not None:
        if used.stats().left:
            raise WrongValues(f"spans do not serve {used.stats().left}")
        used.close()
    del model, optimizer
    return Run(tuple(losses), tuple(step_s[1:]), most[0] + span_nbytes, span_nbytes)


def _compare(bench: Bench, options: argparse.Namespace, rounds: dict[bool, list[Run]]) -> float:
    """Losses first: the largest relative difference of any step on any rank. Collective.

    In fp32 two ranks on the host must agree to the bit, since they can add in one order only.

    Raises:
        WrongValues: it is larger than the order of sums explains; on all ranks.
    """
    is_exact = options.dtype == "float32" and not bench.is_cuda
    tolerance = 2e-2 if not is_exact else 0.0 if bench.world.world_size <= 2 else 1e-6
    differences = [
        abs(mine - other) / max(abs(other), 1e-30)
        for theirs, ours in zip(rounds[False], rounds[True], strict=True)
        for mine, other in zip(ours.losses, theirs.losses, strict=True)
    ]
    largest = bench.agree(max(differences))
    if not largest <= tolerance:
        raise WrongValues(
            f"losses over spans differ from those of FSDP2 itself by up to {largest:.3g} of their "
            f"value, where {tolerance:.3g} is allowed"
        )
    return largest


def _add_times(
    bench: Bench,
    options: argparse.Namespace,
    peer: str,
    note: str,
    rounds: dict[bool, list[Run]],
    largest: float,
) -> None:
    shape = _shape(options)
    group = f"a step of {shape}, {options.batch} x {options.seq} tokens a rank"
    notes = "; ".join(filter(None, [note, bench.crowd]))
    times = {
        over_spans: [each for run in runs for each in run.step_s]
        for over_spans, runs in rounds.items()
    }
    theirs = bench.add_ms(group, f"FSDP2, {peer}", times[False], notes)
    ours = bench.add_ms(group, "FSDP2, spans", times[True], bench.crowd)
    bench.add_ratio(group, "over spans, of FSDP2's", ours, theirs)
    what = f"over {options.steps} steps; 0 means the same bits"
    bench.add(group, "largest relative difference of a loss", "", [largest], note=what)


def _add_memory(
    bench: Bench, options: argparse.Namespace, peer: str, watched: dict[bool, Run]
) -> None:
    group = f"peak memory of a rank, {_shape(options)}"
    how = "torch's reserved memory" if bench.is_cuda else "private memory"
    how += ", and what a rank brings to spans; beyond the sharded parameters"
    first = bench.add(group, f"FSDP2, {peer}", "MiB", [watched[False].peak_nbytes / _MIB], note=how)
    second = bench.add(group, "FSDP2, spans", "MiB", [watched[True].peak_nbytes / _MIB], note=how)
    bench.add(group, "of these in spans", "MiB", [watched[True].span_nbytes / _MIB])
    bench.add_ratio(group, "over spans, of FSDP2's", second, first)


def _shape(options: argparse.Namespace) -> str:
    return f"{options.layers} x {options.hidden}, {options.dtype}"


def _model_nbytes(options: argparse.Namespace) -> int:
    with torch.device("meta"):
        model = Transformer(options.layers, options.hidden, 1, VOCABULARY)
    itemsize = getattr(torch, options.dtype).itemsize
    return sum(each.numel() for each in model.parameters()) * int(itemsize)


def plot(figures: Sequence[Figure], path: Path, title: str) -> None:
    """Draw step times and memory into an image file; needs matplotlib."""
    backend: Any = importlib.import_module("matplotlib")
    backend.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    shown = [each for each in figures if each.name.startswith("FSDP2, ")]
    groups = list(dict.fromkeys(each.group for each in shown))
    figure, axes = pyplot.subplots(1, len(groups), figsize=(10, 4), layout="constrained")
    for axis, group in zip(axes, groups, strict=True):
        bars = [dataclasses.asdict(each) for each in shown if each.group == group]
        heights = [bar["median"] for bar in bars]
        axis.bar([bar["name"] for bar in bars], heights, color=["tab:gray", "tab:blue"])
        for place, bar in enumerate(bars):
            axis.text(place, bar["median"], report.short(bar["median"]), ha="center", va="bottom")
        axis.set_ylabel(bars[0]["unit"])
        axis.set_title(group, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
