"""Tensors as the engines want them: side by side in memory, and whether they lie in a span."""

from __future__ import annotations

import weakref

import torch

from tpspan.distributed.groups import Engine
from tpspan.spans.allocation import OpenSpan, OpenSpans

# The span found last: asking it for its address takes as long as half a barrier.
_Known = tuple[weakref.ref[OpenSpan], int, int]
_last_span: weakref.WeakKeyDictionary[Engine, _Known] = weakref.WeakKeyDictionary()


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
    last = _last_span.get(engine)
    if last is not None:
        known, base, nbytes = last
        if 0 <= address - base < nbytes:
            span = known()
            if span is not None and not span.is_closed:
                return address - base
    span = OpenSpans.of(engine.world).find(address)
    if span is None:
        return None
    _last_span[engine] = (weakref.ref(span), span.base_address, span.nbytes)
    return address - span.base_address
