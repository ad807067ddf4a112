"""What a ``Handoff`` is asked for and what it reports, without doing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver
from tpspan.parallel.side import SidePlace

BLOCK_UNIT_NBYTES = 4096
"""Blocks that are not remapped begin at multiples of this: no two share a page of the processor."""
MODES = ("auto", "window", "remap", "send")


@dataclass(frozen=True)
class HandoffStats:
    """What a channel has done on this rank.

    Attributes:
        mode: ``window``, ``remap`` or ``send``.
        nbytes, depth: bytes of a block, and how many blocks go round.
        ring_nbytes: memory of the (first) consumer that they take together. On the host backend the
            rest of the last page of 2 MiB takes none, since nothing is ever written there.
        num_handovers: slots released, on both sides if this rank is both.
        num_remaps: blocks brought behind a fixed address.
        remap_us: how long that took the helper thread each time, the median of the last hundred;
            0 where there were none.
        remap_host_us: how much of that the thread ran, and did not wait for others of this process.
        copied_nbytes: bytes that were copied to hand them over; 0 unless the mode is ``send``.
        num_waits: how often the host found, in taking a slot, that the other side was not so far.
    """

    mode: str
    nbytes: int
    depth: int
    ring_nbytes: int
    num_handovers: int
    num_remaps: int
    remap_us: float
    remap_host_us: float
    copied_nbytes: int
    num_waits: int


def checked_ranks(world: World, src: int, dst: int | Sequence[int]) -> tuple[int, ...]:
    """The consumers, if producer and consumers can be a channel and this rank is one of them."""
    targets = (dst,) if isinstance(dst, int) else tuple(dst)
    for rank in (src, *targets):
        if not 0 <= rank < world.world_size:
            raise ValueError(f"there is no rank {rank} in a world of {world.world_size}")
    if not targets or len(set(targets)) != len(targets):
        raise ValueError(f"dst={targets}: one consumer, or several different ones")
    if src in targets and len(targets) > 1:
        raise ValueError(f"rank {src} cannot hand over to itself and to others in one channel")
    if world.rank not in (src, *targets):
        raise ValueError(
            f"rank {world.rank} is neither src={src} nor in dst={targets}: only those call"
        )
    return targets


def choose_mode(mode: str, fixed_address: bool, *, is_one_domain: bool) -> str:
    """The mode that is meant: ``window``, ``remap`` or ``send``."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")
    if fixed_address and mode not in ("auto", "remap"):
        raise ValueError(f"mode={mode!r} has no fixed address: use remap")
    needs_domain = fixed_address or mode in ("window", "remap")
    if needs_domain and not is_one_domain:
        raise ValueError("these ranks cannot map each other's memory: only mode send is left")
    if mode == "auto":
        mode = "remap" if fixed_address else "window"
        mode = mode if is_one_domain else "send"
    return mode


def places_of(
    world: World,
    src: int,
    targets: tuple[int, ...],
    devices: tuple[torch.device | str, torch.device | str] | None,
) -> tuple[SidePlace, SidePlace]:
    """Where the producer's and the consumer's side stand on this rank."""
    if devices is None:
        devices = (world.device, world.device)
    elif targets != (src,):
        raise ValueError("devices are for one rank that is both src and dst; others have their own")
    first, second = (torch.device(device) for device in devices)
    drivers = {world.device: world.driver}
    for device in (first, second):
        if device not in drivers:
            if world.backend != "cuda" or device.type != "cuda" or device.index is None:
                raise ValueError(f"devices={devices}: GPUs with an index, in a world of GPUs")
            drivers[device] = CudaDriver(device.index)
    made = [
        SidePlace(world.backend, device, drivers[device], world.rank, world.timeout_s)
        for device in (first, second)
    ]
    return made[0], made[1]
