"""What torch offers for the same work: gloo or NCCL, and symmetric memory where it can be had.

NVLink multicast stays off here: it can only be compared with what does without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from tpspan.distributed.renamed import torch_function
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
SHARED = "n/a: ranks share a GPU, which NCCL refuses"
all_gather: Any = torch_function("all_gather_into_tensor")
reduce_scatter: Any = torch_function("reduce_scatter_tensor")

_symmetric: Any = _symmetric_memory


def without_multicast() -> None:
    """Keep NCCL and symmetric memory off NVLink multicast; before either is first used."""
    os.environ.update(MULTICAST_OFF)


def collective(bench: Bench, body: Callable[[], torch.Tensor]) -> list[Contender]:
    """The call of torch's own group: on CUDA by NCCL if every rank has a GPU, otherwise by gloo."""
    if not bench.is_cuda:
        return [Contender("gloo", "peer", body, "its own synchronisation")]
    if bench.shares_device:
        through_host = "its own synchronisation; CUDA tensors through host memory"
        return [
            Contender("nccl", "peer", None, SHARED),
            Contender("gloo", "peer", body, through_host),
        ]
    return [Contender("nccl", "peer", body, "its own synchronisation; multicast off")]


def group_name() -> str:
    """torch's default group, as its operators name it."""
    group: Any = dist.group.WORLD
    return str(group.group_name)


def symmetric(bench: Bench, numel: int, dtype: torch.dtype) -> torch.Tensor | str:
    """A tensor in torch's symmetric memory, or why there is none. Collective."""
    if not bench.is_cuda:
        return "n/a: torch symmetric memory is for CUDA"
    if bench.shares_device:
        return "n/a: ranks share a GPU, which torch symmetric memory refuses"
    reason, made = "", None
    try:
        made = _symmetric.empty(numel, dtype=dtype, device=bench.world.device)
        _symmetric.rendezvous(made, group_name())
    except (RuntimeError, TypeError) as error:
        reason = f"n/a: {str(error).splitlines()[0][:120]}"
    reason = next(filter(None, bench.board.all_gather(reason)), "")
    if reason or made is None:
        return reason
    return made


def of_symmetric(
    name: str, memory: torch.Tensor | str, body: Callable[[], torch.Tensor], note: str
) -> Contender:
    """A contender over symmetric memory, left out if there is none."""
    if isinstance(memory, str):
        return Contender(name, "peer", None, memory)
    return Contender(name, "peer", body, note)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Make the current stream wait for an operator that runs on a stream of torch's own."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result
