"""Tensors of microbatches on their way over a channel, seen from either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpspan.parallel.handoff import Handoff

_ALIGNMENT = 256


@dataclass(frozen=True)
class Wanted:
    """A tensor that crosses the boundary.

    Attributes:
        shape, dtype: of it.
    """

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes in a block."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Counts:
    """What has crossed a stage's boundaries.

    Attributes:
        num_sent, num_received: hand-overs, of activations and of gradients.
        direct_nbytes: activations that the module wrote where the next stage reads them.
        copied_nbytes: activations that were copied there instead.
        gradient_nbytes: gradients of inputs, which are copied to where the stage before reads them.
    """

    num_sent: int = 0
    num_received: int = 0
    direct_nbytes: int = 0
    copied_nbytes: int = 0
    gradient_nbytes: int = 0


class Sender:
    """Fills blocks that the stage on the other side reads; one at a time.

    Args:
        channel: this rank produces.
        wanted: the tensors of a microbatch, the same on the other side.
    """

    def __init__(self, channel: Handoff, wanted: Sequence[Wanted]) -> None:
        self._channel, self._wanted = channel, tuple(wanted)
        self._slot: Any = None
        self._tensors: list[torch.Tensor] = []
        self.counts = Counts()

    def place(self, number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The memory of the n-th tensor; the first call of a microbatch waits for a free block."""
        if self._slot is None:
            self._slot = self._channel.produce()
            self._tensors = [self._slot.tensor(each.shape, each.dtype) for each in self._wanted]
        return self._tensors[number].view(shape)

    def send(self, values: Sequence[Any], left: Sequence[int]) -> None:
        """Copy the values whose numbers are in ``left``, and hand the block over."""
        sent = copied = 0
        for number, (value, wanted) in enumerate(zip(values, self._wanted, strict=True)):
            nbytes = wanted.shape.numel() * wanted.dtype.itemsize
            sent += nbytes
            if number in left:
                copied += nbytes
                place = self.place(number, wanted.shape, wanted.dtype)
                with torch.no_grad():
                    if value is None:
                        place.zero_()
                    else:
                        place.copy_(value.to_local() if isinstance(value, DTensor) else value)
        if self._slot is None:
            self._slot = self._channel.produce()  # a microbatch without tensors
        self._tensors = []
        slot, self._slot = self._slot, None
        slot.release()
        self.counts = replace(
            self.counts,
            num_sent=self.counts.num_sent + 1,
            direct_nbytes=self.counts.direct_nbytes + sent - copied,
            copied_nbytes=self.counts.copied_nbytes + copied,
        )


class Receiver:
    """Takes blocks that the stage on the other side has filled, and holds them by microbatch.

    Args:
        channel: this rank consumes.
        wanted: the tensors of a microbatch, the same on the other side.
    """

    def __init__(self, channel: Handoff, wanted: Sequence[Wanted]) -> None:
        self._channel, self._wanted = channel, tuple(wanted)
        self._slots: dict[int, Any] = {}
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self.num_received = 0

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """The next hand-over, which has to be of this microbatch: both sides keep one order."""
        slot = self._slots[microbatch] = self._channel.consume()
        tensors = [slot.tensor(each.shape, each.dtype) for each in self._wanted]
        self._tensors[microbatch] = tensors
        self.num_received += 1
        return tensors

    def covers(self, tensor: torch.Tensor, microbatch: int) -> bool:
        """Whether the memory of a tensor is that of a microbatch that is held."""
        held = self._tensors.get(microbatch, ())
        address = tensor.data_ptr()
        return any(0 <= address - each.data_ptr() < each.nbytes for each in held)

    def release(self, microbatch: int) -> None:
        """Give the block back, behind what the current stream still does with it."""
        slot = self._slots.pop(microbatch, None)
        if slot is not None:
            for tensor in self._tensors.pop(microbatch):
                # A loss that somebody keeps leads to this tensor, but not to its memory any more.
                tensor.data = tensor.new_empty(0)
            slot.release()

    def drop(self) -> None:
        """Give back whatever is held."""
        for microbatch in tuple(self._slots):
            self.release(microbatch)
