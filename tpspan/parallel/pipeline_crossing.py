"""Tensors of microbatches on their way over a channel, seen from either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpspan.parallel.handoff import Handoff
from tpspan.parallel.packing import ALIGNMENT


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
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
        self._channel = channel
        self._packed = channel.pack((each.shape, each.dtype) for each in wanted)
        self._slot: Any = None
        self._tensors: list[torch.Tensor] = []
        self._num_sent = self._sent_nbytes = self._copied_nbytes = 0

    @property
    def counts(self) -> Counts:
        """What was sent so far."""
        direct_nbytes = self._sent_nbytes - self._copied_nbytes
        return Counts(self._num_sent, 0, direct_nbytes, self._copied_nbytes)

    def place(self, number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The memory of the n-th tensor; the first call of a microbatch waits for a free block."""
        self._begin()
        return self._tensors[number].view(shape)

    def send(self, values: Sequence[Any], left: Sequence[int]) -> None:
        """Copy the values whose numbers are in ``left``, and hand the block over.

        Raises:
            ValueError: these are more or fewer values than tensors.
        """
        places = self._packed.places
        if len(values) != len(places):
            raise ValueError(f"{len(values)} values for {len(places)} tensors")
        self._begin()  # a microbatch without tensors is handed over, too
        for number in left:
            self._copied_nbytes += places[number].nbytes
            value = values[number]
            if value is None:
                self._tensors[number].zero_()
                continue
            if isinstance(value, DTensor):
                value = value.to_local()
            # Beside a model's computing, which empties the caches, a `no_grad` costs 20 µs.
            self._tensors[number].copy_(value.detach() if value.requires_grad else value)
        self._tensors = []
        slot, self._slot = self._slot, None
        slot.release()
        self._num_sent += 1
        self._sent_nbytes += sum(each.nbytes for each in places)

    def _begin(self) -> None:
        if self._slot is None:
            slot = self._channel.produce()
            self._tensors = slot.all_of(self._packed)
            self._slot = slot


class Receiver:
    """Takes blocks that the stage on the other side has filled, and holds them by microbatch.

    Args:
        channel: this rank consumes.
        wanted: the tensors of a microbatch, the same on the other side.
    """

    def __init__(self, channel: Handoff, wanted: Sequence[Wanted]) -> None:
        self._channel = channel
        self._packed = channel.pack((each.shape, each.dtype) for each in wanted)
        device = channel.world.device
        self._nothing = [torch.empty(0, dtype=each.dtype, device=device) for each in wanted]
        self._slots: dict[int, Any] = {}
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self.num_received = 0

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """The next hand-over, which has to be of this microbatch: both sides keep one order."""
        slot = self._slots[microbatch] = self._channel.consume()
        tensors = self._tensors[microbatch] = slot.all_of(self._packed)
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
            for tensor, nothing in zip(self._tensors.pop(microbatch), self._nothing, strict=True):
                # A loss that somebody keeps leads to this tensor, but not to its memory any more.
                tensor.data = nothing
            slot.release()

    def drop(self) -> None:
        """Give back whatever is held."""
        for microbatch in tuple(self._slots):
            self.release(microbatch)
