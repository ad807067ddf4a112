"""torch.distributed set up under any launcher: NCCL or gloo carry what spans do not."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpspan.launch.control import Control
from tpspan.launch.hosts import Member


def set_up(control: Control, members: Sequence[Member], *, timeout_s: float) -> Store:
    """Collective. Initialise torch's default process group; return the store it stands on.

    Rank 0 serves the store on a port that the system chooses and publishes the address through the
    control plane, so there is no port to agree on beforehand. NCCL carries GPU tensors where every
    rank has a GPU of its own; gloo carries the rest.
    """
    limit = timedelta(seconds=timeout_s)
    size = control.world_size
    store = None
    if control.rank == 0:
        store = TCPStore("0.0.0.0", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
    here = len({member.host for member in members}) == 1
    address = (_own_address(here), store.port) if store is not None else None
    host, port = control.broadcast(address, timeout_s=timeout_s)
    if store is None:
        store = TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    gpus = {(member.host, member.gpu) for member in members}
    own_gpus = len(gpus) == size and all(member.gpu for member in members)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own_gpus else "gloo",
        store=PrefixStore("tpspan", store),
        rank=control.rank,
        world_size=size,
        timeout=limit,
    )
    return store


def tear_down() -> None:
    """Destroy torch's default process group, if it is still there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_address(one_host: bool) -> str:
    if one_host:
        return "127.0.0.1"
    # No packet is sent: connecting a datagram socket only asks the routing table for our address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
