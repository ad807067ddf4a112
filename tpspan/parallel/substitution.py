"""A local copy in the place of a layer's weight, for the time of one call.

Autograd would keep the copy for the backward pass, when its memory holds something else. It keeps a
note instead, and the weight is read again then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tpspan.parallel.staging import SharedWeight


@dataclass(eq=False)
class Layer:
    """A module, its parameter ``weight``, and where that lies."""

    module: nn.Module
    parameter: nn.Parameter
    weight: SharedWeight

    @property
    def version(self) -> int:
        """Changes with every write to the parameter on this rank."""
        return self.parameter._version

    def is_shared(self) -> bool:
        """Whether the module still has this parameter, and it still lies in the span."""
        return (
            self.module._parameters.get("weight") is self.parameter
            and not self.weight.span.is_closed
            and self.parameter.data_ptr() == self.weight.address
        )


@dataclass(frozen=True)
class _Note:
    """What autograd keeps: which elements of a weight a product has read.

    Attributes:
        layer, rows: whose weight, and the rows of x.
        version: of the parameter then.
        shape, stride, first: the elements, as of ``Tensor.as_strided`` from the weight's first.
    """

    layer: Layer
    rows: int
    version: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


ReadAgain = Callable[[Layer, int], torch.Tensor | None]
"""Gives a local copy for a backward pass, for so many rows of x; None to read in place."""


def substitute(
    layer: Layer, copy: torch.Tensor, rows: int, read_again: ReadAgain
) -> Callable[[], None]:
    """Let the layer's module find ``copy`` as its weight, with the parameter's gradient.

    Returns:
        What puts the parameter back.
    """
    parameter, hooks = layer.parameter, None
    if torch.is_grad_enabled():
        hooks = _hooks(layer, copy, rows, read_again)
        if parameter.requires_grad:
            copy = _Stand.apply(parameter, copy)
        hooks.__enter__()
    layer.module._parameters["weight"] = copy  # type: ignore[assignment]

    def restore() -> None:
        layer.module._parameters["weight"] = parameter
        if hooks is not None:
            hooks.__exit__()

    return restore


def _hooks(
    layer: Layer, copy: torch.Tensor, rows: int, read_again: ReadAgain
) -> saved_tensors_hooks:
    storage, begin, version = copy.untyped_storage().data_ptr(), copy.data_ptr(), layer.version
    # Only the innermost hooks are called: those around, such as activation checkpointing's, get
    # through us what is not ours.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor if outer is None else outer[0](tensor)
        first = (tensor.data_ptr() - begin) // tensor.element_size()
        return _Note(layer, rows, version, tuple(tensor.shape), tensor.stride(), first)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, _Note):
            return _read(kept, read_again)
        return kept if outer is None else outer[1](kept)

    return saved_tensors_hooks(pack, unpack)


def _read(note: _Note, read_again: ReadAgain) -> torch.Tensor:
    layer, copy = note.layer, None
    if layer.version != note.version:
        raise RuntimeError(
            "a weight needed for a gradient has been written since the forward pass: it is at "
            f"version {layer.version}, expected version {note.version}"
        )
    # In a graph of the gradients somebody could keep the copy: there it is read in place.
    if not torch.is_grad_enabled() and layer.is_shared():
        copy = read_again(layer, note.rows)
    whole = layer.parameter.detach() if copy is None else copy
    return whole.as_strided(note.shape, note.stride, whole.storage_offset() + note.first)


class _Stand(torch.autograd.Function):
    """A copy that stands for a parameter: what it gets as gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
