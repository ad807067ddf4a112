"""Pipelines of models that are more than a row of layers: shared parameters, skip connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bodies.pipeline import LAYERS, VOCABULARY, backend_of
from bodies.process_groups import process_group
from tpspan import share_parameters
from tpspan.launch.world import World
from tpspan.parallel.pipeline import SpanPipelineStage, fit_rings
from tpspan.tools.bench.pipeline_model import loss_of, make_stages
from tpspan.tools.bench.transformer import Transformer


def shared_parameters(world: World) -> None:
    """The whole model lies once in the world, also what other stages use: losses as before.

    Every stage trains its own parameters where they are, some of them in other ranks' memory.
    """

    def run(kind: type) -> tuple[list[list[float]], float]:
        torch.manual_seed(3)
        model = Transformer(LAYERS, 16, 2, VOCABULARY)
        shared = share_parameters(model, world) if kind is SpanPipelineStage else None
        model.to(world.device)
        num, rank = world.world_size, world.rank
        options: dict[str, Any] = {"direct": True} if kind is SpanPipelineStage else {}
        (stage,) = make_stages(kind, model, [rank], num, world.device, **options)
        schedule = Schedule1F1B(stage, 2 * num, loss_fn=loss_of)
        if kind is SpanPipelineStage:
            fit_rings(schedule)
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
        found = []
        for step in range(4):
            dice = torch.Generator().manual_seed(step)
            tokens = torch.randint(VOCABULARY, (2 * num, 9), generator=dice).to(world.device)
            losses: list[torch.Tensor] = []
            more: dict[str, Any] = {}
            if rank == num - 1:
                more = {"target": tokens[:, 1:].contiguous(), "losses": losses}
            schedule.step(*((tokens[:, :-1].contiguous(),) if rank == 0 else ()), **more)
            optimizer.step()
            optimizer.zero_grad()
            found.append([float(each.detach()) for each in losses])
        world.control.barrier()
        # What any rank sees of all parameters, after all stages have trained theirs.
        total = sum(float(each.detach().double().abs().sum()) for each in model.parameters())
        if shared is not None:
            assert shared.span.layout.world_size == num
            assert stage.stats().copied_nbytes <= 16 * 8 * 4  # the first microbatch is watched
            stage.close()
            world.control.barrier()
            shared.close()
        return found, total

    with process_group(world, backend_of(world)):
        theirs, _ = run(PipelineStage)
        ours, total = run(SpanPipelineStage)
    assert ours == theirs
    assert len(set(world.control.all_gather(total))) == 1


class WithSkip(nn.Module):
    """The first stage makes a skip connection, those between pass it on, the last one uses it."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.deep = nn.Linear(8, 8)
        self.skip = nn.Linear(8, 5)
        self.head, self.wide = nn.Linear(8, 8), nn.Linear(5, 8)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        """(batch, 8) and, behind the first stage, what it passed on: (batch, 5)."""
        deep = torch.tanh(self.deep(x))
        if self.is_first:
            return deep, self.skip(x)
        assert skip is not None
        # No torch.cat: its gradients are pieces of a larger one, which torch's stage cannot send.
        return self.head(deep) + self.wide(skip) if self.is_last else (deep, skip)


def skip_connection(world: World) -> None:
    """Values and gradients that only pass through a stage are those of torch's stage."""
    num, rank = world.world_size, world.rank
    first, last = rank == 0, rank == num - 1

    def run(kind: type) -> list[Any]:
        torch.manual_seed(rank)
        module = WithSkip(first, last).to(world.device)
        stage = kind(module, rank, num, world.device)
        schedule = Schedule1F1B(stage, 6, loss_fn=nn.functional.mse_loss)
        if kind is SpanPipelineStage:
            fit_rings(schedule)
        found: list[Any] = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(12, 8).to(world.device)
            losses: list[torch.Tensor] = []
            more: dict[str, Any] = {"target": torch.ones_like(x), "losses": losses} if last else {}
            schedule.step(*((x,) if first else ()), **more)
            found.append([float(each.detach()) for each in losses])
            gradients = [parameter.grad for parameter in module.parameters()]
            found += [None if each is None else each.tolist() for each in gradients]
        if first:  # the gradient has come back all the way
            assert module.skip.weight.grad is not None and module.skip.weight.grad.abs().sum() > 0
        if kind is SpanPipelineStage:
            counts = stage.stats()
            assert counts.num_sent == 18 * ((not first) + (not last))
            if not first and not last:  # what it was given lies with it, and has to be copied on
                assert counts.copied_nbytes >= 18 * 2 * 5 * 4
            stage.close()
        return found

    with process_group(world, backend_of(world)):
        assert run(SpanPipelineStage) == run(PipelineStage)
