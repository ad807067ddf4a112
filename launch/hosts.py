"""Who sits where: comparing what the ranks say about their hosts, and dealing out GPUs.

The launcher need not say which ranks share a host (Hydra and Slurm do so only in part): every rank
tells what it sees, and all of them draw the same conclusions from the same list.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpspan.errors import LaunchError


@dataclass(frozen=True)
class Member:
    """What one rank says about itself.

    Attributes:
        host: host name and boot id; equal means one kernel, so memory can be shared.
        user_id: descriptors pass only between processes of one user.
        gpus: UUIDs of the GPUs this rank sees, by index.
        cpus: the processors it may run on.
        gpu: UUID of the GPU that was dealt to it, empty on the host backend.
    """

    host: str
    user_id: int
    gpus: tuple[str, ...]
    cpus: frozenset[int]
    gpu: str = ""


def this_member(gpus: tuple[str, ...]) -> Member:
    """Describe this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.exists() else ""
    host = f"{socket.gethostname()} {boot}"
    return Member(host, os.getuid(), gpus, frozenset(os.sched_getaffinity(0)))


def on_host_of(members: Sequence[Member], rank: int) -> tuple[int, ...]:
    """Return the ranks on that rank's host, itself included."""
    host = members[rank].host
    return tuple(other for other, member in enumerate(members) if member.host == host)


def domain_of(members: Sequence[Member], rank: int) -> tuple[int, ...]:
    """Return the ranks that can map each other's memory: one host, one user."""
    mine = members[rank]
    return tuple(
        other
        for other, member in enumerate(members)
        if (member.host, member.user_id) == (mine.host, mine.user_id)
    )


def shares_gpu(members: Sequence[Member], rank: int) -> bool:
    """Say whether another rank of the same host was dealt the same GPU."""
    mine = members[rank].gpu
    peers = (other for other in on_host_of(members, rank) if other != rank)
    return bool(mine) and any(members[other].gpu == mine for other in peers)


def num_threads(members: Sequence[Member], rank: int) -> int:
    """Return how many threads a rank may use, so that its host's processors are not overbooked."""
    mine = members[rank].cpus
    sharers = [other for other in on_host_of(members, rank) if members[other].cpus & mine]
    return max(1, len(mine) // len(sharers))


def deal_gpus(members: Sequence[Member], *, share_device: bool) -> tuple[int, ...]:
    """Return for every rank the index of its GPU, among those it sees.

    Ranks of a host that see the same GPUs in the same order take them by turns: all see all of
        them, or each only its own. More ranks than GPUs is an error unless ``share_device``.

    Raises:
        LaunchError: a rank sees no GPU, or two ranks would get one and may not.
    """
    blind = [rank for rank, member in enumerate(members) if not member.gpus]
    if blind:
        raise LaunchError(
            f"ranks {_list(blind)} see no GPU; give each one, or use tpspan.init(backend='host')"
        )
    turns: dict[tuple[str, tuple[str, ...]], int] = {}
    indices = []
    takers: dict[tuple[str, str], list[int]] = {}
    for rank, member in enumerate(members):
        group = (member.host, member.gpus)
        turn = turns.get(group, 0)
        turns[group] = turn + 1
        index = turn % len(member.gpus)
        indices.append(index)
        takers.setdefault((member.host, member.gpus[index]), []).append(rank)
    if not share_device:
        for (host, gpu), ranks in takers.items():
            if len(ranks) > 1:
                raise LaunchError(
                    f"ranks {_list(ranks)} on {host.split()[0]} would share GPU {gpu}: start as "
                    "many ranks as there are GPUs, or allow it with "
                    "tpspan.init(share_device=True) or TPSPAN_SHARE_DEVICE=1"
                )
    return tuple(indices)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
