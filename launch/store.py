"""The control plane's channel over a torch store: one key a message, deleted by its reader.

A store knows nothing of ends and failures, so each rank leaves a key when it leaves, one when it
aborts the job, and a thread of each rank looks for the latter once a second. Where a launcher ends
the job by itself (torchrun's agent) that comes first; under srun, or several agents, this is what
ends it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from tpspan.errors import ClosedError, PeerError
from tpspan.launch import failure
from tpspan.launch.control import Tag

# TCPStore refuses values above 8 MiB.
CHUNK_NBYTES = 4 << 20
WATCH_INTERVAL_S = 1.0
LAST_WORDS_S = 2.5

T = TypeVar("T")


class Keys(Protocol):
    """What a channel needs of a torch store; calls raise ``RuntimeError`` if the server is gone."""

    def set(self, key: str, value: Any, /) -> None:
        """Put a value under a key."""

    def get(self, key: str, /) -> bytes:
        """Wait for a key, and return its value."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return the sum."""

    def delete_key(self, key: str, /) -> bool:
        """Take a key away."""


class StoreChannel:
    """A ``Channel`` over a torch store, which it lets go of when it closes.

    Args:
        store: any torch store that can check and delete keys.
        prefix: a name that is the same on all ranks, and no other channel's.
        rank, world_size: this rank and the number of ranks.
        end_job: called when this rank aborts the job, for ranks that do not look.
        serves: whether this process is the store's server, so that it must not leave before the
            rest.
    """

    def __init__(
        self,
        store: Keys,
        prefix: str,
        rank: int,
        world_size: int,
        *,
        serves: bool,
        end_job: Callable[[], None] = lambda: None,
    ) -> None:
        self._kept: Keys | None = store
        self._prefix = prefix
        self._serves = serves
        self._end_job = end_job
        self._sent: dict[tuple[int, str], list[str]] = {}
        self._numbers: dict[tuple[str, int, str], tuple[int, int]] = {}
        self._closed = threading.Event()
        self.rank = rank
        self.world_size = world_size
        self._watcher = threading.Thread(target=self._watch, name="tpspan-watch", daemon=True)
        self._watcher.start()

    def send(self, peer: int, tag: Tag, data: bytes) -> None:
        number = self._number("out", peer, tag)
        key = self._key(self.rank, peer, tag, number)
        chunks = [data[at : at + CHUNK_NBYTES] for at in range(0, len(data), CHUNK_NBYTES)]
        keys = [key, *(f"{key}+{index}" for index in range(1, len(chunks)))]
        # The first chunk goes last: once it is there, all are.
        for chunk_key, chunk in zip(keys[1:], chunks[1:], strict=True):
            self._call(self._store.set, chunk_key, chunk)
        head = len(keys).to_bytes(4, "little") + (chunks[0] if chunks else b"")
        self._call(self._store.set, key, head)
        self._sent[(peer, tag.context)] = keys
        self._advance("out", peer, tag, number)

    def poll(self, peer: int, tag: Tag) -> bytes | None:
        number = self._number("in", peer, tag)
        key = self._key(peer, self.rank, tag, number)
        if not self._call(self._store.check, [key]):
            return None
        head = self._take(key)
        rest = [self._take(f"{key}+{at}") for at in range(1, int.from_bytes(head[:4], "little"))]
        self._advance("in", peer, tag, number)
        return b"".join([head[4:], *rest])

    def retract(self, peer: int, tag: Tag) -> None:
        for key in self._sent.pop((peer, tag.context), []):
            self._call(self._store.delete_key, key)

    def flush(self, limit_s: float) -> None:
        pass

    def has_left(self, peer: int) -> bool:
        return bool(self._call(self._store.check, [f"{self._prefix}/left/{peer}"]))

    def abort(self, message: str, *, secondary: bool = False) -> NoReturn:
        key, store = f"{self._prefix}/abort", self._kept
        with contextlib.suppress(RuntimeError):
            if store is not None:
                if store.check([key]):
                    # Another rank has said what happened; the watcher of this one is about to end
                    # it.
                    time.sleep(LAST_WORDS_S)
                    os._exit(1)
                store.set(key, str(self.rank))
        failure.report(message, self.rank, self.world_size, secondary=secondary)
        self._give_others_time()
        if self.world_size > 1:
            self._end_job()
        os._exit(1)

    def close(self, linger_s: float = 5.0) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join(LAST_WORDS_S)
        all_left = False
        with contextlib.suppress(RuntimeError):
            all_left = self._leave(self._store, linger_s)
        # A store that is served here ends with its last holder. Ranks that are still there learn
        # from it why this one left: for them it stays with the channel.
        if all_left or not self._serves:
            self._kept = None

    @property
    def _store(self) -> Keys:
        if self._kept is None:
            raise ClosedError("the control plane is closed")
        return self._kept

    def _leave(self, store: Keys, linger_s: float) -> bool:
        """Say that this rank leaves; returns whether all have, as far as it knows."""
        left = f"{self._prefix}/left"
        store.set(f"{left}/{self.rank}", b"")
        everyone = [f"{left}/{rank}" for rank in range(self.world_size)]
        if store.add(f"{left}/count", 1) == self.world_size:
            if not self._serves:
                for key in (*everyone, f"{left}/count"):
                    store.delete_key(key)
            return True
        if not self._serves:
            return False
        deadline_s = time.monotonic() + linger_s
        while not (all_left := store.check(everyone)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return all_left

    def _watch(self) -> None:
        key, store = f"{self._prefix}/abort", self._store
        while not self._closed.wait(WATCH_INTERVAL_S):
            try:
                aborted = store.check([key])
            except RuntimeError:
                # The server is gone: whoever needs it next gets a PeerError.
                return
            if aborted and store.get(key) != str(self.rank).encode():
                self._give_others_time()
                os._exit(1)

    def _give_others_time(self) -> None:
        # They look once a second, and without the server they could not.
        if self._serves:
            time.sleep(LAST_WORDS_S)

    def _key(self, source: int, target: int, tag: Tag, number: int) -> str:
        return f"{self._prefix}/{tag.context}/{tag.sequence}/{source}>{target}/{number}"

    def _number(self, way: str, peer: int, tag: Tag) -> int:
        sequence, number = self._numbers.get((way, peer, tag.context), (tag.sequence, 0))
        return number if sequence == tag.sequence else 0

    def _advance(self, way: str, peer: int, tag: Tag, number: int) -> None:
        self._numbers[(way, peer, tag.context)] = (tag.sequence, number + 1)

    def _take(self, key: str) -> bytes:
        value = self._call(self._store.get, key)
        self._call(self._store.delete_key, key)
        return value

    def _call(self, call: Callable[..., T], *arguments: object) -> T:
        try:
            return call(*arguments)
        except RuntimeError as error:
            what = f"the store of the control plane is gone ({str(error).splitlines()[0]})"
            raise PeerError([0], what) from error
