"""Drop-in replacements of torch.distributed's collectives, over memory that all ranks map.

What is not here is torch's own: ``import tpspan.distributed as dist`` in place of
``import torch.distributed as dist`` is the whole change.

From the bottom: ``requests`` and ``counts`` are words and counts; ``reductions`` is arithmetic;
``work`` is what a call without waiting returns; ``steps`` is how ranks meet; ``host_group`` and
``cuda_group`` carry calls out on one kind of device; ``store_world`` and ``groups`` find the ranks;
``calls`` checks arguments; ``collectives`` and ``process_group`` are what programs see.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as _torch

from tpspan.distributed.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_gather_single,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from tpspan.distributed.counts import Stats, stats
from tpspan.distributed.process_group import SpanProcessGroup, register

__all__ = [
    "SpanProcessGroup",
    "Stats",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register",
    "stats",
]

register()


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})
