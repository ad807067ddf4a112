"""A span: one layout on all ranks, every rank's blocks mapped into one range on each of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tpspan.errors import ClosedError, InUseError, PeerError
from tpspan.launch.world import World
from tpspan.memory import Right
from tpspan.spans import copying
from tpspan.spans.allocation import OpenSpans, Parts, allocate_parts, new_span_block
from tpspan.spans.fence import Fence, StreamsInUse
from tpspan.spans.layout import Layout, Run
from tpspan.spans.shards import ShardView, as_tuple, plan_layout
from tpspan.spans.table import Placement, SpanBlock, Table
from tpspan.spans.tensors import TensorRange

DEFAULT_STRIPE_NBYTES = 2 << 20


@dataclass(frozen=True)
class SpanStats:
    """What a span is made of, and what making it took on this rank.

    Attributes:
        nbytes, span_nbytes: logical bytes, and bytes of addresses (whole pages).
        own_nbytes: bytes of physical memory that this rank brings.
        num_blocks: blocks of all ranks.
        num_remaps: blocks exchanged so far.
        create_s, exchange_s, map_s: seconds for own blocks, for descriptors, for mapping.
    """

    nbytes: int
    span_nbytes: int
    own_nbytes: int
    num_blocks: int
    num_remaps: int
    create_s: float
    exchange_s: float
    map_s: float


class Span:
    """Bytes that the ranks of a world hold once between them and all of them read.

    Made by ``Span.allocate`` or ``Span.allocate_bytes``; closed by ``close`` or at the end of a
    ``with`` block. Tensors that it hands out keep it alive.

    Attributes:
        world, layout: whose it is, and how it is divided.
        shape, dtype: of the gathered tensor.
        rows: rows of dim 0 per rank; None for a striped span and for a given ``Layout``.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: tuple[int, ...] | None,
        parts: Parts,
    ) -> None:
        self.world = world
        self.layout = layout
        self.shape = shape
        self.dtype = dtype
        self.rows = rows
        self._parts: Parts | None = parts
        self._num_remaps = 0
        self._streams = StreamsInUse(world, parts.signals)
        self._copies: list[Run] | None = None
        self._range = TensorRange(parts.table.reservation.address, layout.nbytes, world.device)
        self._shard_view: ShardView | None = None
        self._registry = OpenSpans.of(world)
        self._registry.add(self)

    @classmethod
    def allocate(
        cls,
        world: World,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        layout: str | Layout = "blocked",
        rows: Sequence[int] | None = None,
        stripe_nbytes: int = DEFAULT_STRIPE_NBYTES,
        timeout_s: float | None = None,
    ) -> Span:
        """Allocate a tensor divided among the ranks. Collective.

        Args:
            world: the ranks; all of them in one domain.
            shape: of the gathered tensor.
            dtype: any dtype of torch.
            layout: ``"blocked"`` gives each rank its rows of dim 0 together (tensor parallelism);
                ``"striped"`` lets owners alternate, so that ranks that read in order do not meet at
                one owner; or a ``Layout`` of exactly the tensor's bytes.
            rows: rows of each rank, for a blocked span; by default as equal as possible.
            stripe_nbytes: for a striped span, a multiple of the page of 2 MiB.
            timeout_s: how long to wait for other ranks; by default the world's.

        Returns:
            The span; the content is undefined.

        Raises:
            CollectiveMismatch: the ranks asked for different things; nothing was done.
            OutOfMemoryError: this rank has not enough memory; undone on all ranks.
            PeerError: it failed on another rank, or one did not come; undone on all ranks.
            ValueError: the arguments do not fit together.
        """

        sizes, counts = as_tuple(shape), as_tuple(rows)

        def plan() -> tuple[Layout, tuple[int, ...] | None]:
            return plan_layout(sizes, dtype, world.world_size, layout, counts, stripe_nbytes)

        asked = (sizes, str(dtype), str(layout), counts, stripe_nbytes)
        parts, (planned, cut) = allocate_parts(
            world, "Span.allocate", asked, plan, timeout_s=timeout_s
        )
        return cls(world, planned, sizes, dtype, cut, parts)

    @classmethod
    def allocate_bytes(
        cls, world: World, layout: Layout, *, timeout_s: float | None = None
    ) -> Span:
        """Allocate the bytes of a layout; ``gathered`` is then a tensor of uint8. Collective.

        Raises:
            As ``allocate``.
        """
        return cls.allocate(
            world, (layout.nbytes,), torch.uint8, layout=layout, timeout_s=timeout_s
        )

    @property
    def nbytes(self) -> int:
        """Logical bytes of the gathered tensor."""
        return self.layout.nbytes

    @property
    def base_address(self) -> int:
        """First address in this process; it means nothing on other ranks."""
        return self._open().table.reservation.address

    @property
    def gathered(self) -> torch.Tensor:
        """The whole tensor, of ``shape``: reading it reads every rank's memory in place."""
        return self.tensor(self.shape, self.dtype)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard: (rows, \\*shape[1:]) of a blocked span.

        For a striped span the bytes of this rank's pages side by side, through a mapping of their
        own: rows if whole rows lie there, otherwise one dimension.
        """
        return self.shard(self.world.rank)

    def shard(self, rank: int) -> torch.Tensor:
        """The shard of any rank, by offset in the gathered range.

        Raises:
            ValueError: no such rank; or a striped span, where only the own shard has addresses of
                its own.
        """
        parts = self._open()
        if not 0 <= rank < self.world.world_size:
            raise ValueError(f"there is no rank {rank} in a world of {self.world.world_size}")
        if self.rows is not None:
            slices = self.layout.shards[rank]
            offset = slices[0][0] if slices else 0
            return self.tensor((self.rows[rank], *self.shape[1:]), self.dtype, offset)
        if rank != self.world.rank:
            raise ValueError(
                "in a striped span the shard of another rank does not lie together; read it "
                "through `gathered`, or use layout.shards"
            )
        if self._shard_view is None:
            self._shard_view = ShardView(self.world.driver, parts.table, self.layout, rank)
        return self._shard_view.tensor(self.shape, self.dtype, self)

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        offset_bytes: int = 0,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor over any part of the range; it keeps the span alive.

        Raises:
            ValueError: it does not lie inside the range, or the offset is not aligned to dtype.
            ClosedError: the span was closed.
        """
        self._open()
        self._streams.use()
        return self._range.tensor(shape, dtype, offset_bytes, stride, keep=self)

    def copy_to(self, out: torch.Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
        """Copy the gathered tensor into ordinary memory, on a stream on CUDA.

        One copy per owner, beginning at the right neighbour: a single copy over all owners is five
        times slower, and ranks that begin at the same owner wait for each other. Put a barrier
        before (inputs are written) and after (inputs may be written again).

        Args:
            out: contiguous, of this span's dtype, number of elements and device.
            stream: by default the current one.

        Raises:
            ValueError: ``out`` does not fit.
        """
        world = self.world
        copying.check_out(out, self.shape, self.dtype, world.device)
        if world.backend == "host":
            out.copy_(self.gathered.view_as(out))  # by all of torch's threads
            return
        if self._copies is None:
            self._copies = copying.rotated(self.layout, world.rank)
        copying.copy_to(
            world.driver,
            self._copies,
            self.base_address,
            out,
            self._streams.use(stream),
            is_local=world.shares_device or world.world_size == 1,
        )

    def barrier(self, *, stream: torch.cuda.Stream | None = None) -> None:
        """Hold the stream until the streams of all ranks have come here. Collective.

        What any rank wrote before is then visible to all. On the host backend the caller is held.

        Raises:
            PeerError: ranks did not come (on CUDA: an earlier wait of a stream ran out of time).
        """
        parts = self._open()
        parts.signals.barrier(parts.slot, self._streams.use(stream))

    def host_barrier(self, *, timeout_s: float | None = None) -> None:
        """Hold the host until every rank has come here and is done with the span. Collective.

        Each rank first waits for its own streams that use the span (``fence``).

        Raises:
            PeerError: ranks did not come, or their work was not done, before the deadline.
        """
        parts = self._open()
        parts.board.begin(
            "Span.host_barrier",
            parts.number,
            lambda: self.fence().wait(timeout_s),
            timeout_s=timeout_s,
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream uses this span, so that fences and the capture check know it."""
        self._open()
        self._streams.use(stream)

    def fence(self) -> Fence:
        """Record everything so far on the streams of this rank that use the span.

        These are the current stream, those that were current when a tensor was taken from the span,
        and every stream given to a method of it. Tell it of others with ``record_stream``.

        Raises:
            CaptureError: one of them is being captured into a graph.
        """
        self._open()
        return self._streams.fence()

    @property
    def blocks(self) -> tuple[Placement, ...]:
        """The table offset → block, the same on all ranks (invariant 2)."""
        return self._open().table.placements

    def new_block(self, owner: int, nbytes: int) -> SpanBlock:
        """Create a block that every rank knows and none has mapped yet. Collective.

        It can be put behind an offset by ``remap`` and belongs to the span until it is closed.

        Args:
            owner: the rank whose memory it is.
            nbytes: whole pages.

        Raises:
            As ``allocate``.
        """
        return new_span_block(self.world, self._unclosed(), owner, nbytes)

    def remap(self, offset_bytes: int, block: SpanBlock, *, after: Fence) -> SpanBlock:
        """Put another block behind an offset; its size is that of the one there. Collective.

        Args:
            offset_bytes: where a block begins.
            block: from ``new_block`` of this span, or displaced by an earlier remap.
            after: guards the change: each rank waits for its own before any rank unmaps.

        Returns:
            The block that was there; it keeps its content.

        Raises:
            CaptureError: a stream that uses the span is being captured; nothing was changed.
            CollectiveMismatch: the ranks asked for different remaps; nothing was changed.
            ValueError: offset and block do not fit; nothing was changed.
            DriverError, PeerError: it failed here or elsewhere; the old mapping was put back.
        """
        return self.remap_many([(offset_bytes, block)], after=after)[0]

    def swap(self, offset_a: int, offset_b: int, *, after: Fence) -> None:
        """Exchange the blocks behind two offsets. Collective; otherwise as ``remap``."""
        table = self._unclosed().table

        def moves() -> list[tuple[int, SpanBlock]]:
            return [(offset_a, table.block_at(offset_b)), (offset_b, table.block_at(offset_a))]

        self._remap("Span.swap", (offset_a, offset_b), moves, after)

    def remap_many(
        self, moves: Sequence[tuple[int, SpanBlock]], *, after: Fence
    ) -> list[SpanBlock]:
        """Several remaps in one: all happen or none. Collective; otherwise as ``remap``.

        Returns:
            The blocks that were there, in the order of ``moves``.
        """
        asked = tuple((offset, block.number) for offset, block in moves)
        return self._remap("Span.remap", asked, lambda: list(moves), after)

    def protect(self, right: Right, offset_bytes: int = 0, nbytes: int | None = None) -> None:
        """Set what this rank may do through its own mappings of whole blocks.

        Waits for this rank's streams first. A later write through a read-only mapping fails in the
        writer and changes nothing (invariant 12).

        Raises:
            DriverError: the range is not whole blocks.
        """
        parts = self._open()
        if not self.layout.span_nbytes:
            return
        if nbytes is None:
            nbytes = self.layout.span_nbytes - offset_bytes
        self.fence().wait()
        parts.table.reservation.protect(right, offset_bytes, nbytes)
        if self._shard_view is not None:
            self._shard_view.protect(right, offset_bytes, nbytes)

    def stats(self) -> SpanStats:
        """What the span is made of, and what making it took."""
        parts = self._open()
        times = parts.timings
        return SpanStats(
            nbytes=self.layout.nbytes,
            span_nbytes=self.layout.span_nbytes,
            own_nbytes=sum(b.nbytes for b in parts.blocks if b.owner == self.world.rank),
            num_blocks=len(parts.blocks),
            num_remaps=self._num_remaps,
            create_s=times.create_s,
            exchange_s=times.exchange_s,
            map_s=times.map_s,
        )

    @property
    def number(self) -> int:
        """How many spans of its world were allocated before it, the same on all ranks."""
        return self._unclosed().number

    @property
    def is_closed(self) -> bool:
        """Whether the span has been closed."""
        return self._parts is None

    def close(self, *, force: bool = False) -> None:
        """Unmap on all ranks, then give the blocks back. Collective; once is enough.

        Args:
            force: close although tensors of this span live (using them afterwards crashes the
                process), and without the other ranks, which may be dead.

        Raises:
            InUseError: tensors of this span are still alive on this rank; nothing was done.
            PeerError: the same on another rank; or ranks did not come.
        """
        parts = self._parts
        if parts is None:
            return
        if self.world.is_closed and not force:  # its ranks cannot be asked any more
            self._refuse_live()
            force = True
        if force:
            with contextlib.suppress(PeerError, ClosedError):  # dead ranks, or a closed world
                self._streams.fence().wait()
            self._dissolve(parts, pooled=False)
            return
        board = parts.board
        board.begin("Span.close", parts.number, self._ready_to_close)
        self._dissolve(parts, pooled=True)

    def close_with_world(self) -> None:
        """Close without the other ranks unless tensors live; the world's ``close`` calls it."""
        if self._num_live == 0:
            self.close(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        elif self._num_live == 0:  # the other ranks may be elsewhere: ask none of them
            self.close(force=True)

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None:  # invariant 10: no driver call from here
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = ", closed" if self._parts is None else ""
        return f"<Span {self.shape} {self.dtype}, {self.nbytes} bytes{state}>"

    def _unclosed(self) -> Parts:
        if self._parts is None:
            raise ClosedError(f"{self!r} was closed")
        return self._parts

    def _open(self) -> Parts:
        parts = self._unclosed()
        view = self._shard_view
        if parts.table.is_broken or (view is not None and view.table.is_broken):
            raise ClosedError(f"{self!r} lost a mapping in a failed remap: close it")
        return parts

    def _remap(
        self,
        operation: str,
        asked: object,
        moves: Callable[[], Sequence[tuple[int, SpanBlock]]],
        after: Fence,
    ) -> list[SpanBlock]:
        parts = self._unclosed()

        def prepare() -> Sequence[tuple[int, SpanBlock]]:
            self._open()
            checked = moves()
            parts.table.check(checked, parts.blocks)
            if after.of is not self._streams:
                raise ValueError("the fence is one of another span: take it from this one")
            self._streams.use()
            self._streams.refuse_capture()
            after.wait()
            return checked

        checked = parts.board.begin(operation, (parts.number, asked), prepare)
        work = [(parts.table, list(checked))]
        if self._shard_view is not None:
            work.append((self._shard_view.table, self._shard_view.moves(checked)))
        undo: list[tuple[Table, list[tuple[int, SpanBlock]]]] = []

        def commit() -> None:
            for table, part in work:
                undo.append((table, table.replace(part)))

        try:
            parts.board.together(operation, commit)
        except BaseException:
            for table, part in reversed(undo):
                table.restore(part)
            raise
        self._num_remaps += len(checked)
        return [block for _, block in undo[0][1]]

    @property
    def _views(self) -> tuple[Table, ...]:
        return () if self._shard_view is None else (self._shard_view.table,)

    @property
    def _num_live(self) -> int:
        view = self._shard_view
        return self._range.num_live + (view.range.num_live if view else 0)

    def _ready_to_close(self) -> None:
        self._streams.refuse_capture()
        self._refuse_live()
        self._streams.fence().wait()

    def _refuse_live(self) -> None:
        if self._num_live:
            raise InUseError(
                f"{self._num_live} tensors of {self!r} are still alive: drop them first, or close "
                "with force=True and never touch them again"
            )

    def _dissolve(self, parts: Parts, *, pooled: bool) -> None:
        self._parts = None
        self._registry.discard(self)
        parts.close(self._views, pooled=pooled, rank=self.world.rank)
