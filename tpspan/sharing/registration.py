"""A publisher at the keeper: the claim on a name, the blocks it brings, and the next keeper.

If the keeper is killed, its table and its descriptors are gone. A thread sees the connection end
and brings the newest version, whose blocks this process holds anyway, to the next keeper.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpspan.errors import (
    NameTakenError,
    PublicationMismatch,
    TpspanError,
    UnknownNameError,
)
from tpspan.memory import Block
from tpspan.sharing.client import (
    Connection,
    LayoutDiffers,
    Lost,
    MissingBlocks,
    NoAnswer,
    keep_trying,
)
from tpspan.sharing.fetch import Fetched
from tpspan.sharing.group import Group
from tpspan.sharing.layout import PublishedLayout, listed

_RETRY_S = 0.5
_OTHERS_S = 3.0
_POLL_S = 0.02

Held = Mapping[int, tuple[str, Block]]
"""By place in the layout: what the keeper calls a block, and the block."""


class Registration:
    """What the keeper knows of one publication.

    Args:
        name, layout, keep: what is published, and how many versions are kept.
        description: device and sizes, for people and for readers.
        group: who publishes together.

    Attributes:
        version: the newest one; 0 if there is none.
        doubt: why it is not known whether the keeper has it, if that is so.
        names: what the keeper calls its blocks, by place.
        connection: of this process.
    """

    def __init__(
        self,
        name: str,
        description: Mapping[str, Any],
        layout: PublishedLayout,
        keep: int,
        group: Group,
    ) -> None:
        self.name, self.layout, self.keep = name, layout, keep
        self.version = 0
        self.doubt: BaseException | None = None
        self.names: tuple[str, ...] = ()
        self.connection = Connection()
        self._description = dict(description)
        self._group = group
        self._held: dict[int, tuple[str, Block]] = {}
        self._state = b""
        self._publisher = secrets.token_hex(8)
        self._token = ""
        self._coming = ""  # the token of a version that is being committed
        self._keeps: object = None
        # Whether what was imported can be exported again is the driver's business: nobody asks it.
        self._fds: dict[str, int] = {}
        self._seeded = 0
        self._number: int | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Become the publisher of the name; take over if an earlier one has ended.

        Raises:
            NameTakenError: it is published by a process that lives.
            PublicationMismatch: the name holds tensors of another layout.
            KeeperError: there is no keeper, or it refused.
        """
        if not self._group.leads:
            keep_trying(self.connection.open)
            self._number = self._seeded = self.connection.number
            return
        answer = keep_trying(self._claimed)
        self._number = self._seeded = self.connection.number
        self.version, self._token = answer["version"], answer["token"]
        self.names = tuple(answer["blocks"])

    def watch(self, keep: object) -> None:
        """From now on bring the newest version to the next keeper if this one is killed.

        Args:
            keep: lives until ``close``.
        """
        self._keeps = keep
        self._thread = threading.Thread(target=self._watch, name="tpspan-publisher", daemon=True)
        self._thread.start()

    def deposit(self, blocks: Mapping[int, Block]) -> dict[int, tuple[str, Block]]:
        """Give the keeper descriptors of blocks for a version to come."""
        named = {place: (secrets.token_hex(8), blocks[place]) for place in blocks}
        with self._lock:
            self._again(lambda: self._send(named))
        return named

    def withdraw(self, named: Held) -> None:
        """Take back what was deposited for a version that does not come."""
        names = [name for name, _ in named.values()]
        with self._lock, contextlib.suppress(Lost, TpspanError):  # something else is raised already
            if self.connection.is_open:  # else they went with the connection
                self.connection.ask({"op": "withdraw", "blocks": names})

    def commit(self, names: Sequence[str], state: bytes, named: Held) -> int:
        """Make deposited blocks, and those of the last version, the next version.

        If the keeper was asked and did not say what became of it, it is asked again as soon as it
        answers. If it does not, the version counts as made, since readers may have it: it is
        brought to the keeper later, and ``doubt`` says why it is not there for sure.

        Args:
            names: of all blocks, by place.
            state: what readers get along with it.
            named: the deposited ones of this process, deposited again if the keeper was killed.
        """
        with self._lock:
            self.doubt, self._coming = None, secrets.token_hex(8)
            is_asked = False

            def step() -> int:
                nonlocal is_asked
                there = self._seed()
                if there is not None and there["token"] == self._coming:
                    return int(there["version"])  # taken before the connection ended
                if there is not None:
                    if there["token"]:
                        is_asked = False  # by the connection before nothing can come any more
                    self._send(named)
                request = {
                    "op": "commit",
                    "name": self.name,
                    "blocks": list(names),
                    "token": self._coming,
                }
                is_asked = True
                try:
                    return int(self._ask(request, state)["version"])
                except NoAnswer:
                    raise
                except TpspanError:
                    is_asked = False
                    raise

            try:
                try:
                    version = int(keep_trying(step))
                except NoAnswer:
                    version = int(keep_trying(step))
            except BaseException as error:
                if not is_asked or self._thread is None:
                    raise
                version, self.doubt = self.version + 1, error
            # Before anything else can bring the version before this one to another keeper.
            self.committed(version, names, state, named, token=self._coming)
        return version

    def committed(
        self, version: int, names: Sequence[str], state: bytes, held: Held, *, token: str = ""
    ) -> None:
        """Note what the newest version is, and this process's blocks of it."""
        with self._lock:
            self.version, self.names, self._state = version, tuple(names), state
            self._token = token
            self._held.update(held)
            for name in set(self._fds) - set(names):
                os.close(self._fds.pop(name))

    def took_over(self, fetched: Fetched) -> None:
        """Note this process's blocks of the version that an earlier publisher has left."""
        self._fds.update({fetched.names[place]: fd for place, fd in fetched.fds.items()})
        held = {place: (fetched.names[place], block) for place, block in fetched.blocks.items()}
        self.committed(fetched.version, fetched.names, fetched.state, held, token=fetched.token)

    def remove(self) -> None:
        """Remove the name, unless somebody has, or publishes under it now."""
        with self._lock, contextlib.suppress(UnknownNameError, NameTakenError):
            request = {"op": "remove", "name": self.name, "force": False}
            self._again(lambda: self._ask(request))

    def make_room(self) -> None:
        """Let the keeper forget all versions but the newest one."""
        if self._group.leads and self.version:
            with self._lock:
                self._again(lambda: self._ask({"op": "trim", "name": self.name, "keep": 1}))

    def close(self) -> None:
        """Leave; the versions stay with the keeper. Idempotent."""
        self._closed.set()
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._keeps = None
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _again(self, step: Callable[[], Any]) -> None:
        def seeded() -> None:
            self._seed()
            step()

        keep_trying(seeded)

    def _claimed(self) -> dict[str, Any]:
        request = {
            "op": "claim",
            "name": self.name,
            "description": self._description,
            "keep": self.keep,
            "publisher": self._publisher,
        }
        try:
            return self._ask(request, self.layout.encode())
        except LayoutDiffers as differs:
            there = PublishedLayout.decode(differs.layout)
            found = there.differences(self.layout.entries)
            if differs.device != self._description["device"]:
                found.append(
                    f"they lie on {differs.device}, and these on {self._description['device']}"
                )
            raise PublicationMismatch(
                f"{self.name!r} holds other tensors, which readers may have mapped: "
                f"{listed(found) or 'the blocks are of other sizes'}. Remove the name first "
                f"(tpspan rm {self.name}), or publish under another"
            ) from None

    def _send(self, named: Held) -> None:
        def exported() -> Iterator[int]:
            for name, block in named.values():
                yield os.dup(self._fds[name]) if name in self._fds else block.export()

        if not named:
            return
        request = {
            "op": "deposit",
            "blocks": [name for name, _ in named.values()],
            "sizes": [block.nbytes for _, block in named.values()],
        }
        with self.connection.request(request, b"", len(named), exported(), number=self._number):
            pass

    def _ask(self, message: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        """Ask on the connection that was last claimed on, or is being claimed on."""
        return self.connection.ask(message, data, number=self._number)

    def _seed(self) -> dict[str, Any] | None:
        """Bring everything to a keeper that does not know it.

        Returns:
            What it had under the name, if this connection is a new one.
        """
        self.connection.open()
        if self.connection.number == self._seeded:
            return None
        self._number = number = self.connection.number
        there: dict[str, Any] = {"version": 0, "token": ""}
        if self._group.leads:
            there = self._claimed()
        if there["token"] and there["token"] in (self._token, self._coming):
            self._seeded = number  # the same keeper, by another connection
            return there
        self._send(self._held)
        if self._group.leads and self.version > there["version"]:
            request = {
                "op": "commit",
                "name": self.name,
                "blocks": list(self.names),
                "token": self._token,
            }
            deadline = time.monotonic() + _OTHERS_S
            while True:
                try:
                    self._ask({**request, "version": self.version}, self._state)
                    break
                except MissingBlocks:  # those of other ranks, which are on their way
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_S)
        self._seeded = number
        return there

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                with self._lock:
                    keep_trying(self._seed)
                self.connection.wait(3600.0)
            except Lost:
                continue
            except (NameTakenError, UnknownNameError, PublicationMismatch):
                return  # somebody else came first: the next commit says so
            except (TpspanError, OSError):  # no keeper, or out of descriptors: it may get better
                self._closed.wait(_RETRY_S)
