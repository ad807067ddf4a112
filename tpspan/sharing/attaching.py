"""``tpspan.attach``: map what another process has published, and flip to its next versions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Literal

import torch

from tpspan.launch.world import World
from tpspan.memory import Right
from tpspan.sharing.attached import Attached
from tpspan.sharing.client import Connection, keep_trying
from tpspan.sharing.fetch import Fetched, fetch
from tpspan.sharing.group import Alone, Group, Ranks
from tpspan.sharing.layout import PublishedLayout
from tpspan.sharing.local import local
from tpspan.sharing.replica import Importer


def attach(
    name: str,
    *,
    version: int | Literal["latest"] = "latest",
    device: torch.device | str | None = None,
    writable: bool = False,
    replicate: bool = False,
    names: Iterable[str] | None = None,
    world: World | None = None,
) -> Attached:
    """Map a published version into this process; nothing is copied.

    The tensors are read-only by hardware: a write ends the process with SIGSEGV on the host and is
    an illegal memory access on CUDA, and changes nothing.

    Args:
        name: what it is published under.
        version: its number, or the newest.
        device: where to use it; by default where it lies, or, if this process does not see that
            GPU, the current one, which then reads over the link.
        writable: map it for writing too: whatever is written is seen by all who have this block
            mapped, and by later versions that share it, in no order and without a new version.
        replicate: copy it once, into memory of ``device`` that belongs to this process alone.
        names: map only the blocks that hold these tensors, such as a rank's part of a model.
        world: collective: its ranks attach the same version, and ``update`` together.

    Returns:
        A mapping of names to tensors.

    Raises:
        UnknownNameError: nothing is published under this name.
        VersionGoneError: that version is kept no longer, or is not there yet.
        KeyError: ``names`` names a tensor that is not there.
        DriverError: the memory cannot be mapped here: its GPU is gone or out of reach.
        KeeperError: the keeper cannot be reached, or this process is out of descriptors.
        PeerError: another rank of ``world`` failed.
    """
    if version != "latest" and (not isinstance(version, int) or version < 1):
        raise ValueError(f"version={version!r}: give a number from 1 on, or 'latest'")
    number = None if version == "latest" else version
    group: Group = Alone() if world is None or world.world_size == 1 else Ranks(world)
    if device is None and world is not None:
        device = world.device
    with ExitStack() as undo:
        connection = Connection()
        undo.callback(connection.close)

        def look() -> tuple[int, str, bytes]:
            """The version, where it lies and its layout; no block yet."""
            found = keep_trying(
                lambda: fetch(connection, name, lambda _: local("cpu"), version=number, places=())
            )
            return found.version, found.description["device"], found.encoded

        def make(version: int | None) -> Attached:
            importer = Importer(device, replicate=replicate)
            wanted = None
            if names is not None:
                encoded = look()[2]
                wanted = PublishedLayout.decode(encoded).places_of(names)

            def take() -> Fetched:
                return fetch(
                    connection,
                    name,
                    importer.choose,
                    version=version,
                    places=wanted,
                    reads=True,
                )

            fetched: Fetched = keep_trying(take)
            undo.callback(fetched.close)
            right = Right.READ_WRITE if writable or replicate else Right.READ
            made = Attached(name, connection, fetched, importer, right, wanted, group)
            undo.callback(made.close)  # another rank may fail
            return made

        if isinstance(group, Ranks):
            number = group.broadcast(group.together("tpspan.attach", lambda: look()[0]))
        made = group.together("tpspan.attach", lambda: make(number))
        undo.pop_all()
    return made
