"""A world of the ranks of one of torch's process groups, over the group's own store.

``tpspan.init`` finds out who launched the job and gives every rank its device. A process group has
settled both already: its ranks are what its store says, and a rank's device is that of its tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import weakref
from dataclasses import replace

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tpspan.launch.control import StarControl
from tpspan.launch.hosts import on_host_of, this_member
from tpspan.launch.store import Keys, StoreChannel
from tpspan.launch.world import Facts, World
from tpspan.memory.cuda import CudaDriver, cuda_device_count, device_uuid
from tpspan.memory.driver import Driver
from tpspan.memory.host import HostDriver


class LentStore:
    """The store of a process group that torch destroys without a word to anybody here.

    It is not kept alive: the rank that serves it stops to serve as soon as torch lets go, so that
    the next group can be made at once. From then on it is, for a channel, a server that is gone.

    Args:
        store: as torch's table of groups has it, from which it goes when the group is destroyed.
    """

    def __init__(self, store: Store) -> None:
        self._of_torch = weakref.ref(store)

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's."""
        self._lent().set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """As torch's."""
        return self._lent().get(key)

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return self._lent().check(keys)

    def add(self, key: str, amount: int) -> int:
        """As torch's."""
        return self._lent().add(key, amount)

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        return self._lent().delete_key(key)

    def _lent(self) -> Store:
        store = self._of_torch()
        if store is None:
            raise RuntimeError("torch has destroyed the process group")
        return store


def world_over(
    store: Keys, name: str, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> World:
    """Make a world. Collective over the ranks of the store.

    Args:
        store: of one group; different groups have different ones, or names.
        name: the same on all ranks, and not used before with this store.
        rank, world_size: in the group.
        device: where this rank's tensors are; its type is the same on all ranks.
        timeout_s: the deadline of the world's calls.

    Raises:
        PeerError: some ranks did not come.
        DriverError: the device's memory driver could not start.
    """
    channel = StoreChannel(store, f"tpspan/{name}", rank, world_size, serves=False)
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        control = StarControl(channel, range(world_size), "world", timeout_s)
        gpus: tuple[str, ...] = ()
        if device.type == "cuda":
            gpus = tuple(device_uuid(index) for index in range(cuda_device_count()))
        index = device.index or 0
        member = this_member(gpus)
        if gpus:
            member = replace(member, gpu=gpus[index])
        greetings = control.all_gather((member, secrets.token_bytes(16)))
        members = [greeting[0] for greeting in greetings]
        driver: Driver = CudaDriver(index) if device.type == "cuda" else HostDriver()
        mates = on_host_of(members, rank)
        token = hashlib.sha256(greetings[0][1] + name.encode()).digest()[:16]
        source = f"the ranks of the process group {name!r}"
        facts = Facts("process group", source, mates.index(rank), len(mates), timeout_s, token)
        world = World(
            channel,
            control,
            range(world_size),
            members,
            driver,
            facts,
            lambda: channel.close(0.0 if control.failed else 1.0),
        )
        stack.pop_all()
    return world
