"""The tensors that a publisher works on, block by block: its own memory, or a span of a world."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

import torch

from tpspan.memory import Right
from tpspan.memory.closing import close_each
from tpspan.sharing.layout import Entry, PublishedLayout
from tpspan.sharing.local import Local
from tpspan.sharing.mapped import Mapped, create_blocks
from tpspan.spans.span import Span
from tpspan.spans.tensors import TensorRange


class Working(Protocol):
    """What a publication takes its versions from."""

    @property
    def places(self) -> tuple[int, ...]:
        """The blocks that this process brings."""

    @property
    def open(self) -> tuple[int, ...]:
        """Those of them that may have been written since the last version."""

    @property
    def address(self) -> int:
        """Where the range begins."""

    def words(self, place: int) -> torch.Tensor:
        """The content of a block as integers of 64 bits."""

    def tensor(self, entry: Entry, *, keep: object) -> torch.Tensor:
        """A tensor to work on."""

    def settle(self) -> None:
        """Wait until everything that may write has been done."""


class SpanMemory:
    """The pages of a span that this rank owns."""

    def __init__(self, span: Span) -> None:
        self.span = span
        runs = span.layout.runs
        self._runs = {index: run for index, run in enumerate(runs) if run.owner == span.world.rank}
        # The span's tensors end with its last byte; blocks are compared and copied whole.
        whole = span.layout.span_nbytes
        self._pages = TensorRange(span.base_address, whole, span.world.device)

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(self._runs)

    @property
    def open(self) -> tuple[int, ...]:
        return self.places

    @property
    def address(self) -> int:
        return self.span.base_address

    def words(self, place: int) -> torch.Tensor:
        run = self._runs[place]
        return self._pages.tensor((run.nbytes // 8,), torch.int64, run.offset_bytes, keep=None)

    def tensor(self, entry: Entry, *, keep: object) -> torch.Tensor:
        return self.span.tensor(entry.shape, entry.dtype, entry.offset_bytes, entry.stride)

    def settle(self) -> None:
        self.span.host_barrier()


class OwnMemory:
    """A range of this process, writable throughout or only where it was opened.

    A block that is not open is the published one itself, mapped read-only: it costs nothing, and a
    write to it fails in the writer. An open block is memory of its own.

    Args:
        place, layout: where, and what.
        read_only: whether blocks are closed by a commit.
    """

    def __init__(self, place: Local, layout: PublishedLayout, *, read_only: bool) -> None:
        self._place, self._layout, self.read_only = place, layout, read_only
        self.places = tuple(range(len(layout.sizes)))
        self._streams = place.streams()
        with ExitStack() as undo:
            blocks = create_blocks(place, dict(enumerate(layout.sizes)))
            undo.callback(close_each, [block.close for block in blocks.values()])
            self.mapped = Mapped(place, layout)
            undo.callback(self.mapped.close)
            undo.callback(self.settle)
            self.mapped.place_all(blocks, Right.READ_WRITE)
            for number in blocks:
                self.words(number).zero_()  # what no tensor covers is the same everywhere
            undo.pop_all()
        self._open = set(self.places)

    @property
    def open(self) -> tuple[int, ...]:
        return tuple(sorted(self._open))

    @property
    def address(self) -> int:
        return self.mapped.address

    def words(self, place: int) -> torch.Tensor:
        self._streams.use()
        return self.mapped.words(place)

    def tensor(self, entry: Entry, *, keep: object) -> torch.Tensor:
        self._streams.use()
        return self.mapped.tensor(entry, keep=keep)

    def settle(self) -> None:
        self._streams.fence().wait()

    def use(self, stream: torch.cuda.Stream | None) -> None:
        """Note a stream that writes."""
        self._streams.use(stream)

    def thaw(self, places: Iterable[int], published: Mapped) -> None:
        """Put memory of its own, with the same content, in the place of published blocks.

        Raises:
            OutOfMemoryError: there is not enough; nothing was changed.
        """
        closed = sorted(set(places) - self._open)
        if not closed:
            return
        self.settle()
        blocks = create_blocks(self._place, {place: self._layout.sizes[place] for place in closed})
        with ExitStack() as undo:
            undo.callback(close_each, [block.close for block in blocks.values()])
            old = self.mapped.replace(blocks)  # the published mapping owns them
            undo.callback(self.mapped.replace, old)
            undo.callback(self.mapped.protect, closed, Right.READ)
            self.mapped.protect(closed, Right.READ_WRITE)
            undo.callback(self.settle)
            for place in closed:
                self.words(place).copy_(published.words(place))
            self._place.synchronize()
            undo.pop_all()
        self._open.update(closed)

    def seal(self, undo: ExitStack) -> None:
        """Map everything read-only before some of it becomes a version; ``undo`` takes it back."""
        sealed = self.open
        undo.callback(self.mapped.protect, sealed, Right.READ_WRITE)
        self.mapped.protect(sealed, Right.READ)

    def freeze(self, changed: Iterable[int], published: Mapped) -> None:
        """Close what is open and sealed: changed blocks are published, the others are dropped."""
        self._open -= set(changed)
        dropped = {place: published.block(place) for place in self._open}
        try:
            old = self.mapped.replace(dropped)
        except BaseException:
            self.mapped.protect(dropped, Right.READ_WRITE)  # they are open still
            raise
        self._open.clear()
        close_each(block.close for block in old.values())

    def close(self, published: Mapped | None) -> None:
        """Unmap what nothing writes to any more; blocks that are published too belong to their
        mapping there."""
        self.settle()
        shared = [] if published is None else [published.block(place) for place in published.places]
        self.mapped.close(keep=shared)
