"""How a span comes to be: create, exchange, map, each step voted on, all undone if one fails.

The order on every rank: (1) compare the requests and create the own blocks, (2) exchange
descriptors and import, (3) map everything and give access. After each step the ranks vote
(invariant 4). Blocks of a failed attempt go back to the driver and not to the pool: a peer may
still hold them.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tpspan.errors import TpspanError
from tpspan.launch.world import World
from tpspan.memory import Block, BlockPool, Driver, Right
from tpspan.memory.closing import close_each
from tpspan.spans.board import Board, is_deadline
from tpspan.spans.layout import Layout
from tpspan.spans.signals import Signals
from tpspan.spans.table import SpanBlock, Table

PlanT = TypeVar("PlanT", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Timings:
    """Seconds that the steps took on this rank, votes included."""

    create_s: float
    exchange_s: float
    map_s: float


@dataclass
class Parts:
    """Everything a span owns on this rank, and its one undo."""

    number: int
    table: Table
    blocks: list[SpanBlock]
    signals: Signals
    slot: int
    pool: BlockPool
    timings: Timings
    board: Board = field(init=False)

    def __post_init__(self) -> None:
        self.board = self.signals.board

    def close(self, views: Sequence[Table], *, pooled: bool, rank: int) -> None:
        """Unmap, drop imports, and give own blocks back; all is tried, the first failure raised.

        Args:
            views: further mappings of the same blocks.
            pooled: all ranks have voted to close, so own blocks may be used again once all have
                unmapped them (invariant 6); otherwise own blocks go back to the driver.
            rank: this rank.
        """
        own = [block.block for block in self.blocks if block.owner == rank]
        imported = [block.block for block in self.blocks if block.owner != rank]

        def unmap() -> None:
            tables = (*views, self.table)
            close_each([table.close for table in tables] + [block.close for block in imported])

        if not pooled:
            close_each([unmap, *(block.close for block in own)])
            return
        try:
            self.board.together("Span.close", unmap)
        except BaseException:
            with contextlib.suppress(TpspanError):  # a consequence of what is raised here
                close_each(block.close for block in own)
            raise
        finally:
            self.signals.release(self.slot)
        for block in own:
            self.pool.give(block)


class OpenSpan(Protocol):
    """What ``OpenSpans`` knows of a span."""

    @property
    def number(self) -> int:
        """How many spans of its world were allocated before it, the same on all ranks."""

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed; what follows is for those that have not."""

    @property
    def base_address(self) -> int:
        """Where it begins in this process."""

    @property
    def nbytes(self) -> int:
        """Its logical bytes."""

    def close_with_world(self) -> None:
        """Close without the other ranks, if nothing uses the object any more."""


class OpenSpans:
    """The spans of a world that are open, and their numbers, the same on all ranks."""

    def __init__(self, world: World) -> None:
        self._spans: weakref.WeakSet[OpenSpan] = weakref.WeakSet()
        self.numbers = itertools.count()

    @staticmethod
    def of(world: World) -> OpenSpans:
        """The open spans of a world."""
        return world.resource("spans", OpenSpans)

    def add(self, span: OpenSpan) -> None:
        """Remember an open span."""
        self._spans.add(span)

    def discard(self, span: OpenSpan) -> None:
        """Forget a closed span."""
        self._spans.discard(span)

    def find(self, address: int) -> OpenSpan | None:
        """The open span in whose logical bytes an address of this process lies; None if in none."""
        for span in tuple(self._spans):
            if not span.is_closed and 0 <= address - span.base_address < span.nbytes:
                return span
        return None

    def close(self) -> None:
        """Close what no tensor uses any more; the rest stays mapped until the process ends."""
        close_each(span.close_with_world for span in tuple(self._spans))


def allocate_parts(
    world: World,
    operation: str,
    asked: object,
    plan: Callable[[], PlanT],
    *,
    timeout_s: float | None,
) -> tuple[Parts, PlanT]:
    """Make everything a span owns. Collective.

    Args:
        asked: what must be the same on all ranks.
        plan: checks the arguments; the first thing it returns is the layout.

    Returns:
        The parts, and what ``plan`` returned.

    Raises:
        As ``Span.allocate``.
    """
    if not world.has_resource("signals"):  # what is made then knows the world's deadline only
        world.control.barrier(timeout_s=timeout_s if is_deadline(timeout_s) else None)
    signals = Signals.of(world)
    board = signals.board
    pool = world.resource("pool", pool_of)
    numbers = OpenSpans.of(world).numbers
    clock = [time.perf_counter()]
    with contextlib.ExitStack() as undo:

        def create() -> tuple[PlanT, list[Block], Table]:
            planned = plan()
            layout: Layout = planned[0]
            own = [take_block(pool, run.nbytes, undo) for run in layout.runs_of(world.rank)]
            table = Table(world.driver, max(layout.span_nbytes, layout.page_nbytes))
            undo.callback(table.close)
            return planned, own, table

        planned, own, table = board.begin(operation, asked, create, timeout_s=timeout_s)
        layout = planned[0]
        clock.append(time.perf_counter())
        sizes: list[list[int]] = [[] for _ in range(world.world_size)]
        for run in layout.runs:
            sizes[run.owner].append(run.nbytes)
        by_rank = exchange_blocks(board, world.driver, own, sizes, undo, timeout_s)
        clock.append(time.perf_counter())

        undo.callback(table.close)  # again: before the blocks that it will map by then

        def map_all() -> list[SpanBlock]:
            following = [iter(blocks) for blocks in by_rank]
            placed = []
            for index, run in enumerate(layout.runs):
                block = SpanBlock(index, run.owner, next(following[run.owner]))
                table.place(run.offset_bytes, block)
                placed.append(block)
            if placed:
                table.reservation.protect(Right.READ_WRITE, 0, layout.span_nbytes)
            return placed

        blocks = board.together("mapping", map_all, timeout_s=timeout_s)
        slot = signals.acquire()
        number = next(numbers)  # not before: a call that failed need not have been the same one
        clock.append(time.perf_counter())
        undo.pop_all()
    timings = Timings(*(end - start for start, end in itertools.pairwise(clock)))
    return Parts(number, table, blocks, signals, slot, pool, timings), planned


def new_span_block(world: World, parts: Parts, owner: int, nbytes: int) -> SpanBlock:
    """Make a block that all ranks of a span know. Collective; see ``Span.new_block``."""
    board = parts.board
    with contextlib.ExitStack() as undo:

        def create() -> list[Block]:
            page_nbytes = world.driver.page_nbytes
            if not 0 <= owner < world.world_size:
                raise ValueError(f"there is no rank {owner} in a world of {world.world_size}")
            if nbytes <= 0 or nbytes % page_nbytes:
                raise ValueError(f"{nbytes} bytes are not whole pages of {page_nbytes} bytes")
            return [take_block(parts.pool, nbytes, undo)] if owner == world.rank else []

        own = board.begin("Span.new_block", (parts.number, owner, nbytes), create)
        sizes = [[nbytes] if rank == owner else [] for rank in range(world.world_size)]
        by_rank = exchange_blocks(board, world.driver, own, sizes, undo, None)
        undo.pop_all()
    number = 1 + max((block.number for block in parts.blocks), default=-1)
    block = SpanBlock(number, owner, by_rank[owner][0])
    parts.blocks.append(block)
    return block


def exchange_blocks(
    board: Board,
    driver: Driver,
    own: list[Block],
    sizes: list[list[int]],
    undo: contextlib.ExitStack,
    timeout_s: float | None,
) -> list[list[Block]]:
    """Give every rank's blocks to every rank; ``undo`` closes what was imported. Collective."""

    def exchange() -> list[list[Block]]:
        by_rank = board.exchange.all_gather(driver, own, sizes, timeout_s=timeout_s)
        for rank, blocks in enumerate(by_rank):
            if rank != board.rank:
                for block in blocks:
                    undo.callback(block.close)
        return by_rank

    return board.together("exchanging blocks", exchange, timeout_s=timeout_s)


def take_block(pool: BlockPool, nbytes: int, undo: contextlib.ExitStack) -> Block:
    """Take a block from a pool; ``undo`` closes it."""
    block = pool.take(nbytes)
    undo.callback(block.close)
    return block


def pool_of(world: World) -> BlockPool:
    """The factory of a world's pool, its resource ``pool``."""
    return BlockPool(world.driver)
