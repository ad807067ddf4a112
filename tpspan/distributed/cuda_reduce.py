"""How a GPU adds up, or otherwise reduces, what the ranks have staged."""

from __future__ import annotations

import torch

from tpspan.distributed.buffers import Buffers
from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Reduction
from tpspan.kernels.stream_reduce import DEVICE_SUM_DTYPES, device_sum

_VECTOR_NBYTES = 16
_FAST = {getattr(torch, name): name for name in DEVICE_SUM_DTYPES}


def reduce_over(
    buffers: Buffers,
    ranks: tuple[int, int],
    target: int,
    second: int,
    first: int,
    own: int,
    numel: int,
    reduction: Reduction,
    stream: int,
    tensors: tuple[torch.Tensor, ...],
) -> None:
    """Reduce what lies at ``first`` and on in every region, this rank's own at ``own``.

    Args:
        ranks: this rank, and how many there are.
        target, second: where the result goes; ``second`` may be 0.
        tensors: the call's, in which ``target`` and ``own`` lie; the first has the dtype.
    """
    rank, size = ranks
    dtype = tensors[0].dtype
    name = _FAST.get(dtype)
    is_sum = reduction in (Reduction.SUM, Reduction.AVG)
    if name and is_sum and not (target | second | first | own) % _VECTOR_NBYTES:
        device_sum(
            name,
            target,
            second,
            first,
            buffers.region_nbytes,
            own,
            numel,
            rank,
            size,
            size if reduction is Reduction.AVG else 1,
            device=tensors[0].device.index,
            stream=stream,
        )
        return
    addresses = [first + peer * buffers.region_nbytes for peer in range(size)]
    addresses[rank] = own
    sources = [_view(buffers, address, numel, tensors) for address in addresses]
    combine(_view(buffers, target, numel, tensors), sources, reduction)
    if second:
        buffers.copy(second, target, numel * dtype.itemsize, stream)


def _view(
    buffers: Buffers, address: int, numel: int, tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """A tensor over a part of the buffers or of one of the call's own tensors."""
    staged = buffers.view(address, numel, tensors[0].dtype)
    if staged is not None:
        return staged
    for tensor in tensors:
        offset = address - tensor.data_ptr()
        start = offset // tensor.element_size()
        if 0 <= start < tensor.numel():
            return tensor.detach().view(-1)[start : start + numel]
    raise AssertionError("an address of no tensor of the call")
