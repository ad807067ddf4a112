"""``tpspan.attach_module``: a module whose tensors are published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from tpspan.errors import PublicationMismatch
from tpspan.launch.world import World
from tpspan.parallel.regions import Region, Slots, check_shareable, group
from tpspan.sharing.attached import Attached
from tpspan.sharing.attaching import attach
from tpspan.sharing.layout import Entry, PublishedLayout, listed


def attach_module(
    module: nn.Module,
    name: str,
    *,
    strict: bool = True,
    version: int | Literal["latest"] = "latest",
    device: torch.device | str | None = None,
    writable: bool = False,
    replicate: bool = False,
    world: World | None = None,
) -> Attached:
    """Let the parameters and buffers of a module be published tensors; nothing is copied.

    The module may be real or on the meta device. A real parameter stays the same object and gives
    its own memory up; one on meta is replaced wherever it is registered. Tied weights stay tied.
    Buffers that a state dict does not hold, such as tables of frequencies, are taken if they are
    published, and otherwise left as they are.

    Args:
        module: of the structure of what is published: names, shapes and types must be the same.
        strict: whether tensors may be missing there or here, as in ``load_state_dict``.
        name, version, device, writable, replicate, world: as for ``attach``.

    Returns:
        The attachment: ``update`` flips the module to another version.

    Raises:
        PublicationMismatch: it does not fit: says all differences; the module is unchanged.
        TypeError, ValueError: the module holds tensors that cannot lie in shared memory.
        UnknownNameError, VersionGoneError, DriverError, KeeperError, PeerError: as ``attach``.
    """
    slots = Slots(module, buffers=True)
    regions = group(slots.named)
    check_shareable(regions)
    attached = attach(
        name, version=version, device=device, writable=writable, replicate=replicate, world=world
    )
    try:
        found = _fitting(name, regions, attached.layout, slots.optional, strict=strict)
    except BaseException:
        attached.close()
        raise
    attached.adopt(slots, found)
    return attached


def _fitting(
    name: str,
    regions: Sequence[Region],
    layout: PublishedLayout,
    optional: frozenset[str],
    *,
    strict: bool,
) -> list[tuple[Region, Entry]]:
    """Which published tensor each region of a module gets."""
    found: list[tuple[Region, Entry]] = []
    missing: list[str] = []
    misfits: list[str] = []
    by_name = layout.by_name
    taken: set[int] = set()
    for region in regions:
        entries = [by_name[name] for name in region.names if name in by_name]
        taken.update(map(id, entries))
        if not entries:
            if not optional.issuperset(region.names):
                missing.append(region.names[0])
            elif region.tensor.is_meta:
                misfits.append(f"{region.names[0]} is on meta, and no state dict holds it")
            continue
        entry, tensor = entries[0], region.tensor
        if any(each is not entry for each in entries):
            misfits.append(f"{' and '.join(region.names)} are one here and different tensors there")
        elif tensor.shape != entry.shape:
            misfits.append(
                f"{region.names[0]} is {entry.shape} there and {tuple(tensor.shape)} here"
            )
        elif tensor.dtype != entry.dtype:
            misfits.append(f"{region.names[0]} is {entry.dtype} there and {tensor.dtype} here")
        else:
            found.append((region, entry))
    unexpected = [
        entry.names[0]
        for entry in layout.entries
        if id(entry) not in taken and not layout.optional.issuperset(entry.names)
    ]
    parts = [f"not fitting: {listed(misfits)}"] if misfits else []
    if strict and missing:
        parts.append(f"missing there: {listed(missing)}")
    if strict and unexpected:
        parts.append(f"unexpected there: {listed(unexpected)}")
    if parts:
        raise PublicationMismatch(
            f"the module does not fit what is published as {name!r}, and nothing was changed: "
            + ". ".join(parts)
        )
    return found
