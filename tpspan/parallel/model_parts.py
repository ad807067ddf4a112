"""The embedding, layers, norm and head of a language model, and a copy of it with some of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_FAMILIES = (
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)
"""Models of transformers that hand the result of one layer to the next and do nothing else."""


@dataclass(frozen=True)
class PartNames:
    """Where the parts of a model are.

    Attributes:
        is_sequential: the four are children of the model itself, run one after the other;
            otherwise the first three are children of ``backbone``.
        backbone: the attribute of the model, "" if it is the model itself.
        embedding, layers, norm, head: attributes.
        positions: embeddings of positions and what follows them, which are the first stage's.
    """

    is_sequential: bool
    backbone: str
    embedding: str
    layers: str
    norm: str
    head: str
    positions: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelParts:
    """A model's parts.

    Attributes:
        names: where they are.
        num_layers: how many layers it has.
    """

    names: PartNames
    num_layers: int

    def backbone(self, model: nn.Module) -> nn.Module:
        """What holds embedding, layers and norm."""
        return getattr(model, self.names.backbone) if self.names.backbone else model

    def vocabulary(self, model: nn.Module) -> int:
        """How many tokens there are."""
        embedding: Any = getattr(self.backbone(model), self.names.embedding)
        return int(embedding.num_embeddings)

    def stage(self, model: nn.Module, layers: range) -> nn.Module:
        """A copy of the model on the same parameters that has these layers and what belongs there.

        Layers of transformers are numbered anew, since a stage's cache begins with its own first.
        """
        names = self.names
        whole = self.backbone(model)
        backbone = _shallow(whole)
        taken = [getattr(whole, names.layers)[number] for number in layers]
        setattr(backbone, names.layers, nn.ModuleList(taken))
        made = backbone
        if names.backbone:
            made = _shallow(model)
            setattr(made, names.backbone, backbone)
        if layers.start > 0:
            _leave_out(backbone, names.embedding, names.is_sequential)
            for position in names.positions:
                setattr(backbone, position, _Nothing())
        if layers.stop < self.num_layers:
            _leave_out(backbone, names.norm, names.is_sequential)
            delattr(made, names.head)
        config = getattr(model, "config", None)
        if config is not None and not names.is_sequential:
            _renumber(made, backbone, taken, copy.deepcopy(config), layers)
        return made


def parts_of(model: nn.Module) -> ModelParts:
    """Find the parts of a model.

    Raises:
        ValueError: it has not just one of each, or is of a family that is not known.
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    prefix = getattr(model, "base_model_prefix", "")
    if family is not None and prefix and hasattr(model, prefix):
        if family not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ValueError(f"split does not know models of the family {family!r}, only {known}")
        backbone = getattr(model, prefix)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        children = dict(backbone.named_children())
        positions = tuple(name for name in ("wpe", "drop") if name in children)
        names = PartNames(
            False,
            prefix,
            _name_of(backbone, embedding, "embedding"),
            _only(backbone, nn.ModuleList, "list of layers"),
            next((name for name in ("norm", "ln_f") if name in children), ""),
            _name_of(model, head, "head"),
            positions,
        )
        if not names.norm:
            raise ValueError(f"{type(backbone).__name__} has no norm that split knows")
    else:
        names = PartNames(
            True,
            "",
            _only(model, nn.Embedding, "embedding"),
            _only(model, nn.ModuleList, "list of layers"),
            _only(model, (nn.LayerNorm, nn.RMSNorm), "norm"),
            _only(model, nn.Linear, "head"),
        )
        rest = {name for name, _ in model.named_children()}
        rest -= {names.embedding, names.layers, names.norm, names.head}
        if rest:
            raise ValueError(
                f"{type(model).__name__} has parts that split does not know: "
                f"{', '.join(sorted(rest))}"
            )
    whole = getattr(model, names.backbone) if names.backbone else model
    return ModelParts(names, len(getattr(whole, names.layers)))


class _Nothing(nn.Module):
    """In the place of a part of another stage: adds nothing, and changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Positions (integers) become a zero to be added, and anything else is returned."""
        return x if x.is_floating_point() else x.new_zeros((), dtype=torch.get_default_dtype())


def _shallow(module: nn.Module) -> nn.Module:
    """A module of its own over the same parameters, buffers and children."""
    made = copy.copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    made.__dict__["_parameters"] = dict(module._parameters)
    made.__dict__["_buffers"] = dict(module._buffers)
    return made


def _leave_out(backbone: nn.Module, name: str, is_sequential: bool) -> None:
    if is_sequential:
        delattr(backbone, name)
    else:
        setattr(backbone, name, nn.Identity())


def _renumber(
    made: Any, backbone: Any, layers: list[nn.Module], config: Any, numbers: range
) -> None:
    config.num_hidden_layers = len(layers)
    types = getattr(config, "layer_types", None)
    if types is not None:
        config.layer_types = list(types)[numbers.start : numbers.stop]
    for module in (made, backbone):
        module.config = config
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.layer_idx = number  # type: ignore[assignment]


def _name_of(module: nn.Module, child: nn.Module | None, what: str) -> str:
    for name, each in module.named_children():
        if each is child:
            return name
    raise ValueError(f"{type(module).__name__} has no {what} among its own parts")


def _only(module: nn.Module, kind: Any, what: str) -> str:
    found = [name for name, each in module.named_children() if isinstance(each, kind)]
    if len(found) != 1:
        has = "no" if not found else "more than one"
        raise ValueError(f"{type(module).__name__} has {has} {what}; split needs exactly one")
    return found[0]
