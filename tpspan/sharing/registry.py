"""What a keeper knows: names, their versions, who publishes and who reads. Policy, no sockets.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import os
import time
from typing import Any


class Refused(Exception):
    """A request that cannot be granted.

    Attributes:
        kind: what the client makes an error of.
        details: what the client needs besides the text.
        data: bytes for the client.
    """

    def __init__(self, kind: str, text: str, data: bytes = b"", **details: Any) -> None:
        super().__init__(text)
        self.kind, self.data, self.details = kind, data, details


class Block:
    """Memory that a descriptor keeps alive; the last version that has it closes it."""

    def __init__(self, name: str, nbytes: int, fd: int) -> None:
        self.name, self.nbytes, self.fd = name, nbytes, fd

    def __del__(self) -> None:
        os.close(self.fd)


class Version:
    """One state of a publication; it never changes.

    Attributes:
        number: counts from 1; from 1 again if the name is removed and published anew.
        token: tells it from every other version, and stays if another keeper gets it.
        blocks: by place in the layout.
        state: what the publisher says of it, which only readers understand.
        time_s: when it came to be, in seconds of the epoch.
        answer: what a reader of all of it gets, as long as the newest version is the one that it
            names: many readers may come at the same moment.
    """

    def __init__(self, number: int, token: str, blocks: tuple[Block, ...], state: bytes) -> None:
        self.number, self.token, self.blocks, self.state = number, token, blocks, state
        self.time_s = time.time()
        self.answer: tuple[str, bytes] | None = None


class Client:
    """Somebody connected.

    Attributes:
        pid: its process.
        deposited: blocks it has sent that are in no version yet, by name.
        owns: the names that it publishes.
        reads: name, number and token of the version it has mapped, or None.
        watches: the name of whose versions it wants to hear, if it reads none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.deposited: dict[str, Block] = {}
        self.owns: set[str] = set()
        self.reads: tuple[str, int, str] | None = None
        self.watches = ""


class Publication:
    """A name, and all that is kept under it.

    Attributes:
        owner: who publishes, or None if that process has gone.
        publisher: what tells the owner from others, by whatever connection it comes.
        pid: the process that published last.
        description: device and sizes, for people and for readers.
        layout: which tensors lie where, for readers only.
        keep: how many versions are kept.
        versions: by number, in order.
    """

    def __init__(self, name: str, description: dict[str, Any], layout: bytes) -> None:
        self.name, self.description, self.layout = name, description, layout
        self.owner: Client | None = None
        self.publisher = ""
        self.pid = 0
        self.keep = 1
        self.versions: dict[int, Version] = {}

    @property
    def newest(self) -> Version | None:
        """The version that readers get if they ask for none."""
        return self.versions[max(self.versions)] if self.versions else None


class Registry:
    """All publications of a keeper."""

    def __init__(self) -> None:
        self.publications: dict[str, Publication] = {}
        self.clients: set[Client] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held and nobody is connected."""
        return not self.publications and not self.clients

    @property
    def num_blocks(self) -> int:
        """Descriptors held."""
        versions = [v for p in self.publications.values() for v in p.versions.values()]
        held = {id(block) for version in versions for block in version.blocks}
        return len(held) + sum(len(client.deposited) for client in self.clients)

    def claim(
        self,
        client: Client,
        name: str,
        description: dict[str, Any],
        layout: bytes,
        *,
        keep: int,
        publisher: str,
    ) -> Publication:
        """Make a client the publisher of a name that nobody publishes now.

        If it is the publisher that the name has, by another connection, whatever may still come by
        the one before is refused.

        Raises:
            Refused: the name is taken, or holds tensors of another layout.
        """
        _check_name(name)
        found = self.publications.get(name)
        if found is None:
            found = self.publications[name] = Publication(name, description, layout)
        elif found.owner not in (None, client) and found.publisher != publisher:
            raise Refused(
                "taken",
                f"{name!r} is published by process {found.pid}, which is alive",
                pid=found.pid,
            )
        elif found.layout != layout or found.description["device"] != description["device"]:
            raise Refused(
                "layout",
                f"{name!r} holds other tensors",
                found.layout,
                device=found.description["device"],
            )
        if found.owner is not None:
            found.owner.owns.discard(name)
        found.owner, found.pid, found.publisher = client, client.pid, publisher
        found.keep = max(keep, 1)
        client.owns.add(name)
        return found

    def deposit(self, client: Client, names: list[str], sizes: list[int], fds: list[int]) -> None:
        """Take descriptors for a version to come; they are given up if the client goes before."""
        if not len(names) == len(sizes) == len(fds):
            raise ValueError(f"{len(names)} names, {len(sizes)} sizes, {len(fds)} descriptors")
        blocks = [Block(*each) for each in zip(names, sizes, fds, strict=True)]
        client.deposited.update((block.name, block) for block in blocks)

    def withdraw(self, client: Client, names: list[str]) -> None:
        """Forget what was deposited for a version that did not come."""
        for name in names:
            client.deposited.pop(name, None)

    def commit(
        self,
        client: Client,
        name: str,
        blocks: list[str],
        state: bytes,
        *,
        token: str,
        number: int | None = None,
    ) -> Version:
        """Make deposited blocks, and those of earlier versions, the next version.

        What else the client has deposited is given up.

        Args:
            token: what tells the version from every other.
            number: of a version that an earlier keeper had.

        Raises:
            Refused: the client does not publish the name, or a block is not here; then nothing
                has changed.
        """
        publication = self._owned(client, name)
        known: dict[str, Block] = {}
        for each in self.clients:
            known.update(each.deposited)
        known.update((b.name, b) for v in publication.versions.values() for b in v.blocks)
        missing = [block for block in blocks if block not in known]
        if missing:
            raise Refused("missing", f"{len(missing)} blocks of {name!r} have not been deposited")
        last = max(publication.versions, default=0)
        number = max(last + 1, number or 0)
        version = Version(number, token, tuple(known[block] for block in blocks), state)
        publication.versions[number] = version
        self.trim(publication, publication.keep)
        for each in self.clients:
            self.withdraw(each, blocks)
        client.deposited.clear()
        return version

    def trim(self, publication: Publication, keep: int) -> None:
        """Forget all but the newest versions."""
        for old in sorted(publication.versions)[:-keep]:
            del publication.versions[old]

    def trim_owned(self, client: Client, name: str, keep: int) -> None:
        """The same, if the client publishes the name."""
        self.trim(self._owned(client, name), keep)

    def find(self, name: str, number: int | None) -> tuple[Publication, Version]:
        """A version of a publication, by default the newest.

        Raises:
            Refused: there is no such name, or the version is not there yet or any more.
        """
        publication = self.publications.get(name)
        if publication is None or (publication.newest is None and number is None):
            raise Refused("unknown", f"nothing is published as {name!r}")
        version = publication.newest if number is None else publication.versions.get(number)
        if version is None:
            numbers = ", ".join(map(str, sorted(publication.versions))) or "none"
            newest = max(publication.versions, default=0)
            if number is not None and number > newest:
                raise Refused("early", f"{name!r} has no version {number} yet: there is {numbers}")
            raise Refused("gone", f"version {number} of {name!r} is gone: the keeper has {numbers}")
        return publication, version

    def remove(self, client: Client, name: str, *, force: bool) -> None:
        """Forget a name; its memory stays with those who have it mapped.

        Raises:
            Refused: there is no such name, or another process publishes it and there is no force.
        """
        found = self.publications.get(name)
        if found is None:
            raise Refused("unknown", f"nothing is published as {name!r}")
        if found.owner not in (None, client) and not force:
            raise Refused(
                "taken",
                f"{name!r} is published by process {found.pid}, which is alive: end it first, or "
                "remove the name by force",
                pid=found.pid,
            )
        if found.owner is not None:
            found.owner.owns.discard(name)
        del self.publications[name]

    def leave(self, client: Client) -> None:
        """A client has gone: what it published stays, what it held it holds no more."""
        self.clients.discard(client)
        for name in client.owns:
            publication = self.publications[name]
            publication.owner = None
            if not publication.versions:  # it never came to a first version
                del self.publications[name]
        client.owns.clear()
        client.deposited.clear()
        client.reads = None

    def listing(self) -> list[dict[str, Any]]:
        """Everything, for people and programs."""
        return [self._listed(each) for _, each in sorted(self.publications.items())]

    def _listed(self, publication: Publication) -> dict[str, Any]:
        readers: dict[tuple[int, str], list[int]] = {}
        for client in self.clients:
            if client.reads is not None and client.reads[0] == publication.name:
                readers.setdefault(client.reads[1:], []).append(client.pid)
        held: dict[str, int] = {}
        versions = []
        for number, version in sorted(publication.versions.items()):
            new = {b.name: b.nbytes for b in version.blocks if b.name not in held}
            held.update(new)
            versions.append(
                {
                    "version": number,
                    "time": version.time_s,
                    "new_bytes": sum(new.values()),
                    "readers": sorted(readers.pop((number, version.token), [])),
                }
            )
        gone: dict[str, list[int]] = {}
        for (number, _), pids in sorted(readers.items()):
            gone[str(number)] = sorted(gone.get(str(number), []) + pids)
        return {
            "name": publication.name,
            **publication.description,
            "keep": publication.keep,
            "publisher": publication.pid,
            "publisher_alive": publication.owner is not None,
            "held_bytes": sum(held.values()),
            "versions": versions,
            "readers_of_gone_versions": gone,
        }

    def _owned(self, client: Client, name: str) -> Publication:
        publication = self.publications.get(name)
        if publication is None or publication.owner is not client:
            raise Refused("lost", f"{name!r} was removed, or is published by another process now")
        return publication


def _check_name(name: str) -> None:
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise Refused(
            "name", f"{name!r} is no name: 1 to 200 printable characters, no spaces at the ends"
        )
