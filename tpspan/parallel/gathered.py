"""The derivative of a product with a gathered weight: read again, and handed to its owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

import tpspan.distributed as dist
from tpspan.parallel.reader import Reader
from tpspan.spans.span import Span


def gathered_linear(
    x_MK: torch.Tensor, own_rows: torch.Tensor, bias: torch.Tensor | None, reader: Reader
) -> torch.Tensor:
    """``x @ W.T + b`` with gradients for x, for the rows that this rank owns, and for the bias."""
    needed = [x_MK, own_rows] if bias is None else [x_MK, own_rows, bias]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in needed):
        with torch.no_grad():
            return reader.product(x_MK, bias)
    result: torch.Tensor = _GatheredProduct.apply(x_MK, own_rows, bias, reader)
    return result


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        own_rows: torch.Tensor,
        bias: torch.Tensor | None,
        reader: Reader,
    ) -> torch.Tensor:
        ctx.reader = reader
        ctx.save_for_backward(x_MK, own_rows)  # of the rows only the version counts
        with torch.autocast(x_MK.device.type, enabled=False):
            return reader.product(x_MK, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, own_rows = ctx.saved_tensors
        reader: Reader = ctx.reader
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        grad_x = grad_rows = grad_bias = whole = None
        with torch.autocast(x_MK.device.type, enabled=False):
            if for_x and reader.decide(x_MK.shape[0]) == "staged":
                # The product that needs no weight goes on while the weight comes.
                with reader.fetching() as weight:
                    whole = _of_weight(grad_MN, x_MK, own_rows) if for_weight else None
                grad_x = grad_MN @ weight.to(grad_MN.dtype)
                del weight
            elif for_x:
                grad_x = grad_MN @ reader.weight.in_place().to(grad_MN.dtype)
            if for_weight and whole is None:
                whole = _of_weight(grad_MN, x_MK, own_rows)
        span = reader.weight.span
        # Only behind the product above: once every rank has come to this reduction, none reads the
        # rows any more, and their owners may step.
        if whole is not None:
            grad_rows = _to_owners(whole, own_rows, span)
        if for_bias:
            grad_bias = grad_MN.sum(0)
            if span.world.world_size > 1:
                dist.all_reduce(grad_bias, group=span.world)
        return grad_x, grad_rows, grad_bias, None


def _of_weight(grad_MN: torch.Tensor, x_MK: torch.Tensor, own_rows: torch.Tensor) -> torch.Tensor:
    return (grad_MN.T @ x_MK).to(own_rows.dtype)


def _to_owners(whole_NK: torch.Tensor, own_rows: torch.Tensor, span: Span) -> torch.Tensor:
    """Collective. Sum the ranks' gradients of the weight; this rank gets those of its rows."""
    world = span.world
    if world.world_size == 1:
        return whole_NK.view(own_rows.shape)
    flat = whole_NK.view(-1)
    parts = [_part(flat, slices) for slices in span.layout.shards]
    own = torch.empty_like(parts[world.rank])
    if span.rows is not None and len(set(span.rows)) == 1:
        dist.reduce_scatter_single(own, flat, group=world)
    else:
        dist.reduce_scatter(own, parts, group=world)
    return own.view(own_rows.shape)


def own_part(whole_NK: torch.Tensor, span: Span) -> torch.Tensor:
    """The elements of a whole weight that are this rank's shard, in one dimension."""
    return _part(whole_NK.reshape(-1), span.layout.shards[span.world.rank])


def _part(flat: torch.Tensor, slices: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The elements in byte slices (offset, nbytes), side by side."""
    itemsize = flat.element_size()
    parts = [flat[at // itemsize : (at + nbytes) // itemsize] for at, nbytes in slices]
    return parts[0] if len(parts) == 1 else torch.cat([flat[:0], *parts])
