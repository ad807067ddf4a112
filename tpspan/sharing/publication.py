"""A publication: tensors to work on, and the versions that are made of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Self

import torch
from torch import nn

from tpspan.errors import (
    ClosedError,
    KeeperError,
    OutOfMemoryError,
    PublicationMismatch,
)
from tpspan.memory import Block, Right
from tpspan.memory.closing import close_each
from tpspan.parallel.regions import Slots
from tpspan.sharing.adopted import Adopted
from tpspan.sharing.fetch import Fetched
from tpspan.sharing.group import Group
from tpspan.sharing.layout import PublishedLayout, listed
from tpspan.sharing.local import Local
from tpspan.sharing.mapped import Mapped, close_blocks, create_blocks
from tpspan.sharing.memory import OwnMemory, Working
from tpspan.sharing.registration import Registration
from tpspan.sharing.sources import Source, source_of


class Publication(Mapping[str, torch.Tensor]):
    """Tensors under a name that other processes attach; made by ``tpspan.publish``.

    A mapping of names to the tensors to work on. Readers do not see what is written to them until
    ``commit``. It lives until ``close`` or the end of the process, even if nobody keeps it; the
    versions live on with the keeper until the name is removed.

    Attributes:
        name: what it is published under.
        layout: which tensors lie where.
    """

    def __init__(
        self,
        place: Local,
        layout: PublishedLayout,
        working: Working,
        registration: Registration,
        group: Group,
    ) -> None:
        self.name = registration.name
        self.layout = layout
        self._place, self._working, self._group = place, working, group
        self._registration = registration
        self._published = Mapped(place, layout)
        self._adopted = Adopted()
        self._displaced: dict[int, Block] = {}
        self._garbage: list[Block] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._skeleton = b""
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def version(self) -> int:
        """The newest version; 0 if nothing has been committed."""
        return self._registration.version

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return self.layout.nbytes

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors to work on, by name: this publication itself."""
        return self

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check_open()
        return self._working.tensor(self.layout.by_name[name], keep=self)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.by_name)

    def __len__(self) -> int:
        return len(self.layout.by_name)

    def thaw(self, *names: str) -> None:
        """Make tensors writable that were published ``read_only``, until the next commit.

        Memory is taken for the blocks that hold them, and for no others. Does nothing where they
        are writable already.

        Args:
            names: the tensors; all if none is given.

        Raises:
            KeyError: there is no such tensor.
            OutOfMemoryError: there is not enough memory; nothing was changed.
        """
        with self._lock:
            self._check_open()
            if isinstance(self._working, OwnMemory):
                places = self.layout.places_of(names) if names else self._working.places
                self._working.thaw(places, self._published)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream writes to the tensors, so that a commit waits for it."""
        if isinstance(self._working, OwnMemory):
            self._working.use(stream)

    def commit(
        self, values: Mapping[str, object] | None = None, *, changed: Iterable[str] | None = None
    ) -> int:
        """Make what was written the next version. Collective if a world publishes.

        Readers see all of it or nothing. Blocks whose content is that of the last version are
        shared with it; the others are new memory. Waits for the streams that write.

        Args:
            values: of a published state: the same tree with new values, which are written first.
            changed: names of the tensors that were written, if the caller knows; otherwise all
                content is compared with the last version.

        Returns:
            The number of the version.

        Raises:
            PublicationMismatch: tensors have other names, shapes or types; nothing was done.
            OutOfMemoryError: there is no memory for what changed; the last version is intact, and
                what was written is still there to be committed.
            UnknownNameError: the name was removed, or somebody else publishes it now.
            KeeperError: the keeper cannot be reached or is out of descriptors. If it was reached
                and then does not say what became of the version, this has the next number here all
                the same, and is brought to the keeper as soon as one answers; the error says so.
            KeyError: ``changed`` names a tensor that is not there.
        """
        with self._lock:
            self._check_open()
            skeleton = self._write(values)
            candidates = None if changed is None else self.layout.places_of(changed)
            return self._commit(candidates, skeleton)

    def close(self, *, remove: bool = False) -> None:
        """Stop publishing. Attached processes go on, and others may attach, until it is removed.

        The tensors of a published module get memory of their own, with their values. Not
        collective: a rank of a world that publishes a span may leave alone.

        Args:
            remove: remove the name as well; if a world publishes, its first rank does so.

        Raises:
            InUseError: other tensors of this publication are alive, and nothing was changed: drop
                them and close again.
        """
        with self._lock:
            if self._is_closed:
                return
            if isinstance(self._working, OwnMemory):  # a span stays, and its ranks may be elsewhere
                self._working.settle()  # what other streams write is in the copies
                tensors = self._working.mapped.range
                self._adopted.make_private(
                    tensors, keep=self, what=f"tensors of the publication {self.name!r}"
                )
                self._working.settle()  # and nothing is unmapped before they are made
            self._is_closed = True
        try:
            if remove and self._group.leads:
                self._registration.remove()
        finally:
            self._dissolve()

    def _dissolve(self) -> None:
        closes = [self._registration.close]
        if isinstance(self._working, OwnMemory):
            working = self._working
            closes.append(lambda: working.close(self._published))
        close_each([*closes, self._published.close, lambda: close_blocks(self._garbage)])

    def _commit(self, candidates: Iterable[int] | None, skeleton: bytes) -> int:
        working, group = self._working, self._group
        group.together("Publication.commit", working.settle)
        in_place = isinstance(working, OwnMemory) and working.read_only
        with ExitStack() as undo:

            def prepare() -> dict[int, tuple[str, Block]]:
                changed = self._changed(candidates)
                if isinstance(working, OwnMemory) and working.read_only:
                    blocks = {place: working.mapped.block(place) for place in changed}
                    working.seal(undo)
                else:
                    blocks = self._new_blocks(changed)
                    undo.callback(close_each, [block.close for block in blocks.values()])
                self._put(blocks, undo)
                undo.callback(self._place.synchronize)  # nothing is unmapped under a copy
                if not in_place:
                    for place in changed:
                        self._published.words(place).copy_(working.words(place))
                    self._place.synchronize()
                return self._registration.deposit(blocks)

            named = group.together("Publication.commit", prepare)
            undo.callback(self._registration.withdraw, named)
            names = dict(enumerate(self._registration.names))
            for each in group.gather({place: name for place, (name, _) in named.items()}):
                names.update(each)
            ordered = [names[place] for place in range(len(self.layout.sizes))]

            def register() -> tuple[int, str]:
                if not group.leads:
                    return 0, ""
                version = self._registration.commit(ordered, skeleton, named)
                return version, self._doubt(version)

            found = group.broadcast(group.together("Publication.commit", register))
            version, doubt = int(found[0]), str(found[1])
            undo.pop_all()
        if not group.leads:
            self._registration.committed(version, ordered, skeleton, named)
        self._skeleton = skeleton
        self._garbage += self._displaced.values()
        self._displaced = {}
        if isinstance(working, OwnMemory) and working.read_only:
            working.freeze(named, self._published)
        close_blocks(self._garbage)
        if doubt:
            cause, self._registration.doubt = self._registration.doubt, None
            try:
                if cause is None or isinstance(cause, KeeperError):
                    raise KeeperError(doubt) from cause
                raise cause
            finally:
                del cause
        return version

    def _doubt(self, version: int) -> str:
        """What to say of a version that the keeper may not have; empty if it has it."""
        doubt = self._registration.doubt
        if doubt is None:
            return ""
        return (
            f"it is not known whether the keeper took version {version} of {self.name!r}, which is "
            f"brought to it as soon as one answers: {doubt}"
        )

    def _changed(self, candidates: Iterable[int] | None) -> list[int]:
        """The open blocks that differ from the last version, or that are said to."""
        there = set(self._published.places)
        chosen = self._working.open
        if candidates is not None:
            wanted = set(candidates)
            return [place for place in chosen if place in wanted or place not in there]
        return [
            place
            for place in chosen
            if place not in there
            or not torch.equal(self._working.words(place), self._published.words(place))
        ]

    def _new_blocks(self, places: Iterable[int]) -> dict[int, Block]:
        sizes = {place: self.layout.sizes[place] for place in places}
        try:
            return create_blocks(self._place, sizes)
        except OutOfMemoryError:
            self._registration.make_room()  # versions that nobody reads are not worth a failure
            if self._place.backend == "cuda":
                torch.cuda.empty_cache()  # nor is what torch keeps for later
            return create_blocks(self._place, sizes)

    def _put(self, blocks: Mapping[int, Block], undo: ExitStack) -> None:
        """Map blocks as those of the newest version; ``undo`` puts the last version's back."""
        there = set(self._published.places)
        first = {place: block for place, block in blocks.items() if place not in there}
        later = {place: block for place, block in blocks.items() if place in there}
        if first:  # the first version: without it there is nothing to keep
            undo.callback(self._begin_anew)
            self._published.place_all(first, Right.READ_WRITE)
        self._displaced = self._published.replace(later) if later else {}
        undo.callback(self._put_back)

    def _put_back(self) -> None:
        displaced, self._displaced = self._displaced, {}
        if displaced:
            self._published.replace(displaced)

    def _begin_anew(self) -> None:
        working = self._working
        keep = working.mapped.blocks if isinstance(working, OwnMemory) else ()
        self._published.close(keep=keep)
        self._published = Mapped(self._place, self.layout)

    def _write(self, values: Mapping[str, object] | None) -> bytes:
        """Bring in new values, and tensors that the module has moved elsewhere since."""
        module = None if self._module is None else self._module()
        if values is not None:
            if self._module is not None or not isinstance(self._working, OwnMemory):
                raise ValueError(
                    "commit(values) is for a published dict; what a published module or span holds "
                    "is committed as it is"
                )
            source = source_of(values)
        elif module is None or self._is_in_place(module):
            return self._skeleton
        else:
            source = source_of(module)
        differences = self.layout.differences(source.parts)
        if differences:
            raise PublicationMismatch(
                f"{self.name!r} cannot have a version with other tensors: {listed(differences)}"
            )
        self.fill(source)
        return source.skeleton

    def _is_in_place(self, module: nn.Module) -> bool:
        """Whether the module's tensors are still those that lie here."""
        named = Slots(module, buffers=True).named
        if len(named) != len(self.layout.by_name):
            return False
        for name, tensor in named:
            entry = self.layout.by_name.get(name)
            if entry is None or (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
                return False
            if entry.nbytes and tensor.data_ptr() != self._working.address + entry.offset_bytes:
                return False
        return True

    def fill(self, source: Source) -> None:
        """Copy values that do not lie here already; tensors of a module move here."""
        away = []
        for region, tensor in zip(source.regions, source.tensors, strict=True):
            entry = self.layout.by_name[region.names[0]]
            address = self._working.address + entry.offset_bytes
            if any(each.is_meta or each.data_ptr() != address for each in region.tensors):
                away.append((region, tensor, entry))
        if any(not tensor.is_meta for _, tensor, _ in away):
            self.thaw(*(region.names[0] for region, tensor, _ in away if not tensor.is_meta))
        with torch.no_grad():
            for _, tensor, entry in away:
                if not tensor.is_meta:
                    self._working.tensor(entry, keep=self).copy_(tensor.detach())
        self._move(source)

    def _move(self, source: Source) -> None:
        """Let a module's tensors be those that lie here."""
        if source.slots is not None:
            for region in source.regions:
                view = self._working.tensor(self.layout.by_name[region.names[0]], keep=self)
                self._adopted.take(source.slots, region, view)

    @property
    def working_places(self) -> tuple[int, ...]:
        """The blocks that this process brings."""
        return self._working.places

    def begin_with(self, fetched: Fetched) -> None:
        """Take over the blocks of a version, and its content."""
        self._skeleton = fetched.state
        self._published.place_all(fetched.blocks, Right.READ_WRITE)
        if isinstance(self._working, OwnMemory):
            for place in self._working.places:
                self._working.words(place).copy_(self._published.words(place))
            self._place.synchronize()

    def commit_first(self, source: Source) -> int:
        """Write the values to begin with and commit them; only then a module's tensors move."""
        with self._lock, torch.no_grad():
            for part, tensor in zip(source.parts, source.tensors, strict=True):
                self[part.names[0]].copy_(tensor.detach())
            version = self._commit(None, source.skeleton)
            self._move(source)
        return version

    def freeze(self) -> None:
        """Drop the memory that was taken for writing, if the publication is read-only."""
        if isinstance(self._working, OwnMemory) and self._working.read_only:
            with ExitStack() as undo:
                self._working.seal(undo)
                undo.pop_all()
            self._working.freeze((), self._published)

    def abandon(self) -> None:
        """Give back what could not be published; the module keeps its own tensors."""
        self._is_closed = True
        if isinstance(self._working, OwnMemory):
            self._working.close(self._published)
        self._published.close()

    def adopt(self, module: nn.Module) -> None:
        """Commit from now on what this module holds."""
        self._module = weakref.ref(module)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the publication {self.name!r} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<Publication {self.name!r}, version {self.version}, {self.nbytes} bytes{state}>"
