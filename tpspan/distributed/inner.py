"""torch's own backends inside a process group of spans: gloo for the CPU, NCCL where it can run.

Where ranks share a GPU, which NCCL refuses, their tensors go to gloo through host memory.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as _c10d

from tpspan.distributed.through_host import ThroughHost
from tpspan.memory.cuda import cuda_device_count, device_uuid

c10d: Any = _c10d  # torch's annotations do not export all of it


class InnerBackends:
    """A backend for each kind of device. Collective to make, over the ranks of the store.

    Args:
        store: a group's own part of a store.
        rank, size: in the group.
        timeout: how long a call waits for other ranks, a ``timedelta``.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: Any) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        gloo = c10d.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        self._of_kind: dict[str, Any] = {"cpu": gloo}
        self._downwards: Any = None
        self._is_grouping = False
        if torch.cuda.is_available():
            own_gpus = _have_own_gpus(PrefixStore("gpus/", store), rank, size)
            has_nccl = own_gpus and c10d.is_nccl_available()
            self._of_kind["cuda"] = self._nccl("nccl/") if has_nccl else ThroughHost(gloo)

    def of(self, device: torch.device) -> Any:
        """The backend for tensors on a device."""
        try:
            return self._of_kind[device.type]
        except KeyError:
            text = f"no backend of this group serves tensors on {device}"
            raise NotImplementedError(text) from None

    def between(self, device: torch.device, peer: int, *, sending: bool) -> Any:
        """The backend for a send to a rank, or a receive from it.

        torch groups the sends and receives of ``batch_isend_irecv`` for its own class of groups
        only. NCCL queues single ones of a pair of ranks one after another, so that two ranks which
        both send first would wait for ever: what goes to lower ranks has a queue of its own.
        """
        inner = self.of(device)
        is_upwards = (peer > self._rank) == sending
        if is_upwards or self._is_grouping or not inner.supports_coalescing:
            return inner
        if self._downwards is None:
            self._downwards = self._nccl("downwards/")
        return self._downwards

    def start_grouping(self, device: torch.device) -> None:
        """Let NCCL carry out what follows at once, when the group ends; gloo cannot."""
        if self.of(device).supports_coalescing:
            self.of(device)._start_coalescing()
            self._is_grouping = True

    def end_grouping(self, device: torch.device, works: list[Any]) -> list[Any]:
        """Which of the works since ``start_grouping``, and of the group, are to be waited for."""
        if not self._is_grouping:
            return works
        self._is_grouping = False
        grouped = self.of(device)._end_coalescing()
        # Single works of grouped calls are not complete in themselves: the group's is theirs.
        works = [work for work in works if _is_python(work)]
        return works if grouped is None else [*works, grouped]

    def registrable(self) -> Iterator[tuple[str, Any]]:
        """Kinds of devices, each with a backend that torch knows."""
        for kind, inner in self._of_kind.items():
            yield kind, inner.gloo if isinstance(inner, ThroughHost) else inner

    def all(self) -> list[Any]:
        """Every backend that was made."""
        made = [backend for _, backend in self.registrable()]
        return [*made, *filter(None, [self._downwards])]

    def _nccl(self, prefix: str) -> Any:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = PrefixStore(prefix, self._store)
        return c10d.ProcessGroupNCCL(store, self._rank, self._size, options)


def _is_python(work: Any) -> bool:
    """Whether a work is one of this library's: NCCL's own are C++."""
    return type(work).__module__.startswith("tpspan.")


def _have_own_gpus(store: Store, rank: int, size: int) -> bool:
    """Whether no host has more ranks of the group than GPUs: NCCL refuses ranks that share one."""
    seen = [device_uuid(index) for index in range(cuda_device_count())]
    store.set(str(rank), " ".join([socket.gethostname(), *seen]))
    num_ranks: dict[str, int] = {}
    gpus: dict[str, set[str]] = {}
    for peer in range(size):
        # Each may see all GPUs of its host or only its own.
        host, *uuids = store.get(str(peer)).decode().split(" ")
        num_ranks[host] = num_ranks.get(host, 0) + 1
        gpus.setdefault(host, set()).update(uuids)
    return all(number <= len(gpus[host]) for host, number in num_ranks.items())
