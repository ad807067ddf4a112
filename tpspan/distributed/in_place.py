"""Gathers of what lies in a span already: where, and how to know the call again."""

from __future__ import annotations

import weakref

import torch

from tpspan.distributed.cuda_group import CudaGroup
from tpspan.distributed.host_group import HostGroup
from tpspan.distributed.requests import Operation, words
from tpspan.spans.allocation import OpenSpan, OpenSpans

Engine = HostGroup | CudaGroup

# The span found last: asking it for its address takes as long as half a barrier.
_Known = tuple[weakref.ref[OpenSpan], int, int]
_last_span: weakref.WeakKeyDictionary[Engine, _Known] = weakref.WeakKeyDictionary()


class InPlace:
    """A gather in place as it was made before: the same tensors need not be looked at again.

    Args:
        engine: makes the call.
        output, piece: its tensors, side by side in memory.
        span, offset_bytes: where the output lies.

    Attributes:
        engine: as given.
    """

    __slots__ = ("_found", "_output", "_piece", "_request", "_span", "engine")

    def __init__(
        self,
        engine: Engine,
        output: torch.Tensor,
        piece: torch.Tensor,
        span: OpenSpan,
        offset_bytes: int,
    ) -> None:
        self.engine = engine
        operation, nbytes = Operation.ALL_GATHER_SPAN, output.nbytes
        self._request = words(
            operation, output.dtype, nbytes, digest=offset_bytes, buffer=span.number
        )
        self._output, self._piece = weakref.ref(output), weakref.ref(piece)
        self._span = weakref.ref(span)
        self._found = output.data_ptr(), output.numel(), piece.data_ptr(), piece.numel()

    def is_for(self, output: torch.Tensor, piece: torch.Tensor) -> bool:
        """Whether it is this very call: both tensors as they were, in a span that is open."""
        if self._output() is not output or self._piece() is not piece:
            return False
        span = self._span()
        if span is None or span.is_closed:
            return False
        found = output.data_ptr(), output.numel(), piece.data_ptr(), piece.numel()
        return found == self._found and output.is_contiguous() and piece.is_contiguous()

    def call(self) -> None:
        """Make it."""
        self.engine.all_gather_in_place(self._request)


def place_in_span(engine: Engine, tensor: torch.Tensor) -> tuple[OpenSpan, int] | None:
    """The span of the engine's own world in which a tensor lies, and its offset there in bytes.

    None if it is an ordinary tensor.
    """
    address = tensor.data_ptr()
    last = _last_span.get(engine)
    if last is not None:
        known, base, nbytes = last
        if 0 <= address - base < nbytes:
            span = known()
            if span is not None and not span.is_closed:
                return span, address - base
    span = OpenSpans.of(engine.world).find(address)
    if span is None:
        return None
    _last_span[engine] = (weakref.ref(span), span.base_address, span.nbytes)
    return span, address - span.base_address
