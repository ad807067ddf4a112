"""FSDP2's all-gather and reduce-scatter over span memory, for ``set_custom_all_gather`` and
``set_custom_reduce_scatter``.

FSDP2 asks such an object for memory (``allocate``), writes into it and calls the object on it.
``allocate`` hands out memory that the peers map, so that the gather moves nothing and the reduction
reads its inputs where they were written; see ``fsdp_buffers``. Sizes are equal on all ranks, since
FSDP2 pads. What spans do not serve goes to torch's own function, and is counted.

A group is that of the module's shards. If a module reshards after forward to fewer ranks than it
has, backward gathers in another group, of which ``allocate`` is not told: ``use_spans`` lets the
object look it up, a hand-made one refuses the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from tpspan.distributed import counts
from tpspan.distributed.fsdp_memory import FsdpMemory
from tpspan.distributed.lines import Buffer
from tpspan.distributed.renamed import torch_function
from tpspan.distributed.requests import Reduction, reduction_of
from tpspan.launch.world import World
from tpspan.spans.reads import Read, check_read

GroupOf = Callable[[], Any]


class _Comm:
    """What both directions share: from a group to its memory.

    Args:
        world_or_group: the ranks: a world, or a process group of torch.
        read: as ``use_spans``.
        group_of: which of torch's groups the module is about to use, where that may change.

    Attributes:
        num_served: calls over spans so far.
    """

    def __init__(
        self, world_or_group: Any, *, read: Read = "auto", group_of: GroupOf | None = None
    ) -> None:
        self.num_served = 0
        self._read = check_read(read)
        self._given = world_or_group
        self._group_of = group_of
        self._memories: dict[int, tuple[Any, FsdpMemory | None]] = {}

    def _memory(self, device: torch.device) -> FsdpMemory | None:
        """The memory of the ranks that come next; None if they share none. Collective at first."""
        group = self._given if self._group_of is None else self._group_of()
        known = self._memories.get(id(group))
        if known is None or (known[1] is not None and known[1].world.is_closed):
            known = self._memories[id(group)] = (
                group,
                FsdpMemory.among(group, device, self._read),
            )
        return known[1]


class SpanAllGather(_Comm, AllGather):  # type: ignore[misc]
    """An all-gather in which ranks copy in where their peers copy out, or copy on from.

    ``model.set_custom_all_gather(SpanAllGather(world))``; for all modules at once ``use_spans``.

    Args:
        world_or_group: the ranks that share the parameters, in the order of the module's mesh: a
            ``World``, or a process group of torch.
        read: ``"in_place"``, ``"staged"`` or ``"auto"``, as ``use_spans``.
    """

    _taken: tuple[FsdpMemory, Buffer] | None = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the gathered parameters of one module, (numel,). Collective.

        It may be written at once: all ranks have finished reading what it held before.

        Raises:
            OutOfMemoryError: there is no memory for it, on this or another rank.
            PeerError: other ranks did not come.
        """
        self._taken = None
        memory = self._memory(device)
        numel = math.prod(int(each) for each in size)
        if memory is None or not memory.serves(numel, device):
            return torch.empty(*size, dtype=dtype, device=device)
        buffer = memory.gathers.take(numel * dtype.itemsize)
        self._taken = memory, buffer
        return memory.whole(buffer, numel, dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Hold the stream, on the host the caller, until all parts are there. Collective.

        Raises:
            CollectiveMismatch: the ranks gather different things.
            PeerError: other ranks did not come.
            ValueError: the group is not the ranks that this object was made for.
        """
        taken, self._taken = self._taken, None
        if taken is None or taken[0].gathers.find(output_tensor) is not taken[1]:
            counts.count_delegated("all_gather_into_tensor")
            return torch_function("all_gather_into_tensor")(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        memory, buffer = taken
        _check_ranks(memory.world, group)
        self.num_served += 1
        return memory.gather(buffer, output_tensor, async_op)


class SpanReduceScatter(_Comm, ReduceScatter):  # type: ignore[misc]
    """A reduce-scatter that reads the ranks' gradients where FSDP2 has put them.

    Sums of bf16 and fp16 are accumulated in fp32, in the order of the ranks, and rounded once.

    Args:
        world_or_group: as for ``SpanAllGather``.
    """

    _taken: tuple[FsdpMemory, Buffer, torch.dtype] | None = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the gradients of one module, and then, ordinary, for this rank's part of them.

        FSDP2 asks twice for every call, first for the input. The second request is known by its
        size. Raises as ``SpanAllGather.allocate``.
        """
        numel = math.prod(int(each) for each in size)
        if self._taken is not None:
            memory, buffer, taken_dtype = self._taken
            whole_nbytes = numel * dtype.itemsize * memory.world.world_size
            if dtype == taken_dtype and whole_nbytes == buffer.asked_nbytes:
                return torch.empty(*size, dtype=dtype, device=device)
            self._taken = None  # that call was never made
        found = self._memory(device)
        if found is None or not found.serves(numel, device):
            return torch.empty(*size, dtype=dtype, device=device)
        buffer = found.reduces.take(numel * dtype.itemsize)
        self._taken = found, buffer, dtype
        return found.whole(buffer, numel, dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce this rank's part of all inputs. Collective. Raises as ``SpanAllGather``.

        Args:
            op: any that FSDP2 uses, a sum with a factor (``PREMUL_SUM``) included.
        """
        taken, self._taken = self._taken, None
        factor = _factor(op)
        reduction = Reduction.SUM if factor is not None else reduction_of(op)
        is_ours = taken is not None and taken[0].reduces.find(input_tensor) is taken[1]
        if taken is None or not is_ours or reduction is None or async_op:
            counts.count_delegated("reduce_scatter_tensor")
            return torch_function("reduce_scatter_tensor")(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        memory, buffer, _ = taken
        _check_ranks(memory.world, group)
        self.num_served += 1
        memory.reduce_scatter(buffer, output_tensor, reduction)
        if factor is not None:
            output_tensor.mul_(factor)
        return None


def _check_ranks(world: World, group: Any) -> None:
    if (group.rank(), group.size()) != (world.rank, world.world_size):
        raise ValueError(
            f"rank {world.rank} of a world of {world.world_size} was asked to gather as rank "
            f"{group.rank()} of a group of {group.size()}: the object was made for other ranks "
            "than the module's, or the module reshards to fewer ranks after forward, which "
            "tpspan.use_spans(model) serves"
        )


def _factor(op: Any) -> Any:
    """By what a ``PREMUL_SUM`` multiplies; None for any other operation."""
    if op != ReduceOp.PREMUL_SUM:
        return None
    return op.__getstate__()[1]
