"""The keeper's loop: connections in, requests, answers out, all on one thread.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from tpspan.errors import KeeperError
from tpspan.sharing import wire
from tpspan.sharing.moving import move
from tpspan.sharing.peer import Peer
from tpspan.sharing.place import Place
from tpspan.sharing.registry import Block, Refused, Registry, Version

GRACE_S = 1.0
"""A keeper that nobody needs any longer waits so long for somebody who does."""

RESEED_S = 3.0
"""After a keeper was killed, publishers that live have this long to come to the next one."""

_LOOK_S = 0.25
_LOST_S = 10.0

Answer = tuple[bytes, tuple[Block, ...]]
"""An encoded message, and the blocks whose descriptors follow it."""


class Keeper:
    """Serves one place until it is stopped or holds nothing.

    Args:
        place: where it listens.
        lock: says that no other keeper serves there; it is closed in the end.
        ends_by_itself: whether to end when it holds nothing.
        follows_a_kill: an earlier keeper was killed here, so publishers may be on their way.
    """

    def __init__(
        self, place: Place, lock: int, *, ends_by_itself: bool, follows_a_kill: bool
    ) -> None:
        self.registry = Registry()
        self._place, self._lock = place, lock
        self._ends_by_itself = ends_by_itself
        self._settled_s = time.monotonic() + (RESEED_S if follows_a_kill else 0.0)
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._stopped = False
        # A signal ends a wait only through a descriptor.
        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._listener = self._listening()
        self._operations: dict[str, Callable[[Peer, dict[str, Any], bytes, list[int]], Answer]] = {
            "hello": self._hello,
            "claim": self._claim,
            "deposit": self._deposit,
            "withdraw": self._withdraw,
            "commit": self._commit,
            "trim": self._trim,
            "attach": self._attach,
            "list": self._list,
            "remove": self._remove,
        }

    def stop(self) -> None:
        """Let ``serve`` return; a signal handler may call it."""
        self._stopped = True
        os.write(self._wake, b"\0")

    def serve(self) -> None:
        """Serve until stopped, or until nothing is held and nobody has come for a while."""
        idle_s = looked_s = found_s = time.monotonic()
        try:
            while not self._stopped:
                for key, events in self._selector.select(0.25):
                    self._serve(key, events)
                now = time.monotonic()
                if not self.registry.is_empty or now < self._settled_s:
                    idle_s = now
                if self._ends_by_itself and now - idle_s > GRACE_S:
                    return
                if now - looked_s > _LOOK_S:
                    looked_s = now
                    if self._place.listens(self._socket) or self._listen_again():
                        found_s = now
                    elif not self.registry.clients and now - found_s > _LOST_S:
                        return  # nobody could ever give back what is held here
        finally:
            # A client that is in the listener's queue by now sees its connection end, and starts
            # the next keeper.
            if self._place.listens(self._socket):
                os.unlink(self._place.socket)
            self._listener.close()
            for client in tuple(self.registry.clients):
                assert isinstance(client, Peer)
                self._drop(client)
            self._selector.close()
            fds = (self._spare, self._wakes, self._wake, self._lock, *self._pidfds.values())
            for fd in fds:
                os.close(fd)

    def _listening(self) -> socket.socket:
        """A socket at the place, in the place of whatever is there."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._place.socket)
            listener.bind(self._place.socket)
            os.chmod(self._place.socket, 0o600)
            listener.listen(256)
            listener.setblocking(False)
            self._socket = os.stat(self._place.socket)
            self._selector.register(listener, selectors.EVENT_READ)
        except BaseException:
            listener.close()
            raise
        return listener

    def _listen_again(self) -> bool:
        """Be found again after somebody has taken the socket away, as cleaners of /tmp do with old
        files; returns whether that went well. If another keeper has come to the place by now, it
        gets everything, and this one ends."""
        try:
            self._place.make()
            if not self._place.is_locked(self._lock):
                lock = self._place.lock()
                if lock is None:
                    move(self.registry, self._place)
                    self._stopped = True  # clients see their connections end, and go there
                    return True
                os.close(self._lock)
                self._lock = lock
            listener = self._listening()
        except (OSError, KeeperError, wire.WireError):
            return False
        while self._accept():
            pass
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        return True

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
            return
        if key.fileobj == self._wakes:
            return
        if isinstance(key.data, int):  # a process has ended, whoever holds its sockets now
            for client in tuple(self.registry.clients):
                if isinstance(client, Peer) and client.pid == key.data:
                    self._drop(client)
            self._forget_process(key.data)
            return
        peer = key.data
        if peer not in self.registry.clients:  # dropped by an event before this one
            return
        try:
            if events & selectors.EVENT_READ:
                for message, data, fds, lost in peer.receive():
                    self._perform(peer, message, data, fds, lost)
            if peer in self.registry.clients:
                self._flush(peer)
        except wire.WireError:
            self._drop(peer)

    def _accept(self) -> bool:
        """Take a client in; returns whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError:  # no descriptor is left but the spare one: say so
            os.close(self._spare)
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    refusal = self._refusal(self._out_of_descriptors())
                    connection.send(refusal[0])
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            return False
        pid, user = wire.credentials(connection)
        if user != os.geteuid():
            connection.close()
            return True
        connection.setblocking(False)
        peer = Peer(connection, pid)
        self.registry.clients.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._watch_process(pid)
        return True

    def _watch_process(self, pid: int) -> None:
        """See a process end even if a child of it has inherited its sockets."""
        if pid <= 0 or pid in self._pidfds:
            return
        try:
            self._pidfds[pid] = os.pidfd_open(pid)
        except OSError:  # an old kernel, no descriptor left, or gone: the socket tells
            return
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)

    def _forget_process(self, pid: int) -> None:
        if pid in self._pidfds:
            self._selector.unregister(self._pidfds[pid])
            os.close(self._pidfds.pop(pid))

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.close()
        self.registry.leave(peer)
        if all(client.pid != peer.pid for client in self.registry.clients):
            self._forget_process(peer.pid)

    def _flush(self, peer: Peer) -> None:
        peer.send()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wants_to_send else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, peer)

    def _perform(
        self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int], lost: bool
    ) -> None:
        operation, name = message.get("op"), message.get("name")
        if operation in ("reads", "watches"):  # these want no answer, not even if they are wrong
            version, token = message.get("version"), message.get("token")
            if operation == "watches" and isinstance(name, str):
                peer.watches = name
            elif isinstance(name, str) and isinstance(version, int) and isinstance(token, str):
                peer.reads = (name, version, token)
            return
        try:
            if lost:
                raise self._out_of_descriptors()
            if message.get("protocol", wire.PROTOCOL) != wire.PROTOCOL:
                raise Refused(
                    "request",
                    f"the keeper, process {os.getpid()}, speaks protocol {wire.PROTOCOL}, and this "
                    f"program protocol {message['protocol']}: end the programs of the older "
                    "version",
                )
            if operation not in self._operations:
                raise Refused("request", f"this keeper knows no request {operation!r}")
            answer = self._operations[operation](peer, message, data, fds)
            fds = []
        except Refused as refused:
            answer = self._refusal(refused)
        except Exception as error:  # whatever one client sends, what the others hold must stay
            answer = self._refusal(Refused("request", f"a request without sense: {error!r}"))
        finally:
            for fd in fds:
                os.close(fd)
        peer.answer(*answer)

    @staticmethod
    def _refusal(refused: Refused) -> Answer:
        reply = {"error": refused.kind, "text": str(refused), "details": refused.details}
        return wire.encode(reply, refused.data), ()

    def _out_of_descriptors(self) -> Refused:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return Refused(
            "descriptors",
            f"the keeper is out of file descriptors: its limit is {limit}, and it holds "
            f"{self.registry.num_blocks} blocks of {len(self.registry.publications)} names. Remove "
            "names (tpspan rm), keep fewer versions, use larger blocks, or raise the limit "
            "(ulimit -Hn) where the keeper is started",
        )

    def _hello(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        return wire.encode({"pid": os.getpid()}), ()

    def _claim(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        found = self.registry.claim(
            peer,
            message["name"],
            message["description"],
            data,
            keep=message["keep"],
            publisher=message["publisher"],
        )
        if found.newest is None:
            return wire.encode({"version": 0, "token": "", "blocks": []}), ()
        return wire.encode(self._shown(found.newest, ())), ()

    def _deposit(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        self.registry.deposit(peer, message["blocks"], message["sizes"], fds)
        return wire.encode({}), ()

    def _withdraw(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        self.registry.withdraw(peer, message["blocks"])
        return wire.encode({}), ()

    def _commit(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        name = message["name"]
        version = self.registry.commit(
            peer,
            name,
            message["blocks"],
            data,
            token=message["token"],
            number=message.get("version"),
        )
        self._tell_readers(name, version.number, version.token)
        return wire.encode({"version": version.number}), ()

    def _trim(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        self.registry.trim_owned(peer, message["name"], max(1, message["keep"]))
        return wire.encode({}), ()

    def _attach(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        have = set(message["have"])
        try:
            found, version = self.registry.find(message["name"], message.get("version"))
            newest = found.newest or version
        except Refused as refused:
            refused.details["settling_s"] = max(0.0, self._settled_s - time.monotonic())
            raise
        if message["reads"] == "this":
            peer.reads = (found.name, version.number, version.token)
        wanted = message.get("places")
        is_whole = wanted is None and not have
        if is_whole and version.answer is not None and version.answer[0] == newest.token:
            return version.answer[1], version.blocks
        there = range(len(version.blocks))
        # A name that was published anew may have fewer blocks; the client sees it by the layout.
        places = there if wanted is None else [place for place in wanted if place in there]
        sent = [place for place in places if version.blocks[place].name not in have]
        reply = self._shown(version, sent)
        reply.update(
            newest=[newest.number, newest.token],
            description=found.description,
            layout_nbytes=len(found.layout),
        )
        encoded = wire.encode(reply, found.layout + version.state, len(sent))
        if is_whole:
            version.answer = newest.token, encoded
        return encoded, tuple(version.blocks[place] for place in sent)

    @staticmethod
    def _shown(version: Version, sent: Any) -> dict[str, Any]:
        return {
            "version": version.number,
            "token": version.token,
            "blocks": [block.name for block in version.blocks],
            "sizes": [block.nbytes for block in version.blocks],
            "sent": list(sent),
        }

    def _list(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        keeper = {"pid": os.getpid(), "blocks": self.registry.num_blocks}
        return wire.encode({"names": self.registry.listing(), "keeper": keeper}), ()

    def _remove(self, peer: Peer, message: dict[str, Any], data: bytes, fds: list[int]) -> Answer:
        name = message["name"]
        self.registry.remove(peer, name, force=bool(message["force"]))
        self._tell_readers(name, 0, "")
        return wire.encode({}), ()

    def _tell_readers(self, name: str, number: int, token: str) -> None:
        """Tell which version is the newest now; 0 if the name is gone."""
        for client in tuple(self.registry.clients):
            hears = client.reads[0] if client.reads else client.watches
            if isinstance(client, Peer) and hears == name:
                client.news = (number, token)  # a client that reads slowly gets the last one only
                try:
                    self._flush(client)
                except wire.WireError:
                    self._drop(client)
