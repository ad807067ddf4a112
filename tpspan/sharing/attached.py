"""What a reader has of a publication: tensors of one version at addresses that stay."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from tpspan.errors import (
    ClosedError,
    PublicationMismatch,
    TpspanError,
    UnknownNameError,
    VersionGoneError,
)
from tpspan.memory import Block, Right
from tpspan.memory.closing import close_each
from tpspan.parallel.footprint import proportional_nbytes
from tpspan.parallel.regions import Region, Slots
from tpspan.sharing.adopted import Adopted
from tpspan.sharing.client import Connection, Lost, keep_trying
from tpspan.sharing.fetch import Fetched, fetch
from tpspan.sharing.group import Group
from tpspan.sharing.layout import Entry
from tpspan.sharing.mapped import Mapped, close_blocks
from tpspan.sharing.replica import Importer
from tpspan.sharing.tree import unflatten

_LOOK_S = 0.5


class Attached(Mapping[str, torch.Tensor]):
    """Tensors of a published version by name; made by ``tpspan.attach``.

    Tensors that it hands out keep it alive, and stay valid whatever becomes of the publisher, of
    the keeper, and of the version. Only ``close`` or the end of the process gives the memory back.

    Attributes:
        name: what they are published under.
        layout: which tensors lie where.
    """

    def __init__(
        self,
        name: str,
        connection: Connection,
        fetched: Fetched,
        importer: Importer,
        right: Right,
        places: Collection[int] | None,
        group: Group,
    ) -> None:
        self.name = name
        self.layout = fetched.layout
        self._encoded = fetched.encoded
        self._connection, self._importer, self._group = connection, importer, group
        self._places = None if places is None else frozenset(places)
        self._device_there = fetched.description["device"]
        importer.choose(fetched.description)
        self._streams = importer.target.streams()
        self._adopted = Adopted()
        self._lock = threading.RLock()
        self._listener: threading.Thread | None = None
        self._listening = Connection()
        self._ended = threading.Event()
        self._is_closed = False
        self._garbage: list[Block] = []
        with ExitStack() as undo:
            blocks = importer.taken(fetched.blocks)
            undo.callback(close_each, [block.close for block in blocks.values()])
            mapped = Mapped(importer.target, self.layout)
            undo.callback(mapped.close)
            mapped.place_all(blocks, right)
            undo.pop_all()
        fetched.blocks.clear()
        self._mapped: Mapped = mapped
        self._hold(fetched)

    @property
    def version(self) -> int:
        """The version that is mapped."""
        return self._version

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._importer.target.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return self.layout.nbytes

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check_open()
        entry = self.layout.by_name[name]
        if self._places is not None and not self._places.issuperset(self.layout.places_of((name,))):
            raise KeyError(f"{name} is not among the names that were attached")
        self._streams.use()
        return self._mapped.tensor(entry, keep=self)

    def __iter__(self) -> Iterator[str]:
        if self._places is None:
            return iter(self.layout.by_name)
        places = self._places
        return (n for n in self.layout.by_name if places.issuperset(self.layout.places_of((n,))))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def state(self, *, clone: bool = False) -> Any:
        """What was published, put together again: the dict, with its tensors and plain values.

        Of a module, its tensors by name. A tensor follows an ``update``, a plain value does not.

        Args:
            clone: give copies of the tensors, which can be written and outlive this attachment; an
                optimizer, for one, keeps what it is given.
        """
        self._check_open()
        self._streams.use()
        names = tuple(self)
        made = self._mapped.tensors([self.layout.by_name[name] for name in names], keep=self)
        tensors = dict(zip(names, made, strict=True))
        if clone:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return unflatten(self._state, tensors) if self._state else tensors

    def newest(self) -> int:
        """The newest version that the keeper has told of, without asking for it.

        0 if the name was removed. If it is published anew, numbers begin at 1 again.
        """
        self._hear(0.0)
        return self._connection.newest[0]

    def update(self, version: int | None = None) -> bool:
        """Flip to another version, by default the newest; the tensors stay where they are.

        Call it between two steps, by one thread while no other uses the tensors. Waits for the
        streams that use them (those current when a tensor was taken or the last update was made,
        and those of ``record_stream``). Blocks that both versions share stay mapped. Captured
        graphs read the new version. Collective if a world attached.

        Returns:
            Whether anything was newer.

        Raises:
            UnknownNameError: the name was removed, or the keeper and the publisher have ended.
            VersionGoneError: that version is kept no longer, or is not there yet.
            PublicationMismatch: the name now holds tensors of another layout: attach again.
            CaptureError: a stream that uses the tensors is being captured.
            DriverError, PeerError: it failed, here or on another rank.
            In all these cases the tensors are those of the version before.
        """
        with self._lock:
            self._check_open()
            self._streams.use()
            self._streams.refuse_capture()
            while True:
                if version is None:
                    found = self._group.broadcast(self._look() if self._group.leads else None)
                    number, is_other = found
                elif version == self._version:  # or another one, of a name published anew
                    newest, is_other = self._group.broadcast(
                        self._look() if self._group.leads else None
                    )
                    number, is_other = version, is_other and newest == version
                else:
                    number, is_other = version, False
                if number == self._version and not is_other:
                    return False
                if self._flip(number, is_newest=version is None):
                    return True

    def _flip(self, version: int, *, is_newest: bool) -> bool:
        """Flip to a version; returns False if one that was the newest is kept no longer."""
        group = self._group
        with ExitStack() as undo:

            def prepare() -> tuple[Fetched, dict[int, Block]] | None:
                try:
                    fetched: Fetched = keep_trying(lambda: self._fetch(version))
                except VersionGoneError:
                    if is_newest:  # the publisher is quicker than we are
                        return None
                    raise
                undo.callback(fetched.close)
                blocks = self._importer.taken(fetched.blocks)
                undo.callback(close_each, [block.close for block in blocks.values()])
                self._streams.fence().wait()
                return fetched, blocks

            prepared = group.together("Attached.update", prepare)
            if not all(group.gather(prepared is not None)):
                return False
            assert prepared is not None
            fetched, blocks = prepared
            old: list[dict[int, Block]] = []

            def put_back() -> None:
                if old:
                    self._mapped.replace(old[0])

            undo.callback(put_back)
            group.together("Attached.update", lambda: old.append(self._mapped.replace(blocks)))
            undo.pop_all()
        fetched.blocks.clear()
        self._hold(fetched)
        self._say_what_is_read()
        self._garbage += old[0].values()
        close_blocks(self._garbage)
        return True

    def wait_for(self, version: int | None = None, timeout_s: float = 30.0) -> int:
        """Wait until a version is there, by default the next one; does not flip to it.

        Returns:
            The newest version.

        Raises:
            TimeoutError: it was not there in time.
            UnknownNameError: the name was removed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._hear(0.0)
            newest, token = self._connection.newest
            if not newest:
                found = self._ask()
                newest, token = found.version, found.token
            # Of a name that was published anew, every version is a next one.
            if token != self._token if version is None else newest >= version:
                return newest
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                wanted = self._version + 1 if version is None else version
                raise TimeoutError(
                    f"version {wanted} of {self.name!r} was not published within {timeout_s:g} s; "
                    f"the newest is {newest}"
                )
            self._hear(min(left_s, _LOOK_S))

    def on_version(self, callback: Callable[[int], object]) -> None:
        """Call back with the number of every version to come, or of the last of several.

        The callback runs on a thread of its own, one call after another, until ``close``. What it
        raises is shown as a warning, and ends nothing.
        """
        with self._lock:
            self._check_open()
            if self._listener is not None:
                raise ValueError("there is a callback already")
            self._listener = threading.Thread(
                target=self._listen,
                args=(callback, self._token),
                name="tpspan-attached",
                daemon=True,
            )
            self._listener.start()

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream uses the tensors, so that an update waits for it."""
        self._streams.use(stream)

    def adopt(self, slots: Slots, found: Sequence[tuple[Region, Entry]]) -> None:
        """Let what a module registers for regions be tensors of this attachment."""
        self._streams.use()
        views = self._mapped.tensors([entry for _, entry in found], keep=self)
        for (region, _), view in zip(found, views, strict=True):
            self._adopted.take(slots, region, view)

    def held_nbytes(self) -> int:
        """Bytes of physical memory that the tensors cost this process.

        On the host the proportional set size: a page that n processes have read counts one n-th
        in each. On CUDA nothing, or all of them if they were replicated.
        """
        self._check_open()
        if self.device.type == "cuda":
            return self.layout.span_nbytes if self._importer.replicates else 0
        return proportional_nbytes(self._mapped.address, self.layout.span_nbytes)

    def close(self) -> None:
        """Unmap. Tensors of a module that are alive get memory of their own, with their values.

        Idempotent.

        Raises:
            InUseError: other tensors are still alive, and nothing was changed: drop them and close
                again.
        """
        with self._lock:
            if self._is_closed:
                return
            self._streams.refuse_capture()
            self._streams.fence().wait()
            self._adopted.make_private(
                self._mapped.range, keep=self, what=f"tensors attached from {self.name!r}"
            )
            self._streams.fence().wait()  # for the copies
            self._is_closed = True
        self._ended.set()
        self._connection.close()
        self._listening.close()
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        close_each([self._mapped.close, lambda: close_blocks(self._garbage)])

    def _hold(self, fetched: Fetched) -> None:
        self._version, self._token = fetched.version, fetched.token
        self._names, self._state = fetched.names, fetched.state
        self._number = self._connection.number

    def _look(self) -> tuple[int, bool]:
        """The newest version, and whether it is another one in spite of the same number.

        The keeper is asked only if it may know more than it has told.
        """
        self._hear(0.0)
        number, token = self._connection.newest
        if self._connection.number != self._number or not number:
            found = self._ask()
            number, token = found.version, found.token
        return number, token != self._token

    def _ask(self) -> Fetched:
        """Tell the keeper what is read here, and ask what there is; it tells of the rest itself."""

        def ask() -> Fetched:
            self._connection.open()
            self._say_what_is_read()
            number = self._connection.number
            found = self._fetch(None, ask_only=True)
            self._number = number
            return found

        found: Fetched = keep_trying(ask)
        return found

    def _say_what_is_read(self) -> None:
        reads = {"op": "reads", "name": self.name, "version": self._version, "token": self._token}
        self._connection.say(reads)

    def _hear(self, timeout_s: float) -> None:
        """Take what the keeper has told, and wait so long for it to tell something."""
        try:
            self._connection.wait(timeout_s)
        except Lost:
            with contextlib.suppress(UnknownNameError):  # an update says so; a wait goes on
                self._ask()

    def _fetch(self, version: int | None, *, ask_only: bool = False) -> Fetched:
        fetched = fetch(
            self._connection,
            self.name,
            self._importer.choose,
            version=version,
            have=self._names,
            places=() if ask_only else self._places,
        )
        with ExitStack() as undo:
            undo.callback(fetched.close)
            if (fetched.encoded, fetched.description["device"]) != (
                self._encoded,
                self._device_there,
            ):
                raise PublicationMismatch(
                    f"{self.name!r} was removed and holds other tensors now, which do not fit "
                    "those mapped here: attach it again"
                )
            undo.pop_all()
        return fetched

    def _listen(self, callback: Callable[[int], object], last: str) -> None:
        """Hear of versions on a connection of this thread's own: the other one is its user's."""
        connection, number = self._listening, 0
        while not self._is_closed:
            try:
                connection.open()
                if connection.number != number:
                    connection.say({"op": "watches", "name": self.name})
                    fetch(connection, self.name, self._importer.choose, places=())
                    number = connection.number
                else:
                    connection.wait(3600.0)
            except Lost:
                continue
            except (TpspanError, OSError):  # closed; or no name, keeper or descriptor now
                self._ended.wait(_LOOK_S)
                continue
            newest, token = connection.newest
            if not newest or token == last or self._is_closed:
                continue
            last = token
            try:
                callback(newest)
            except Exception as error:
                warnings.warn(f"a callback for {self.name!r} failed: {error!r}", stacklevel=1)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the attachment to {self.name!r} was closed")
        self._mapped.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else f" on {self.device}"
        return f"<Attached {self.name!r}, version {self._version}, {self.nbytes} bytes{state}>"
