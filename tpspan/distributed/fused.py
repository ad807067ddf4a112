"""Calls in one launch, where every rank has a GPU of its own.

Very small ones go in words that carry a flag (``tpspan.kernels.device_ll``); the others are staged
and read in rounds, by blocks that meet (``tpspan.kernels.device_fused``). Who may write which when
is the kernels' affair; each way has memory and counts of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

from tpspan.errors import PeerError
from tpspan.kernels.compile import prepare
from tpspan.kernels.stream_fused import (
    FUSED_COUNTS,
    FUSED_KERNELS,
    FUSED_SUM_DTYPES,
    FusedPlace,
    fused_gather,
    fused_region_nbytes,
    fused_scatter,
    fused_sum,
    plan_fused_gather,
    plan_fused_sum,
)
from tpspan.kernels.stream_ll import (
    LL_BLOCKS,
    LL_KERNELS,
    LL_MOST_RANKS,
    LLPlace,
    ll_gather,
    ll_region_nbytes,
    ll_sum,
    plan_ll_gather,
    plan_ll_sum,
)
from tpspan.launch.world import World
from tpspan.spans.board import Board
from tpspan.spans.pages import Pages

NO_LIMIT = 1 << 62
# All of a rank. With words up to here: they are twice the bytes, but save a meeting. Two ranks sum
# 128 KiB in 4.7 us instead of 6.1; with more ranks the bytes count more.
LL_NBYTES = 128 << 10
# If it is no multiple of 16, targets of most ranks cannot be written in whole vectors.
ODD_GATHER_NBYTES = 2 << 20
# Up to here everybody reads everything. Beyond, each adds up its part and gathers the others': two
# launches, but fewer bytes; of two ranks as many over the link, and half of them in memory.
_SUM_NBYTES = {2: 8 << 20}
_SUM_NBYTES_OF_MORE = 1 << 20
_ALIGNMENT = 16
_NAMES = {getattr(torch, name): name for name in FUSED_SUM_DTYPES}


def sum_limit_nbytes(world_size: int) -> int:
    """Up to how many bytes a sum is made in one launch; none if there are too many ranks."""
    if world_size > LL_MOST_RANKS:
        return 0
    return _SUM_NBYTES.get(world_size, _SUM_NBYTES_OF_MORE)


class Fused:
    """The calls in one launch of one world. Collective to make, and to call.

    Every decision for or against them must follow from what all ranks have in common.
    """

    def __init__(self, world: World) -> None:
        board = Board.of(world)
        self._world_size = world.world_size
        self._sum_nbytes = sum_limit_nbytes(world.world_size)
        self._ll_nbytes = LL_NBYTES if world.world_size <= LL_MOST_RANKS else 0
        page = world.driver.page_nbytes
        words_nbytes = -(-ll_region_nbytes(world.world_size) // page) * page
        with contextlib.ExitStack() as undo:

            def pages(nbytes: int) -> Pages:
                made = Pages(board.exchange, world.driver, nbytes=nbytes)
                undo.callback(made.close)
                return made

            counters = pages(page)
            staging = pages(fused_region_nbytes())
            words = pages(words_nbytes)
            stream = torch.cuda.current_stream(world.device)
            for cleared in (counters, words):
                nbytes = cleared.page_nbytes
                zeros = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
                own = cleared.address_of(world.rank)
                world.driver.copy(own, zeros.data_ptr(), nbytes, stream.cuda_stream)
                stream.synchronize()
            self._undo = undo.pop_all()
        prepare(world.device.index, (*FUSED_KERNELS, *LL_KERNELS))
        num_counts = FUSED_COUNTS + LL_BLOCKS
        self._epochs = torch.zeros(num_counts, dtype=torch.int32, device=world.device)
        self._status = torch.zeros(world.world_size, dtype=torch.int32).pin_memory()
        self._status_bytes = memoryview(cast(Any, self._status.numpy())).cast("B")
        self._all_well = bytes(len(self._status_bytes))
        timeout_ns = int(world.timeout_s * 1e9)
        self._place = FusedPlace(
            staging.base_address,
            staging.page_nbytes,
            counters.base_address,
            counters.page_nbytes,
            world.rank,
            world.world_size,
            self._epochs.data_ptr(),
            self._status.data_ptr(),
            timeout_ns,
            world.device.index,
        )
        self._ll_place = LLPlace(
            words.base_address,
            words.page_nbytes,
            world.rank,
            world.world_size,
            self._epochs[FUSED_COUNTS:].data_ptr(),
            self._status.data_ptr(),
            timeout_ns,
            world.device.index,
        )
        torch.cuda.synchronize(world.device)  # the counts are zeros before any stream uses them
        board.barrier()  # nobody posts before every page is mapped and cleared

    def serves_gather(self, nbytes: int) -> bool:
        """Whether a gather of so many bytes of each rank is made here."""
        return nbytes > 0 and (not nbytes % _ALIGNMENT or nbytes <= ODD_GATHER_NBYTES)

    def serves_sum(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether a sum of vectors of so many bytes is made here."""
        if not 0 < nbytes <= self._sum_nbytes or dtype not in _NAMES:
            return False
        return nbytes <= self._ll_nbytes or not nbytes % _ALIGNMENT

    def serves_scatter(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether parts of so many bytes are added up and scattered here."""
        return bool(self._ll_nbytes) and nbytes > 0 and not nbytes % _ALIGNMENT and dtype in _NAMES

    def serves_sum_in_parts(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether a sum of vectors of so many bytes is made here in two launches."""
        part, rest = divmod(nbytes, self._world_size)
        return not rest and self.serves_scatter(part, dtype)

    def gather(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Gather every rank's bytes, one after another."""
        self.check()
        if nbytes <= self._ll_nbytes:
            ll_gather(self._ll_place, target, source, nbytes, stream)
        else:
            fused_gather(self._place, target, source, nbytes, stream)

    def plan_gather(self, target: int, source: int, nbytes: int) -> Callable[[int], None]:
        """The same call, to be made many times on a stream; the memory must stay what it is."""
        if nbytes <= self._ll_nbytes:
            return self._checked(plan_ll_gather(self._ll_place, target, source, nbytes))
        return self._checked(plan_fused_gather(self._place, target, source, nbytes))

    def sum(self, tensor: torch.Tensor, divisor: int, stream: int) -> None:
        """Add the ranks' tensors in place, in fp32, and divide."""
        self.check()
        source, nbytes, name = tensor.data_ptr(), tensor.nbytes, _NAMES[tensor.dtype]
        if nbytes <= self._ll_nbytes:
            ll_sum(self._ll_place, name, source, source, nbytes, divisor, stream)
        else:
            fused_sum(self._place, name, source, source, nbytes, divisor, stream)

    def scatter(self, output: torch.Tensor, whole: torch.Tensor, divisor: int, stream: int) -> None:
        """Add the ranks' parts for this rank, in fp32, and divide; the output may be its part."""
        self.check()
        addresses = output.data_ptr(), whole.data_ptr()
        name = _NAMES[output.dtype]
        fused_scatter(self._place, name, *addresses, output.nbytes, divisor, stream)

    def sum_in_parts(self, tensor: torch.Tensor, divisor: int, stream: int) -> None:
        """As ``sum``: every rank adds up a part, then all gather them."""
        part = tensor.view(-1).chunk(self._world_size)[self._place.rank]
        self.scatter(part, tensor, divisor, stream)
        self.gather(tensor.data_ptr(), part.data_ptr(), part.nbytes, stream)

    def plan_sum(self, tensor: torch.Tensor, divisor: int) -> Callable[[int], None]:
        """The same call, to be made many times on a stream; the tensor must stay where it is."""
        source, nbytes, name = tensor.data_ptr(), tensor.nbytes, _NAMES[tensor.dtype]
        if nbytes <= self._ll_nbytes:
            launch = plan_ll_sum(self._ll_place, name, source, source, nbytes, divisor)
        else:
            launch = plan_fused_sum(self._place, name, source, source, nbytes, divisor)
        return self._checked(launch)

    def _checked(self, launch: Callable[[int], None]) -> Callable[[int], None]:
        """Behind the look for a late rank, which every call begins with."""
        status, all_well, check = self._status_bytes, self._all_well, self.check

        def checked(stream: int) -> None:
            if status != all_well:
                check()
            launch(stream)

        return checked

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
