"""Reducing tensors that this rank can read, in the order of the ranks: for every dtype.

The order is the same whoever reduces, so all ranks get the same bits. What has fewer bits than
fp32 is reduced in fp32 and rounded once. torch can hardly compute with unsigned integers of more
than 8 bits: those of 16 and 32 bits are reduced in wider ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpspan.distributed.requests import Reduction

Step = Callable[[torch.Tensor, torch.Tensor], object]

_STEPS: dict[Reduction, Step] = {
    Reduction.SUM: lambda total, more: total.add_(more),
    Reduction.AVG: lambda total, more: total.add_(more),
    Reduction.PRODUCT: lambda total, more: total.mul_(more),
    Reduction.MIN: lambda total, more: torch.minimum(total, more.to(total.dtype), out=total),
    Reduction.MAX: lambda total, more: torch.maximum(total, more.to(total.dtype), out=total),
    Reduction.BAND: lambda total, more: total.bitwise_and_(more),
    Reduction.BOR: lambda total, more: total.bitwise_or_(more),
    Reduction.BXOR: lambda total, more: total.bitwise_xor_(more),
}
# A truth value has one bit: its sum and maximum are "or", its product and minimum "and".
_OF_BOOLS = {
    Reduction.SUM: Reduction.BOR,
    Reduction.MAX: Reduction.BOR,
    Reduction.PRODUCT: Reduction.BAND,
    Reduction.MIN: Reduction.BAND,
}
_WIDE = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}


def combine(target: torch.Tensor, sources: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Reduce the sources, in their order, into the target; it may be one of them."""
    dtype = target.dtype
    if dtype == torch.bool:
        reduction = _OF_BOOLS.get(reduction, reduction)
    if dtype == torch.uint64:
        _combine_uint64(target, sources, reduction)
        return
    wide = _wide(dtype)
    step = _STEPS[reduction]
    total = sources[0].to(wide, copy=True)
    for more in sources[1:]:
        step(total, more.to(wide))
    if reduction is Reduction.AVG:
        if dtype.is_floating_point or dtype.is_complex:
            total.div_(len(sources))
        else:
            total = torch.div(total, len(sources), rounding_mode="trunc")
    target.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what a dtype is reduced; the narrow floats know few operations of their own."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return _WIDE.get(dtype, dtype)


def _combine_uint64(
    target: torch.Tensor, sources: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """By int64: the same bits, but for the order, which is the same once the top bit is turned."""
    is_order = reduction in (Reduction.MIN, Reduction.MAX)
    top = torch.iinfo(torch.int64).min if is_order else 0
    signed = [source.view(torch.int64) ^ top for source in sources]
    result = target.view(torch.int64)
    combine(result, signed, reduction)
    result.bitwise_xor_(top)
