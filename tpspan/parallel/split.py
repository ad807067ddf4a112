"""A language model cut into the stages of a pipeline, by what its layers cost."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tpspan.errors import LaunchError
from tpspan.launch import start
from tpspan.launch.world import World
from tpspan.parallel.layer_costs import counted_costs, measured_costs
from tpspan.parallel.model_parts import ModelParts, PartNames, parts_of
from tpspan.parallel.pipeline_cut import LayerCosts, cut, stage_ranges


class StageModule(nn.Module):
    """Some layers of a model, with the embedding before or the norm and the head behind them.

    The first stage takes token numbers, the others what the stage before returned; the last returns
    logits. Parameters are the model's own; layers count from 0 in every stage.

    Attributes:
        layers: which of the model's layers these are.
        is_first, is_last: where the stage stands.
        cache: what a transformers model remembers of the tokens so far, after calls with
            ``use_cache=True``; set it to None to begin anew.
    """

    def __init__(self, parts: ModelParts, layers: range, model: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == parts.num_layers
        self.cache: Any = None
        self.model = parts.stage(model, layers)
        self._parts = parts.names

    def forward(self, x: torch.Tensor, *, use_cache: bool = False, **more: Any) -> torch.Tensor:
        """(batch, seq) of token numbers or (batch, seq, hidden) to (batch, seq, hidden or logits).

        Args:
            x: what comes in.
            use_cache: of transformers: ``x`` continues what the calls before were given.
            more: handed to the model of transformers, such as ``attention_mask``.
        """
        if self._parts.is_sequential:
            return _in_sequence(self.model, self._parts, self.layers, x)
        backbone = getattr(self.model, self._parts.backbone)
        more["input_ids" if self.is_first else "inputs_embeds"] = x
        if use_cache and self.cache is not None:
            more[_cache_name(backbone)] = self.cache
        output = backbone(use_cache=use_cache, **more)
        if use_cache:
            self.cache = getattr(output, _cache_name(backbone))
        hidden = output.last_hidden_state
        if not self.is_last:
            return hidden
        logits: torch.Tensor = getattr(self.model, self._parts.head)(hidden)
        return logits


def split(
    model: nn.Module,
    num_stages: int,
    *,
    costs: LayerCosts | None = None,
    starts: Sequence[int] | None = None,
    example: torch.Tensor | None = None,
    world: World | None = None,
) -> list[StageModule]:
    """Cut a language model into stages of about equal time. Collective if costs are measured.

    It knows the models of transformers that have an embedding, a list of layers, a norm and a head
    (the Llama, Mistral, Qwen and GPT-2 families), and modules with the same four parts that they
    run one after the other. The stages stand on the model's own parameters; the model itself is not
    to be used any more. A model with memory is run once on ``example``, whole and in stages, to see
    that the results are equal.

    Where the head has the embedding's weights, the first and the last stage both hold them. Before
    an optimizer's step their gradients have to be added up: see ``tied_parameters``.

    Args:
        model: to be cut; the modules of the stages are taken out of it.
        num_stages: how many; each gets a layer at least.
        costs: what the parts cost. By default they are measured on ``example``, by rank 0 for all;
            of a model without memory, on meta, parameters are counted instead.
        starts: the first layer of every stage, instead of any cost.
        example: (batch, seq) of token numbers; by default (1, 64), all different.
        world: whose rank 0 measures; by default the default world, if there is one.

    Raises:
        ValueError: it is no such model, its stages do not give what the model gives, it has too few
            layers, or ``starts`` do not fit.
        PeerError: a rank did not call.
    """
    parts = parts_of(model)
    is_real = not any(each.is_meta for each in model.parameters())
    if example is None and is_real:
        device = next(model.parameters()).device
        example = (torch.arange(64, device=device) % parts.vocabulary(model))[None]
    if starts is None:
        if costs is None:
            costs = _agreed_costs(model, parts, example if is_real else None, world)
        elif len(costs.layers) != parts.num_layers:
            raise ValueError(f"costs of {len(costs.layers)} layers, of {parts.num_layers} layers")
        starts = cut(costs, num_stages)
    if len(starts) != num_stages:
        raise ValueError(f"{num_stages} stages cannot start at {tuple(starts)}")
    ranges = stage_ranges(starts, parts.num_layers)
    expected = _whole(model, example) if is_real and example is not None else None
    stages = [StageModule(parts, layers, model).train(model.training) for layers in ranges]
    if expected is not None and example is not None:
        _check(stages, example, expected)
    return stages


def tied_parameters(stages: Sequence[StageModule]) -> list[tuple[str, str]]:
    """Names of parameters that the first and the last stage both have, in each of the two.

    With an embedding tied to the head, each of the two stages has a gradient for its use of the
    weights. Before an optimizer's step the two ranks add them up, as with
    ``torch.distributed.all_reduce`` over a group of the two.
    """
    if len(stages) < 2:
        return []
    first = {id(each): name for name, each in stages[0].named_parameters()}
    last = stages[-1].named_parameters()
    return [(first[id(each)], name) for name, each in last if id(each) in first]


def _agreed_costs(
    model: nn.Module, parts: ModelParts, example: torch.Tensor | None, world: World | None
) -> LayerCosts:
    if example is None:
        return counted_costs(model, parts)
    if world is None:
        try:
            world = start.world()
        except LaunchError:
            return measured_costs(model, parts, example)
    found = measured_costs(model, parts, example) if world.rank == 0 else None
    agreed: LayerCosts = world.control.broadcast(found)
    return agreed


@torch.no_grad()
def _whole(model: nn.Module, example: torch.Tensor) -> torch.Tensor:
    was_training = model.training
    output = model.eval()(example)
    model.train(was_training)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


@torch.no_grad()
def _check(stages: Sequence[StageModule], example: torch.Tensor, expected: torch.Tensor) -> None:
    x = example
    for stage in stages:
        was_training = stage.training
        x = stage.eval()(x)
        stage.train(was_training)
    if x.shape != expected.shape or not torch.allclose(x, expected, rtol=1e-4, atol=1e-5):
        raise ValueError(
            "the stages do not give what the model gives: it does more between its layers than "
            "hand the result of one to the next, which split does not know"
        )


def _in_sequence(model: nn.Module, names: PartNames, layers: range, x: torch.Tensor) -> Any:
    if names.embedding in dict(model.named_children()):
        x = getattr(model, names.embedding)(x)
    for layer in getattr(model, names.layers):
        x = layer(x)
    if names.head in dict(model.named_children()):
        x = getattr(model, names.head)(getattr(model, names.norm)(x))
    return x


def _cache_name(backbone: nn.Module) -> str:
    named = "cache" in inspect.signature(backbone.forward).parameters
    return "cache" if named else "past_key_values"
