"""How the host adds up, or otherwise reduces, vectors that lie at addresses it maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from tpspan.distributed.reductions import combine
from tpspan.distributed.requests import Reduction
from tpspan.kernels.host_reduce import HOST_SUM_DTYPES, host_sum

Reducer = Callable[[int, list[int], int, int], None]
"""Reduces the vectors at some addresses, in their order, into a target of so many elements, and
copies it to a second place, if that is not 0."""

_FAST = {getattr(torch, name): name for name in HOST_SUM_DTYPES}


def reducer(dtype: torch.dtype, reduction: Reduction, num_sources: int) -> Reducer:
    """What reduces vectors of a dtype; the target may be one of them."""
    name = _FAST.get(dtype)
    if name is None or reduction not in (Reduction.SUM, Reduction.AVG):
        return _combining(dtype, reduction)
    divisor = float(num_sources) if reduction is Reduction.AVG else 1.0
    table = (ctypes.c_int64 * num_sources)()
    address = ctypes.addressof(table)

    def reduce(target: int, sources: list[int], numel: int, second: int) -> None:
        table[:] = sources  # type: ignore[assignment]
        host_sum(name, target, address, num_sources, numel, divisor, second)

    return reduce


def _combining(dtype: torch.dtype, reduction: Reduction) -> Reducer:
    def reduce(target: int, sources: list[int], numel: int, second: int) -> None:
        tensors = [_over(address, numel, dtype) for address in (target, *sources)]
        combine(tensors[0], tensors[1:], reduction)
        if second:
            ctypes.memmove(second, target, numel * dtype.itemsize)

    return reduce


def _over(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
