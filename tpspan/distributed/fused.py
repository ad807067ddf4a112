"""Small calls in one launch, where every rank has a GPU of its own.

Two pages of every rank: one of counters, one with two buffers that are used in turn. Who may write
which when is the kernels' affair: see ``tpspan.kernels.device_fused``.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch

from tpspan.errors import PeerError
from tpspan.kernels.compile import prepare
from tpspan.kernels.stream_fused import (
    FUSED_BLOCKS,
    FUSED_KERNELS,
    FUSED_SUM_DTYPES,
    FusedPlace,
    fused_gather,
    fused_sum,
)
from tpspan.launch.world import World
from tpspan.spans.board import Board
from tpspan.spans.pages import Pages

FUSED_NBYTES = 512 << 10
_ALIGNMENT = 16
_NAMES = {getattr(torch, name): name for name in FUSED_SUM_DTYPES}


class Fused:
    """The small calls of one world. Collective to make, and to call.

    Every decision for or against them must follow from what all ranks have in common.
    """

    def __init__(self, world: World) -> None:
        board = Board.of(world)
        with contextlib.ExitStack() as undo:
            counters = Pages(board.exchange, world.driver)
            undo.callback(counters.close)
            staging = Pages(board.exchange, world.driver)
            undo.callback(staging.close)
            zeros = torch.zeros(counters.page_nbytes, dtype=torch.uint8, device=world.device)
            own = counters.base_address + world.rank * counters.page_nbytes
            stream = torch.cuda.current_stream(world.device)
            world.driver.copy(own, zeros.data_ptr(), counters.page_nbytes, stream.cuda_stream)
            stream.synchronize()
            self._undo = undo.pop_all()
        prepare(world.device.index, FUSED_KERNELS)
        self._epochs = torch.zeros(FUSED_BLOCKS, dtype=torch.int32, device=world.device)
        self._status = torch.zeros(world.world_size, dtype=torch.int32).pin_memory()
        self._status_bytes = memoryview(cast(Any, self._status.numpy())).cast("B")
        self._all_well = bytes(len(self._status_bytes))
        self._place = FusedPlace(
            staging.base_address,
            staging.page_nbytes,
            counters.base_address,
            counters.page_nbytes,
            world.rank,
            world.world_size,
            self._epochs.data_ptr(),
            self._status.data_ptr(),
            int(world.timeout_s * 1e9),
            world.device.index,
        )
        board.barrier()  # nobody posts before every page is mapped and cleared

    def serves_gather(self, nbytes: int) -> bool:
        """Whether a gather of so many bytes of each rank is made here."""
        return 0 < nbytes <= FUSED_NBYTES

    def serves_sum(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether a sum of vectors of so many bytes is made here."""
        return 0 < nbytes <= FUSED_NBYTES and not nbytes % _ALIGNMENT and dtype in _NAMES

    def gather(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Gather every rank's bytes, one after another."""
        self.check()
        fused_gather(self._place, target, source, nbytes, stream)

    def sum(self, tensor: torch.Tensor, divisor: int, stream: int) -> None:
        """Add the ranks' tensors in place, in fp32, and divide."""
        self.check()
        source = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        # Another rank's tensor may well be aligned: the way is the same, the result is moved.
        result = tensor if not source % _ALIGNMENT else torch.empty_like(tensor)
        name = _NAMES[tensor.dtype]
        fused_sum(self._place, name, result.data_ptr(), source, nbytes, divisor, stream)
        if result is not tensor:
            tensor.detach().copy_(result)

    def check(self) -> None:
        """Raise what a kernel's wait ran into.

        Raises:
            PeerError: ranks did not come before the deadline; what was computed since is void.
        """
        if self._status_bytes != self._all_well:
            late = [rank for rank, word in enumerate(self._status.tolist()) if word]
            raise PeerError(late, "did not come before a kernel's wait ran out of time")

    def close(self) -> None:
        """Unmap; the device is idle."""
        self._undo.close()
