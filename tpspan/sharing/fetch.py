"""Getting a version from the keeper: what it is, and its blocks, imported as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tpspan.memory import Block
from tpspan.memory.closing import close_each
from tpspan.sharing.client import Connection
from tpspan.sharing.layout import PublishedLayout
from tpspan.sharing.local import Local


@dataclass
class Fetched:
    """A version, as the keeper knows it.

    Attributes:
        version, token: its number, and what tells it from every other version.
        newest: the number of the newest one.
        description: device and sizes.
        encoded: the layout.
        state: what the publisher says of this version.
        names: what the keeper calls the blocks, by place.
        blocks: those that were asked for and not here already; the caller's to close.
        fds: their descriptors, where they are to be kept.
    """

    version: int
    token: str
    newest: int
    description: dict[str, Any]
    encoded: bytes
    state: bytes
    names: tuple[str, ...]
    blocks: dict[int, Block] = field(default_factory=dict)
    fds: dict[int, int] = field(default_factory=dict)

    @property
    def layout(self) -> PublishedLayout:
        """The layout, decoded."""
        return PublishedLayout.decode(self.encoded)

    def close(self) -> None:
        """Give back what nobody has taken."""
        close_each(block.close for block in self.blocks.values())
        for fd in self.fds.values():
            os.close(fd)
        self.blocks.clear()
        self.fds.clear()


def fetch(
    connection: Connection,
    name: str,
    device: Callable[[dict[str, Any]], Local],
    *,
    version: int | None = None,
    have: Collection[str] = (),
    places: Collection[int] | None = None,
    reads: bool = False,
    keep_fds: bool = False,
) -> Fetched:
    """Ask for a version and import its blocks.

    Args:
        connection: to the keeper.
        name, version: which; by default the newest.
        device: chooses where to import, from the description.
        have: names of blocks that are here already.
        places: the blocks that are wanted; all by default.
        reads: tell the keeper that this connection reads the version.
        keep_fds: keep the descriptors.

    Raises:
        Lost: the keeper has ended.
        UnknownNameError, VersionGoneError: as the keeper says.
        DriverError: a block cannot be imported here.
    """
    request = {
        "op": "attach",
        "name": name,
        "version": version,
        "have": list(have),
        "places": None if places is None else list(places),
        "reads": "this" if reads else None,
    }
    with ExitStack() as undo, connection.request(request) as answer:
        said, end = answer.message, answer.message["layout_nbytes"]
        found = Fetched(
            said["version"],
            said["token"],
            said["newest"][0],
            said["description"],
            answer.data[:end],
            answer.data[end:],
            tuple(said["blocks"]),
        )
        undo.callback(found.close)
        sizes = said["sizes"]
        if said["sent"]:
            driver = device(found.description).driver
            for place, fd in zip(said["sent"], answer.fds, strict=True):
                is_kept = False
                try:
                    found.blocks[place] = Block.from_fd(driver, fd, sizes[place])
                    if keep_fds:
                        found.fds[place] = fd
                        is_kept = True
                finally:
                    if not is_kept:
                        os.close(fd)
        number, token = said["newest"]
        connection.newest = (number, token)
        undo.pop_all()
    return found
