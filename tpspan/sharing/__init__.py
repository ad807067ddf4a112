"""Memory that outlives processes: published once, attached in milliseconds, flipped to versions.

See the comment below for how it works; the names are imported at their first use, since the keeper
lies in this package and must not import torch.
"""

# Layers, from below. wire, place and registry (messages, the directory, the table), peer, moving,
# serving and keeper are the keeper and import the standard library only; starting and client reach
# it. layout and tree say what is published; local, mapped and adopted put it behind addresses;
# group is who acts together. fetch and registration are a reader's and a publisher's talk with the
# keeper. sources, memory, publication and publishing publish; replica, attached, attaching and
# modules attach; listing is for people.
#
# Protocol. A client sends JSON, bytes and descriptors over a private Unix socket and gets the same
# back. A publisher *claims* a name, *deposits* descriptors of blocks under random names, and
# *commits* a list of block names: the next version, atomic because the keeper is one thread. A
# reader *attaches*: it says which blocks it has and gets descriptors of the others. Then the keeper
# tells it of the newest version, whenever that is another. A version has a number and a token: the
# number begins at 1 again if the name is removed and published anew, the token never comes twice.
# By it a reader knows whether there is anything new, and a publisher whose connection has ended
# whether the keeper took what it had asked it to take.
#
# Invariants. (a) A block that is in a version is never written again: what a publisher works on is
# other memory, or mapped read-only. (b) A version is the list of its blocks and never changes; two
# versions share a block if its content was the same. (c) All versions of a name have one layout, so
# that a flip changes blocks and nothing else. (d) A reader has all blocks of one version mapped: it
# has imported all of the next before it touches its addresses, and puts the old ones back if one
# cannot be mapped. (e) The keeper keeps at most ``keep`` versions whoever reads, and never waits
# for a client.
#
# Deaths. A connection is a life: the keeper notices its end, and the end of the process behind it.
# Publisher: its versions stay, and the next publisher of the name goes on from them. Reader: it is
# listed no more; that is all. Keeper: mappings go on, since memory lives as long as it is mapped or
# a descriptor is held; a publisher that lives brings its newest version to the next keeper, and
# names without a living publisher are gone. Its socket (cleaners of /tmp take old files away): it
# makes another one; clients that come meanwhile wait, since the directory is locked.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpspan.sharing.attached import Attached
    from tpspan.sharing.attaching import attach
    from tpspan.sharing.listing import published, remove
    from tpspan.sharing.modules import attach_module
    from tpspan.sharing.publication import Publication
    from tpspan.sharing.publishing import publish

_HOME = {
    "Attached": "attached",
    "Publication": "publication",
    "attach": "attaching",
    "attach_module": "modules",
    "publish": "publishing",
    "published": "listing",
    "remove": "listing",
}

__all__ = [
    "Attached",
    "Publication",
    "attach",
    "attach_module",
    "publish",
    "published",
    "remove",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpspan.sharing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpspan.sharing.{_HOME[name]}"), name)
