"""A transformer in the stages of a pipeline, as torch's schedules place them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules as _schedules
from torch.nn import functional as F  # noqa: N812

from tpspan.tools.bench.transformer import Transformer

schedules: Any = _schedules


class Piece(nn.Module):
    """Some blocks of a transformer, with the embedding before or the head behind them.

    Args:
        model: whose parameters these are.
        begin, end: the blocks ``begin`` to ``end - 1``.
    """

    def __init__(self, model: Transformer, begin: int, end: int) -> None:
        super().__init__()
        self.embedding = model.embedding if begin == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[begin:end])
        self.is_last = end == len(model.blocks)
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or (batch, seq, hidden), to (batch, seq, hidden) or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def stage_numbers(schedule: type, rank: int, num_ranks: int) -> tuple[list[int], int]:
    """A rank's stages under a schedule, and how many there are: one a rank, or two."""
    if issubclass(schedule, schedules.PipelineScheduleSingle):
        return [rank], num_ranks
    if schedule is schedules.ScheduleZBVZeroBubble:  # down and up again
        return [rank, 2 * num_ranks - 1 - rank], 2 * num_ranks
    return [rank, rank + num_ranks], 2 * num_ranks


def make_stages(
    kind: type,
    model: Transformer,
    numbers: Sequence[int],
    num_stages: int,
    device: torch.device,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    **options: Any,
) -> list[Any]:
    """Stages of a class, of blocks in as equal numbers as can be."""
    num_layers = len(model.blocks)
    starts = [round(number * num_layers / num_stages) for number in range(num_stages + 1)]
    return [
        kind(
            wrap(Piece(model, starts[number], starts[number + 1])),
            number,
            num_stages,
            device,
            **options,
        )
        for number in numbers
    ]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How badly tokens are predicted, averaged over a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
