"""Stages of torch's pipelines that hand over, compared with torch's own stages."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from bodies.common import failure
from bodies.process_groups import process_group
from tpspan.errors import PeerError
from tpspan.launch.world import World
from tpspan.parallel.pipeline import SpanPipelineStage, fit_rings
from tpspan.tools.bench import peak
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.pipeline_model import (
    Piece,
    loss_of,
    make_stages,
    stage_numbers,
)
from tpspan.tools.bench.transformer import Transformer

schedules: Any = _schedules
VOCABULARY = 61
LAYERS = 12


def backend_of(world: World) -> str:
    """Who carries what torch's own stages send: NCCL refuses ranks that share a GPU."""
    if world.backend == "host":
        return "gloo"
    return "tpspan" if any(world.control.all_gather(world.shares_device)) else "nccl"


def train(
    world: World,
    kind: type,
    name: str,
    /,
    *,
    num_steps: int = 20,
    num_layers: int = LAYERS,
    hidden: int = 16,
    seq: int = 8,
    batch: int = 1,
    num_microbatches: int | None = None,
    fitted: bool = True,
    group: Any = None,
    num_ranks: int | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    watch: Callable[[list[Any]], None] = lambda stages: None,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Losses of every microbatch on the last stage's rank, and the counts of this rank's stages."""
    size = num_ranks or world.world_size
    rank = world.rank if group is None else group.rank()
    schedule_class = getattr(schedules, name)
    numbers, num_stages = stage_numbers(schedule_class, rank, size)
    torch.manual_seed(3)
    model = Transformer(num_layers, hidden, 2, VOCABULARY).to(world.device)
    number_of = num_microbatches or 2 * size
    stages = make_stages(
        kind, model, numbers, num_stages, world.device, group=group, wrap=wrap, **options
    )
    single = schedule_class in (schedules.ScheduleGPipe, schedules.Schedule1F1B)
    schedule = schedule_class(stages[0] if single else stages, number_of, loss_fn=loss_of)
    if fitted and issubclass(kind, SpanPipelineStage):
        fit_rings(schedule)
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    losses_of_steps = []
    for step in range(num_steps):
        dice = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (batch * number_of, seq + 1), generator=dice)
        tokens = tokens.to(world.device)
        arguments = (tokens[:, :-1].contiguous(),) if 0 in numbers else ()
        losses: list[torch.Tensor] = []
        more: dict[str, Any] = {}
        if num_stages - 1 in numbers:
            more = {"target": tokens[:, 1:].contiguous(), "losses": losses}
        schedule.step(*arguments, **more)
        optimizer.step()
        optimizer.zero_grad()
        losses_of_steps.append([float(each.detach()) for each in losses])
    watch(stages)
    counts = [stage.stats() for stage in stages] if issubclass(kind, SpanPipelineStage) else []
    if issubclass(kind, SpanPipelineStage):
        for stage in reversed(stages):  # one closes all that this rank has
            stage.close()
            stage.close()
    return losses_of_steps, counts


def trained_alike(
    world: World, name: str, num_steps: int = 20, fitted: bool = True, direct: bool | None = True
) -> None:
    with process_group(world, backend_of(world)):
        # Older releases send from a rank to itself to begin with in V-shaped schedules, which gloo
        # cannot. The same stages, placed otherwise, have the same losses, on another rank.
        other = name
        if name == "ScheduleZBVZeroBubble" and not hasattr(PipelineStage, "_warmup_forward_vote"):
            other = "ScheduleInterleavedZeroBubble"
        theirs, _ = train(world, PipelineStage, other, num_steps=num_steps)
        more: dict[str, Any] = {"num_steps": num_steps, "fitted": fitted, "direct": direct}
        ours, counts = train(world, SpanPipelineStage, name, **more)
    of_ranks = world.control.all_gather((theirs, ours))
    assert [pair[1] for pair in of_ranks if pair[1][0]] == [
        pair[0] for pair in of_ranks if pair[0][0]
    ]
    one = 16 * 8 * 4  # of an activation
    in_place = direct or (direct is None and world.backend == "cuda")
    for each in counts:
        assert each.copied_nbytes in (0, one) or not in_place  # the first of a stage is watched
        assert each.direct_nbytes == 0 or in_place
        assert each.direct_nbytes % one == 0 and each.gradient_nbytes % one == 0
    written = sum(each.direct_nbytes for each in counts)
    copied = sum(each.copied_nbytes for each in counts)
    assert written >= 20 * copied or num_steps < 20 or not in_place
    told = world.control.all_gather((sum(c.num_sent for c in counts), theirs))
    num_received = world.control.all_gather(sum(each.num_received for each in counts))
    assert sum(sent for sent, _ in told) == sum(num_received) > 0
    assert any(losses[-1] and losses[0] != losses[-1] for _, losses in told)


class Noting(SpanPipelineStage):
    """Notes what the weights' gradients are when those of the inputs are handed over."""

    def hand_over(self, boundary: Any, values: Any, left: Any) -> None:
        super().hand_over(boundary, values, left)
        if boundary is self._before:
            self.noted = [None if p.grad is None else p.grad.clone() for p in self.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.submod.parameters())


def split_last(world: World, hooked: bool) -> None:
    """The same losses; gradients leave before the weights have theirs, unless hooks wait for it."""
    called: list[Any] = []

    def hook(module: nn.Module) -> nn.Module:
        for parameter in module.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(called.append)
        return module

    later: list[bool] = []

    def watch(stages: list[Any]) -> None:
        stage = stages[0]
        x = torch.zeros(num_microbatches, 8, dtype=torch.int64, device=world.device)
        schedule = schedules.Schedule1F1B(stage, num_microbatches, loss_fn=loss_of)
        schedule.step(*((x,) if stage.is_first else ()), **({"target": x} if stage.is_last else {}))
        if not stage.is_first:
            scaled = [each if each is None else each / num_microbatches for each in stage.noted]
            pairs = zip(scaled, stage.parameters(), strict=True)
            later.append(any(a is None or not a.equal(p.grad) for a, p in pairs))

    num_microbatches = 2 * world.world_size
    more: dict[str, Any] = {"num_steps": 4, "wrap": hook}
    with process_group(world, backend_of(world)):
        theirs, _ = train(world, PipelineStage, "Schedule1F1B", num_steps=4)
        ours, _ = train(world, Noting, "Schedule1F1B", watch=watch, split_last=True, **more)
    assert ours == theirs
    assert later == ([] if world.rank == 0 else [not hooked])
    assert bool(called) == hooked


def given_back(world: World) -> None:
    held = []
    with process_group(world, backend_of(world)):
        for _ in range(4):
            train(world, SpanPipelineStage, "Schedule1F1B", num_steps=2)
            gc.collect()
            maps = Path("/proc/self/maps").read_text().count("/memfd:")
            held.append((maps, len(list(Path("/proc/self/fd").iterdir()))))
    assert held[2:] == held[1:2] * 2, held


def without_more_memory(world: World) -> None:
    """Private memory at its most, and for our stage its rings, which are not private."""
    bench = Bench(world, seconds=0.1)
    # an activation of 2 MiB, a page
    sizes: dict[str, Any] = {"num_layers": 3, "seq": 16, "batch": 2048, "num_microbatches": 8}
    most: dict[type, int] = {}
    with process_group(world, backend_of(world)):
        for kind in (PipelineStage, SpanPipelineStage):
            rings = [0]

            def rings_of(stages: list[Any], rings: list[int] = rings) -> None:
                if isinstance(stages[0], SpanPipelineStage):
                    rings[0] = sum(stage.ring_nbytes() for stage in stages)

            for _ in range(4):  # what malloc gives back in time varies
                peak.release(bench)
                with peak.watched(bench, True) as found:
                    train(world, kind, "Schedule1F1B", num_steps=2, watch=rings_of, **sizes)
                most[kind] = min(most.get(kind, found[0] + rings[0]), found[0] + rings[0])
    assert most[SpanPipelineStage] <= most[PipelineStage], most


class Several(nn.Module):
    """Two outputs of different types, and an input that is handed on as it is."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, *inputs: torch.Tensor) -> Any:
        x, scale = inputs[0], inputs[-1]
        y = self.wide(x) * scale
        if len(inputs) == 3:
            y = y + inputs[1].double().sum().float()
        if self.is_last:
            return y
        return y, self.narrow(x).to(torch.bfloat16), scale


def several_tensors(world: World) -> None:
    def run(kind: type) -> list[Any]:
        torch.manual_seed(world.rank)
        first, last = world.rank == 0, world.rank == world.world_size - 1
        module = Several(first, last).to(world.device)
        options = {"direct": True} if kind is SpanPipelineStage else {}
        stage = kind(module, world.rank, world.world_size, world.device, **options)
        schedule = schedules.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        found: list[Any] = []
        for step in range(3):
            torch.manual_seed(step)
            x, scale = torch.randn(8, 8).to(world.device), torch.rand(8, 8).to(world.device)
            losses: list[torch.Tensor] = []
            more = {"target": torch.ones_like(x), "losses": losses} if last else {}
            schedule.step(*((x, scale) if first else ()), **more)
            found.append([float(each.detach()) for each in losses])
            gradients = [parameter.grad for parameter in module.parameters()]
            found += [None if each is None else each.tolist() for each in gradients]
        if kind is SpanPipelineStage:
            counts = stage.stats()
            assert last or (counts.direct_nbytes > 0 and counts.copied_nbytes > 0)
            stage.close()
        return found

    with process_group(world, backend_of(world)):
        assert run(SpanPipelineStage) == run(PipelineStage)


def without_backward(world: World) -> None:
    """Forward alone, the last stage handing its input through; then training on the same stages."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if torch.is_grad_enabled() else x

    def run(kind: type) -> list[Any]:
        torch.manual_seed(world.rank)
        last = world.rank == world.world_size - 1
        module = (Last() if last else nn.Linear(4, 4)).to(world.device)
        stage = kind(module, world.rank, world.world_size, world.device)
        evaluation = schedules._ScheduleForwardOnly(stage, 6)
        x = torch.arange(48.0).reshape(12, 4).to(world.device)
        given = (x,) if world.rank == 0 else ()
        with torch.no_grad():
            outputs = [evaluation.step(*given) for _ in range(3)]
        training = schedules.ScheduleGPipe(stage, 6, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        training.step(*given, **({"target": x, "losses": losses} if last else {}))
        if kind is SpanPipelineStage:
            stage.close()
        return [
            [each.tolist() for each in outputs if each is not None],
            [float(each.detach()) for each in losses],
        ]

    with process_group(world, backend_of(world)):
        assert run(SpanPipelineStage) == run(PipelineStage)


def gradients_that_come_in_whole(world: World) -> None:
    """A parameter of the output's shape, whose gradient is the very tensor that came in."""
    schedule_class = schedules.ScheduleInterleavedZeroBubble
    num_microbatches = 2 * world.world_size

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.shift

    def module_of(number: int) -> nn.Module:
        torch.manual_seed(number)
        return Shifted().to(world.device)

    numbers, num_stages = stage_numbers(schedule_class, world.rank, world.world_size)
    x = torch.arange(8.0 * num_microbatches).reshape(-1, 4).to(world.device) / 100
    with process_group(world, backend_of(world)):
        modules = [module_of(number) for number in numbers]
        stages = [
            SpanPipelineStage(module, number, num_stages, world.device)
            for module, number in zip(modules, numbers, strict=True)
        ]
        schedule = schedule_class(stages, num_microbatches, loss_fn=nn.functional.mse_loss)
        fit_rings(schedule)
        more = {"target": x} if num_stages - 1 in numbers else {}
        schedule.step(*((x,) if 0 in numbers else ()), **more)
        whole = nn.Sequential(*(module_of(number) for number in range(num_stages)))
        for part in x.split(2):
            loss = nn.functional.mse_loss(whole(part), part)
            (loss / num_microbatches).backward()  # type: ignore[no-untyped-call]
        for number, module in zip(numbers, modules, strict=True):
            pairs = zip(module.parameters(), whole[number].parameters(), strict=True)
            for mine, other in pairs:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7)
        stages[0].close()


def other_axes(world: World, kind: str) -> None:
    """Two stages; within each the parameters are sharded, or the products are, over two ranks."""
    with process_group(world, backend_of(world)):
        mesh: DeviceMesh = init_device_mesh(
            world.device.type, (2, 2), mesh_dim_names=("pp", "inner")
        )
        inner = mesh["inner"]

        def shard(module: nn.Module) -> nn.Module:
            assert isinstance(module, Piece)
            if kind == "fsdp":
                for block in module.blocks:
                    fully_shard(block, mesh=inner)
                fully_shard(module, mesh=inner)
                return module
            for block in module.blocks:
                plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, inner, plan)
            return module

        group = mesh["pp"].get_group()
        more: dict[str, Any] = {"group": group, "num_ranks": 2, "wrap": shard, "num_steps": 4}
        theirs, _ = train(world, PipelineStage, "Schedule1F1B", **more)
        ours, counts = train(world, SpanPipelineStage, "Schedule1F1B", **more)
        assert ours == theirs
        assert sum(each.num_sent for each in counts) == 4 * 4
        world.control.barrier()


def several_domains(world: World) -> None:
    """Neighbours that cannot map each other's memory: torch sends, as without us."""
    with process_group(world, backend_of(world)):
        theirs, _ = train(world, PipelineStage, "ScheduleInterleaved1F1B", num_steps=3)
        apart = world.subset(range(world.world_size))
        half = apart.world_size // 2
        apart.domain = tuple(each for each in apart.domain if (each < half) == (apart.rank < half))
        ours, counts = train(
            world, SpanPipelineStage, "ScheduleInterleaved1F1B", num_steps=3, world=apart
        )
        assert ours == theirs
        assert (sum(each.num_sent for each in counts) > 0) == (world.world_size > 2)
        world.control.barrier()
        apart.close()


def dies(world: World, victim: int, phase: str) -> str:
    """One rank ends in the second step; the others' steps end before the deadline."""
    deadly = []

    class Fatal(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            if "forward" in deadly:
                os._exit(9)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if "backward" in deadly:
                os._exit(9)
            return gradient

    # Left as it is: a group that has lost a rank is not to be destroyed in good order.
    group = process_group(world, backend_of(world))
    group.__enter__()
    torch.manual_seed(world.rank)
    first, last = world.rank == 0, world.rank == world.world_size - 1
    module = nn.Linear(4, 4).to(world.device)
    module.register_forward_hook(lambda module, args, output: Fatal.apply(output))
    stage = SpanPipelineStage(module, world.rank, world.world_size, world.device, timeout_s=4.0)
    schedule = schedules.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 4).to(world.device)

    def step() -> None:
        schedule.step(*((x,) if first else ()), **({"target": x} if last else {}))

    step()
    if world.rank == victim:
        deadly.append(phase)
    begin = time.monotonic()
    error = failure(step)
    took_s = time.monotonic() - begin
    assert isinstance(error, PeerError), error
    assert took_s < 20.0, took_s
    stage.close(force=True)
    stage.close(force=True)
    _kept.append(group)
    return str(error)


_kept: list[Any] = []
