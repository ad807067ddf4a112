"""Tensors as the engines want them: side by side in memory, and whether they lie in a span."""

from __future__ import annotations

import weakref

import torch

from tpspan.distributed.groups import Engine
from tpspan.spans.allocation import OpenSpans
from tpspan.spans.span import Span

_last_span: weakref.WeakKeyDictionary[Engine, weakref.ref[Span]] = weakref.WeakKeyDictionary()


def alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Complex numbers may meet their parts, as in torch."""
    if one.dtype == other.dtype or one.is_complex() == other.is_complex():
        return one, other
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    return next(pair), next(pair)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, side by side in memory."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie side by side, otherwise one to be copied from."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def offset_in_span(engine: Engine, tensor: torch.Tensor) -> int | None:
    """Where in a span of the engine's own world a tensor begins; None if it is an ordinary one."""
    address = tensor.data_ptr()
    known = _last_span.get(engine)
    span = known() if known is not None else None
    if span is not None and not span.is_closed:
        offset = address - span.base_address
        if 0 <= offset < span.nbytes:
            return offset
    for found in tuple(OpenSpans.of(engine.world)._spans):
        if isinstance(found, Span) and not found.is_closed:
            offset = address - found.base_address
            if 0 <= offset < found.nbytes:
                _last_span[engine] = weakref.ref(found)
                return offset
    return None
