"""Drop-in replacements of torch.distributed's collectives, over memory that all ranks map.

What is not here is torch's own: ``import tpspan.distributed as dist`` in place of
``import torch.distributed as dist`` is the whole change.

From the bottom: ``requests`` and ``counts`` are words and counts; ``reductions`` is arithmetic;
``work`` is what a call without waiting returns; ``steps`` is how ranks meet on the host;
``buffers``, ``fused`` and ``journal`` are how they do on a stream; ``host_group`` and
``cuda_group`` carry calls out on one kind of device, with ``host_reduce`` and ``cuda_reduce``;
``domains`` does so between hosts; ``store_world`` and ``groups`` find the ranks; ``calls`` checks
arguments, with ``tensors`` and ``in_place``; ``collectives`` and ``process_group``, over its
``inner`` backends and, where ranks share a GPU, ``through_host``, are what programs see. For FSDP2
there are ``lines`` on which ranks meet, ``fsdp_buffers`` and ``fsdp_memory`` over them, ``fsdp``,
which torch calls, and ``fsdp_model``.

Importing this makes ``init_process_group("tpspan")`` known to torch, and nothing else: the rest is
imported at its first use, so that torch can find the backend by its entry point at no cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch.distributed as _torch

from tpspan.distributed.registration import register

if TYPE_CHECKING:
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
    from tpspan.distributed.fsdp import SpanAllGather, SpanReduceScatter
    from tpspan.distributed.fsdp_model import use_spans
    from tpspan.distributed.process_group import SpanProcessGroup

_HOME = {
    "all_gather": "collectives",
    "all_gather_into_tensor": "collectives",
    "all_gather_object": "collectives",
    "all_gather_single": "collectives",
    "all_reduce": "collectives",
    "barrier": "collectives",
    "broadcast": "collectives",
    "reduce_scatter": "collectives",
    "reduce_scatter_single": "collectives",
    "reduce_scatter_tensor": "collectives",
    "Stats": "counts",
    "stats": "counts",
    "SpanAllGather": "fsdp",
    "SpanReduceScatter": "fsdp",
    "use_spans": "fsdp_model",
    "SpanProcessGroup": "process_group",
}

__all__ = [
    "SpanAllGather",
    "SpanProcessGroup",
    "SpanReduceScatter",
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
    "use_spans",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        return getattr(_torch, name)
    value = getattr(importlib.import_module(f"tpspan.distributed.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *dir(_torch)})


register()
