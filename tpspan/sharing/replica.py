"""Where a reader puts the blocks of a version: the memory itself, or copies of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from tpspan.memory import Block, Reservation, Right
from tpspan.memory.closing import close_each
from tpspan.sharing.local import Local, local, local_for
from tpspan.sharing.mapped import create_blocks
from tpspan.spans.tensors import TensorRange


class Importer:
    """Chooses the device for blocks of a publication, and copies them if they are to be own.

    Args:
        device: where they are to be used; None for where they lie.
        replicate: whether to copy.
    """

    def __init__(self, device: torch.device | str | None, *, replicate: bool) -> None:
        self._device = device
        self.replicates = replicate
        self._source: Local | None = None
        self._target: Local | None = None

    @property
    def target(self) -> Local:
        """The device on which the blocks are used; known once ``choose`` was called."""
        assert self._target is not None
        return self._target

    def choose(self, description: Mapping[str, Any]) -> Local:
        """The device on which blocks are imported.

        Raises:
            ValueError: the memory cannot be used on the device that was asked for, only copied.
            DriverError: it lies on a GPU, and there is none here.
        """
        if self._source is not None:
            return self._source
        there = str(description["device"])
        source = local_for(there)
        target = source if self._device is None else local(self._device)
        if not self.replicates and source.backend != target.backend:
            raise ValueError(
                f"memory on {there} cannot be mapped for {target.device}: attach with "
                "replicate=True to copy it there"
            )
        if source.backend == target.backend and not self.replicates:
            source = target  # a GPU that maps another's memory imports it itself
        self._source, self._target = source, target
        return source

    def taken(self, blocks: dict[int, Block]) -> dict[int, Block]:
        """The blocks to map: those given, or copies, and then the given ones are closed.

        Raises:
            OutOfMemoryError: there is no memory for copies; the given blocks are as they were.
        """
        if not self.replicates or not blocks:
            return blocks
        assert self._source is not None
        sizes = {place: block.nbytes for place, block in blocks.items()}
        copies = create_blocks(self.target, sizes)
        try:
            for place, block in blocks.items():
                _copy(self._source, block, self.target, copies[place])
            self.target.synchronize()
        except BaseException:
            close_each(block.close for block in copies.values())
            raise
        close_each(block.close for block in blocks.values())
        blocks.clear()
        return copies


def _copy(source: Local, block: Block, target: Local, copy: Block) -> None:
    with ExitStack() as undo:
        ranges = []
        for place, mapped, right in (
            (source, block, Right.READ),
            (target, copy, Right.READ_WRITE),
        ):
            reservation = undo.enter_context(Reservation(place.driver, mapped.nbytes))
            reservation.map(0, mapped)
            reservation.protect(right)
            ranges.append(TensorRange(reservation.address, mapped.nbytes, place.device))
        shape = (block.nbytes // 8,)
        values = ranges[0].tensor(shape, torch.int64, keep=None)
        ranges[1].tensor(shape, torch.int64, keep=None).copy_(values)
        target.synchronize()
        source.synchronize()
