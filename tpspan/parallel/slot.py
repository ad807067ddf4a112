"""A turn that one side of a channel holds: tensors in its block until it is released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from tpspan.errors import ClosedError
from tpspan.parallel.packing import Packed, Packing, Placed, Spec


class Holder(Protocol):
    """What a slot asks of its channel."""

    block_nbytes: int

    def place(self, slot: Slot, placed: Placed) -> torch.Tensor:
        """A tensor in the slot's block."""

    def place_all(self, slot: Slot, packed: Packed) -> list[torch.Tensor]:
        """All tensors that were placed beforehand."""

    def header(self, slot: Slot, *, wait: bool) -> tuple[Spec, ...] | None:
        """What the producer packed; None if that is not known yet."""

    def may_be(self, slot: Slot, packed: Packed) -> bool:
        """Whether the producer may have packed that; it is not known before it has."""

    def wait_until_mapped(self, slot: Slot) -> None:
        """Hold the caller until the slot's address leads to its block."""

    def finish(self, slot: Slot) -> None:
        """Hand the block over, or give it back."""

    def put_back(self, slot: Slot) -> bool:
        """Forget that the slot was taken; nothing is handed over. False if a later one is held."""


_NOTHING = Packed()


class Slot:
    """A block of a ``Handoff``, for one turn; made by ``produce`` and ``consume``.

    A ``with`` block releases it at its end. If a producer's block ends by an exception nothing is
    handed over, and the next ``produce`` begins the turn anew; if a later slot is held already, it
    stays held until ``release``.

    Attributes:
        turn: its number, from 0, the same on both sides.
        is_producer: whether it is to be written.
    """

    __slots__ = ("_holder", "_packing", "is_producer", "is_released", "turn")

    def __init__(self, holder: Holder, turn: int, is_producer: bool) -> None:
        self.turn = turn
        self.is_producer = is_producer
        self.is_released = False
        self._holder = holder
        self._packing: Packing | Packed = _NOTHING

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Shape and dtype of the tensors so far."""
        return tuple(self._packing.specs)

    @property
    def used_nbytes(self) -> int:
        """Where the last tensor ends."""
        return self._packing.end_bytes

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor in the block; the content is the producer's, or undefined before it.

        Each begins at a multiple of 256 bytes. The consumer asks in the producer's order, for as
        many bytes each; the shape may be another. On CUDA use it on the stream that was current
        when the slot was taken, or behind it; in remap mode by kernels, or after
        ``wait_until_mapped``. It may be used until the slot is released: save no such tensor for a
        backward pass that comes later.

        Raises:
            ValueError: it does not fit into the block, or is not what the producer packed.
            TypeError: a dtype that cannot be handed over.
            ClosedError: the slot was released.
        """
        self._check_held()
        if self._packing is _NOTHING:
            self._packing = Packing(self._holder.block_nbytes)
        if isinstance(self._packing, Packed):
            raise ValueError("the tensors of this slot were placed beforehand: no more of them")
        placed = self._packing.place(shape, dtype)
        if not self.is_producer:
            self._compare(placed)
        return self._holder.place(self, placed)

    def all_of(self, packed: Packed) -> list[torch.Tensor]:
        """The tensors that ``Handoff.pack`` has placed, instead of asking for one by one.

        Raises:
            ValueError: the slot has tensors already, or it is not what the producer packed.
            ClosedError: the slot was released.
        """
        self._check_held()
        if self._packing is not _NOTHING:
            raise ValueError("the slot has tensors already: all of them are placed at once")
        if not self.is_producer and not self._holder.may_be(self, packed):
            return [self.tensor(*spec) for spec in packed.specs]  # which compares each
        self._packing = packed
        return self._holder.place_all(self, packed)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that the producer packed, as it was.

        Waits on the host until the producer's host has released its slot, never for its device.

        Raises:
            ValueError: this is the producer's side.
            PeerError: the producer is dead or late.
            ClosedError: the slot was released.
        """
        self._check_held()
        if self.is_producer:
            raise ValueError("the producer knows what it packed: ask the consumer's slot")
        packing = Packing(self._holder.block_nbytes)
        specs = self._holder.header(self, wait=True) or ()
        return tuple(self._holder.place(self, packing.place(*spec)) for spec in specs)

    def wait_until_mapped(self) -> None:
        """In remap mode on CUDA, hold the caller until the block is behind the address.

        Kernels need not: their stream waits. But a copy by the driver (``copy_`` or ``clone`` of
        tensors of one dtype, ``cpu()``, ``item()``) asks for the address when it is called, and
        fails with "invalid argument" in the 0.1 ms in which nothing is behind it. Before such a
        copy, and nowhere else, the host has to wait for the remap, and so for the work before it.

        Raises:
            TpspanError: the remap failed, or what it comes after did not finish in time.
            ClosedError: the slot was released.
        """
        self._check_held()
        self._holder.wait_until_mapped(self)

    def release(self) -> None:
        """Hand the block over (producer) or give it back (consumer); once is enough.

        On CUDA everything before on the current stream comes first; the host does not wait.

        Raises:
            CaptureError: a stream that uses it is being captured; the slot stays held.
            PeerError: an earlier wait of a stream ran out of time.
        """
        if not self.is_released:
            self._holder.finish(self)
            self.is_released = True

    def _compare(self, placed: Placed) -> None:
        specs = self._holder.header(self, wait=False)
        index = len(self.specs) - 1
        if specs is None:  # not known yet on CUDA, where the host may be ahead
            return
        if index < len(specs) and specs[index] == (placed.shape, placed.dtype):
            return  # those before have been compared
        given = None
        if index < len(specs):
            packing = Packing(self._holder.block_nbytes)
            given = [packing.place(*spec) for spec in specs[: index + 1]][-1]
        if given is None or (given.offset_bytes, given.nbytes) != (
            placed.offset_bytes,
            placed.nbytes,
        ):
            packed = ", ".join(f"{shape} {dtype}" for shape, dtype in specs) or "nothing"
            raise ValueError(
                f"tensor {index} of turn {self.turn} was asked for as {placed.shape} "
                f"{placed.dtype}, but the producer packed: {packed}"
            )

    def _check_held(self) -> None:
        if self.is_released:
            raise ClosedError(f"the slot of turn {self.turn} was released")

    def __enter__(self) -> Self:
        self._check_held()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or not self.is_producer:
            self.release()
        elif not self.is_released:
            self.is_released = self._holder.put_back(self)

    def __repr__(self) -> str:
        side = "producer" if self.is_producer else "consumer"
        state = ", released" if self.is_released else ""
        return f"<Slot of turn {self.turn}, {side}{state}>"
