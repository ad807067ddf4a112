"""What the layers of a model cost: measured on an example, or counted."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from tpspan.parallel.model_parts import ModelParts
from tpspan.parallel.pipeline_cut import LayerCosts

_ROUNDS = 3


def counted_costs(model: nn.Module, parts: ModelParts) -> LayerCosts:
    """Parameters that are multiplied with, in each layer and in the head. Looking up is free."""
    backbone: Any = parts.backbone(model)
    layers = tuple(float(_count(layer)) for layer in getattr(backbone, parts.names.layers))
    head: Any = getattr(model, parts.names.head)
    return LayerCosts(layers, 0.0, float(_count(head)))


@torch.no_grad()
def measured_costs(model: nn.Module, parts: ModelParts, example: torch.Tensor) -> LayerCosts:
    """Seconds of each layer's forward pass, of the embedding, and of norm and head.

    Args:
        model: with memory; it is run a few times, in evaluation mode.
        parts: of it.
        example: (batch, seq) of token numbers.
    """
    backbone: Any = parts.backbone(model)
    layers = list(getattr(backbone, parts.names.layers))
    first = [getattr(backbone, parts.names.embedding)]
    last = [getattr(backbone, parts.names.norm), getattr(model, parts.names.head)]
    clock = _Clock(example.device)
    was_training = model.training
    model.eval()
    handles = [handle for part in (*layers, *first, *last) for handle in clock.watch(part)]
    try:
        for _ in range(_ROUNDS + 1):
            model(example)
            clock.next_round()
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return LayerCosts(
        tuple(clock.seconds(part) for part in layers),
        sum(clock.seconds(part) for part in first),
        sum(clock.seconds(part) for part in last),
    )


class _Clock:
    """How long parts of a model take, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: dict[nn.Module, float] = {}
        self._now: dict[nn.Module, float] = {}
        self._rounds: list[dict[nn.Module, float]] = []

    def watch(self, part: nn.Module) -> tuple[Any, Any]:
        """Hook into a part; returns the handles."""
        before = part.register_forward_pre_hook(lambda part, args: self._begin(part))
        return before, part.register_forward_hook(lambda part, args, output: self._end(part))

    def next_round(self) -> None:
        """The model has run."""
        self._rounds.append(self._now)
        self._now = {}

    def seconds(self, part: nn.Module) -> float:
        """The median over all rounds but the first, in which things are set up."""
        return statistics.median(times.get(part, 0.0) for times in self._rounds[1:])

    def _begin(self, part: nn.Module) -> None:
        self._begun[part] = self._time()

    def _end(self, part: nn.Module) -> None:
        self._now[part] = self._now.get(part, 0.0) + self._time() - self._begun[part]

    def _time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _count(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
