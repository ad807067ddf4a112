"""Reducing tensors that this rank can read, in the order of the ranks: for every dtype.

The order is the same whoever reduces, so all ranks get the same bits. What has fewer bits than
fp32 is reduced in fp32 and rounded once.
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


def combine(target: torch.Tensor, sources: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Reduce the sources, in their order, into the target; it may be one of them."""
    dtype = target.dtype
    if dtype == torch.bool:
        reduction = _OF_BOOLS.get(reduction, reduction)
    # The narrow floats, fp8 among them, know few operations of their own.
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
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
