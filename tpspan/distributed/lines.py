"""Meetings of all ranks that also say which buffers may be written again.

A buffer in span memory is written by its owner and read by the peers, so between two uses every
peer has to say that it has read (invariant 6). It says so by coming to any later meeting: a rank
that enters a meeting after it let a buffer go has finished reading it, or has queued its reads on
the stream before. So whoever comes out of a meeting may write every buffer that was idle when it
went in; the ranks let buffers go in the same order, and the requests that they compare in each
meeting contain the buffer's number.

On the host one line serves everything, since a rank does one thing after the other. On CUDA a line
is a slot of the world's signals, used on whatever stream is current; a line that changes streams
lets the new one wait for the old one first.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tpspan.distributed.journal import Journal
from tpspan.distributed.steps import Steps
from tpspan.launch.world import World
from tpspan.spans.signals import Signals
from tpspan.spans.span import Span
from tpspan.spans.tensors import TensorRange


class Buffer:
    """A span that is handed out again and again.

    Args:
        span: its memory.
        number: how many were made before it, the same on all ranks.
        capacity: the largest request it serves, in bytes.
        region_nbytes: from one rank's region to the next one's, where every rank has one.

    Attributes:
        is_free: whether all ranks have said that they do not read it, since it was handed out.
        capacity, region_nbytes: as given.
        asked_nbytes: of the last request.
        used_at: when it was handed out, in requests of its pool.
    """

    def __init__(self, span: Span, number: int, capacity: int, region_nbytes: int = 0) -> None:
        self.span, self.number, self.capacity = span, number, capacity
        self.region_nbytes = region_nbytes
        self.is_free = True
        self.asked_nbytes = self.used_at = 0
        self._range = TensorRange(span.base_address, span.nbytes, span.world.device)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has let go of every tensor over it."""
        return self._range.num_live == 0

    def tensor(self, numel: int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """A tensor over a part; the buffer is not idle while a view of it lives."""
        return self._range.tensor((numel,), dtype, offset_bytes, keep=self.span)


class Line(Protocol):
    """Where ranks meet.

    Attributes:
        buffers: what a meeting frees.
    """

    buffers: list[Buffer]

    def meet(self, request: tuple[int, ...]) -> None:
        """Hold the current stream, on the host the caller, until all ranks have come."""

    def follow(self) -> None:
        """Let the current stream wait for the last meeting, which may have been on another."""

    def close(self) -> None:
        """Take no further part; waits for no other rank."""


class HostLine:
    """Meetings by futex. Collective to make."""

    def __init__(self, world: World) -> None:
        self.buffers: list[Buffer] = []
        self._steps = Steps(world)

    def meet(self, request: tuple[int, ...]) -> None:
        idle = [buffer for buffer in self.buffers if buffer.is_idle]
        self._steps.ask(request)
        self._steps.step()
        for buffer in idle:
            buffer.is_free = True

    def follow(self) -> None:
        """Nothing: the caller itself was held."""

    def close(self) -> None:
        self._steps.close()


class CudaLine:
    """Meetings on streams. Collective to make.

    Args:
        world: the ranks.
        journal: where requests are compared.
        buffers: what a meeting frees; lines may share them.
    """

    def __init__(self, world: World, journal: Journal, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self._device = world.device
        self._journal = journal
        self._signals = Signals.of(world)
        self._slot = self._signals.acquire()
        self._last: torch.cuda.Stream | None = None

    def meet(self, request: tuple[int, ...]) -> None:
        idle = [buffer for buffer in self.buffers if buffer.is_idle]
        self._journal.note(request)
        self.follow()
        self._last = torch.cuda.current_stream(self._device)
        self._signals.barrier(self._slot, self._last.cuda_stream)
        for buffer in idle:
            buffer.is_free = True

    def follow(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last.cuda_stream != current.cuda_stream:
            current.wait_stream(self._last)

    def close(self) -> None:
        """Nothing: the slot goes with the world's signals."""
