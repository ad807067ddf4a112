"""How GPUs add up, or otherwise reduce, what the ranks have staged.

One-shot, for small vectors: each rank reduces all of them. At the root, where ranks share a GPU and
stage in host memory, so that only one of them runs a kernel. Two-shot: each reduces its slice and
stages the result where nobody reads its input, then all pull the results. In all of them the ranks'
values are taken in the order of the ranks, by somebody who rounds once.
"""

from __future__ import annotations

import torch

from tpspan.distributed.buffers import Buffers
from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Reduction
from tpspan.kernels.stream_reduce import DEVICE_SUM_DTYPES, device_sum, pull

_VECTOR_NBYTES = 16
_ALIGNMENT = 256
_ROOT = 0
_FAST = {getattr(torch, name): name for name in DEVICE_SUM_DTYPES}


def one_shot(
    buffers: Buffers,
    tensor: torch.Tensor,
    address: int,
    nbytes: int,
    reduction: Reduction,
    stream: int,
) -> None:
    """Reduce ``nbytes`` at ``address`` in the tensor, in place and on every rank."""
    first = buffers.stage(address, nbytes, stream)
    buffers.meet(stream)
    numel = nbytes // tensor.element_size()
    reduce_over(buffers, address, 0, first, address, numel, reduction, stream, (tensor,))
    buffers.leave(stream)


def at_root(
    buffers: Buffers,
    tensor: torch.Tensor,
    target: int,
    start: int,
    nbytes: int,
    reduction: Reduction,
    stream: int,
) -> None:
    """Reduce the ranks' vectors in the root's buffer, from which each rank takes its part.

    Args:
        tensor: this rank's vector.
        target, start, nbytes: where this rank's part goes, its offset in the vector, its size.
    """
    source = tensor.data_ptr()
    for at, part in buffers.parts(tensor.nbytes):
        first = buffers.stage(source + at, part, stream)
        buffers.meet(stream)
        result = buffers.staged(first, _ROOT)
        if buffers.rank == _ROOT:
            numel = part // tensor.element_size()
            reduce_over(buffers, result, 0, first, result, numel, reduction, stream, (tensor,))
        buffers.meet(stream)
        begin = max(start, at)
        taken = max(min(start + nbytes, at + part) - begin, 0)
        buffers.copy(target + begin - start, result + begin - at, taken, stream)
        buffers.leave(stream)


def two_shot(
    buffers: Buffers,
    tensor: torch.Tensor,
    address: int,
    nbytes: int,
    reduction: Reduction,
    stream: int,
) -> None:
    """Reduce ``nbytes`` at ``address`` in the tensor, in place and on every rank."""
    rank, size = buffers.rank, buffers.world_size
    slot = -(-nbytes // size // _ALIGNMENT) * _ALIGNMENT
    start = min(rank * slot, nbytes)
    end = min(start + slot, nbytes)
    first = buffers.stage(address, start, stream)
    own = buffers.staged(first, rank)
    buffers.copy(own + end, address + end, nbytes - end, stream)
    buffers.meet(stream)
    # The result goes where no peer reads: they read the other slices of this buffer.
    mine, numel = address + start, (end - start) // tensor.element_size()
    reduce_over(
        buffers, mine, own + start, first + start, mine, numel, reduction, stream, (tensor,)
    )
    buffers.meet(stream)
    pull(
        address,
        slot,
        first,
        buffers.region_nbytes + slot,
        slot,
        nbytes,
        rank,
        size,
        size - 1,
        device=buffers.device_index,
        stream=stream,
    )
    buffers.leave(stream)


def reduce_over(
    buffers: Buffers,
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
        target, second: where the result goes; ``second`` may be 0.
        tensors: the call's, in which ``target`` and ``own`` lie; the first has the dtype.
    """
    if not numel:
        return
    rank, size, stride = buffers.rank, buffers.world_size, buffers.region_nbytes
    dtype = tensors[0].dtype
    places = (target, second, first, stride, own)
    if sum_on_device(dtype, places, numel, rank, size, reduction, buffers.device_index, stream):
        return
    addresses = [buffers.staged(first, peer) for peer in range(size)]
    addresses[rank] = own
    sources = [_view(buffers, address, numel, tensors) for address in addresses]
    combine(_view(buffers, target, numel, tensors), sources, reduction)
    if second:
        buffers.copy(second, target, numel * dtype.itemsize, stream)


def sum_on_device(
    dtype: torch.dtype,
    places: tuple[int, int, int, int, int],
    numel: int,
    rank: int,
    size: int,
    reduction: Reduction,
    device_index: int,
    stream: int,
) -> bool:
    """Add up by our kernel, if there is one for this; otherwise do nothing and return False.

    Args:
        places: target, second target or 0, the first rank's source, the stride from one rank's to
            the next, and this rank's own source.
    """
    target, second, first, stride, own = places
    name = _FAST.get(dtype)
    if not name or not reduction.is_sum or (target | second | first | own) % _VECTOR_NBYTES:
        return False
    device_sum(
        name,
        target,
        second,
        first,
        stride,
        own,
        numel,
        rank,
        size,
        reduction.divisor(size),
        device=device_index,
        stream=stream,
    )
    return True


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
