"""torch's own backends inside a process group of spans: gloo for the CPU, NCCL where it can run."""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as _c10d

c10d: Any = _c10d  # torch's annotations do not export all of it


def inner_backends(store: Store, rank: int, size: int, timeout: Any) -> dict[str, Any]:
    """A backend for each kind of device. Collective over the ranks of the store."""
    gloo = c10d.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
    inner: dict[str, Any] = {"cpu": gloo}
    if not torch.cuda.is_available():
        return inner
    inner["cuda"] = gloo
    if _have_own_gpus(PrefixStore("gpus/", store), rank, size) and c10d.is_nccl_available():
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        inner["cuda"] = c10d.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, nccl_options)
    return inner


def _have_own_gpus(store: Store, rank: int, size: int) -> bool:
    """Whether no host has more ranks of the group than GPUs: NCCL refuses ranks that share one."""
    store.set(str(rank), f"{socket.gethostname()} {torch.cuda.device_count()}")
    told = [store.get(str(peer)).decode() for peer in range(size)]
    return all(told.count(line) <= int(line.rsplit(" ", 1)[1]) for line in set(told))
