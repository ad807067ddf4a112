"""Training a shared model: every rank updates the pieces of parameters that lie in its memory.

Gradients are reduce-scattered while the backward pass goes on, parameter by parameter, so that no
rank holds a whole gradient longer than that takes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import tpspan.distributed as dist
from tpspan.parallel.shared import Entry, find_shared
from tpspan.spans.span import Span

# Their hooks hold them as long as the parameters live.
_in_use: weakref.WeakSet[OwnedParameters] = weakref.WeakSet()


def owned_parameters(model: nn.Module) -> OwnedParameters:
    """Let every rank train the pieces of a shared model's parameters that it owns.

    From now on a backward pass is collective: all ranks run it, for the same parameters in the same
    order. What it leaves as gradient is that of the sum of the ranks' losses, in the pieces;
    ``grad`` of the model's own parameters is None afterwards. Give ``pieces`` to an optimizer:

    .. code-block:: python

        owned = tpspan.owned_parameters(model)
        optimizer = torch.optim.AdamW(owned.pieces)
        ...
        loss.backward()
        optimizer.step()
        owned.barrier()     # every rank reads the new values from here on
        optimizer.zero_grad()

    Not collective, but every rank must call it. Parameters that are not shared, or need no
    gradient, are left alone.

    Raises:
        ValueError: no parameter that needs a gradient is shared; or some are in the pieces of an
            earlier call, which has not been followed by ``remove``.
    """
    return OwnedParameters(model)


class OwnedParameters:
    """The pieces of a model's parameters that this rank owns; made by ``owned_parameters``.

    Attributes:
        pieces: parameters of one dimension over this rank's own pages, by place in the span.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if any(id(parameter) in each._hooked for each in _in_use):
                raise ValueError(
                    f"{name!r} is in the pieces of an earlier owned_parameters, and a gradient "
                    "goes to one set of pieces only: use that one, or call its remove() first"
                )
        self._handles: list[Any] = []
        self._hooked: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._by_entry: dict[Entry, list[nn.Parameter]] = {}
        spans: list[Span] = []
        for parameter in model.parameters():
            found = find_shared(parameter)
            if found is None or not parameter.requires_grad:
                continue
            span, entry = found[0].span, found[1]
            spans.append(span)
            if entry not in self._by_entry:
                itemsize = entry.dtype.itemsize
                self._by_entry[entry] = [
                    nn.Parameter(span.tensor((nbytes // itemsize,), entry.dtype, offset))
                    for offset, nbytes in _slices(span, entry, span.world.rank)
                ]

            def reduce(tensor: torch.Tensor, span: Span = span, entry: Entry = entry) -> None:
                self._reduce(tensor, span, entry)

            self._handles.append(parameter.register_post_accumulate_grad_hook(reduce))
            self._hooked[id(parameter)] = parameter
        if not spans:
            raise ValueError("no parameter to train is shared: call share_parameters first")
        self._span = spans[0]
        _in_use.add(self)

    @property
    def pieces(self) -> list[nn.Parameter]:
        """This rank's pieces, without those that have no element."""
        return [piece for pieces in self._by_entry.values() for piece in pieces]

    def barrier(self) -> None:
        """Collective. Hold the stream (on the host, the caller) until all ranks have come here."""
        self._span.barrier()

    def remove(self) -> None:
        """Drop the pieces and leave gradients alone again; idempotent.

        Before the shared parameters are closed, the optimizer has to be dropped too.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._by_entry.clear()

    def _reduce(self, parameter: torch.Tensor, span: Span, entry: Entry) -> None:
        """Collective. Add the sum of the ranks' gradients to the pieces; drop the whole one.

        Raises:
            TypeError: the gradient is sparse; nothing was done.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise TypeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and "
                "owned_parameters adds up dense ones: make its layer with sparse=False"
            )
        parameter.grad = None
        world = span.world
        dense = gradient
        if gradient.stride() != entry.stride:
            dense = torch.empty_strided(
                entry.shape, entry.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        flat = dense.as_strided((dense.numel(),), (1,))
        parts = [_cut(flat, entry, _slices(span, entry, rank)) for rank in range(world.world_size)]
        own = parts[world.rank]
        if world.world_size > 1:
            own = torch.empty_like(own)
            dist.reduce_scatter(own, parts, group=world)
        pieces = self._by_entry[entry]
        for piece, part in zip(pieces, own.split([piece.numel() for piece in pieces]), strict=True):
            piece.grad = part.clone() if piece.grad is None else piece.grad.add_(part)


def _slices(span: Span, entry: Entry, rank: int) -> tuple[tuple[int, int], ...]:
    """Where a rank's pages hold a tensor: (offset, nbytes) in the span; whole elements each."""
    if not entry.nbytes:
        return ()
    return span.layout.owned_slices(rank, entry.offset_bytes, entry.nbytes)


def _cut(flat: torch.Tensor, entry: Entry, slices: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The elements of a dense tensor that lie in slices of the span, side by side."""
    itemsize, parts = entry.dtype.itemsize, [flat[:0]]
    for offset, nbytes in slices:
        start = (offset - entry.offset_bytes) // itemsize
        parts.append(flat[start : start + nbytes // itemsize])
    return parts[1] if len(parts) == 2 else torch.cat(parts)
