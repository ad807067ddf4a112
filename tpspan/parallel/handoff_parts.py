"""How a channel inside a domain comes to be: request, create, exchange, map, each voted on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpspan.errors import TpspanError
from tpspan.launch.world import World
from tpspan.memory import Block, BlockPool, Right
from tpspan.memory.closing import close_each
from tpspan.memory.host import HostDriver
from tpspan.parallel.link import Link
from tpspan.parallel.side import Side, SidePlace
from tpspan.parallel.turns import EventTurns, HostTurns, StreamTurns
from tpspan.spans.allocation import exchange_blocks, pool_of, take_block
from tpspan.spans.board import Board
from tpspan.spans.fence import Waits
from tpspan.spans.host_ops import HostOps
from tpspan.spans.pages import Pages
from tpspan.spans.remapper import Remapper
from tpspan.spans.signals import Signals
from tpspan.spans.table import SpanBlock


@dataclass(frozen=True)
class Shape:
    """What all ranks of a channel agree on; ranks are those of the link.

    Attributes:
        src, dst: who produces, and who consume; the blocks are memory of the first of them.
        block_nbytes, depth: bytes from one block to the next, and how many there are.
        remaps: one address on each side.
        page_nbytes: of what memory is given in.
    """

    src: int
    dst: tuple[int, ...]
    block_nbytes: int
    depth: int
    remaps: bool
    page_nbytes: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece of memory: only what is remapped has to lie by itself."""
        if self.remaps:
            return [self.block_nbytes] * self.depth
        return [round_up(self.block_nbytes * self.depth, self.page_nbytes)]


@dataclass
class Parts:
    """Everything a channel owns on this rank, and its one undo."""

    number: int
    board: Board
    waits: Waits
    signals: Signals | None
    slots: list[int]
    pool: BlockPool
    remapper: Remapper
    blocks: list[Block]
    pages: Pages
    sides: tuple[Side, ...]

    def close(self, *, pooled: bool) -> None:
        """Unmap, and give own blocks back; all is tried, the first failure raised.

        Args:
            pooled: all ranks close, so that own blocks may be used again once all have unmapped
                them (invariant 6); otherwise they go back to the driver.
        """
        imported = [block for block in self.blocks if block.is_imported]
        own = [block for block in self.blocks if not block.is_imported]

        def unmap() -> None:
            ends = [lambda side=side: side.end_remaps(self.remapper) for side in self.sides]
            tables = [side.table.close for side in self.sides]
            close_each([*ends, *tables, *(block.close for block in imported), self.pages.close])

        def settle_and_unmap() -> None:
            close_each([*(side.settle for side in self.sides), unmap])

        if not pooled:
            close_each([unmap, *(block.close for block in own)])
            return
        try:
            self.board.together("Handoff.close", settle_and_unmap)
        except BaseException:
            with contextlib.suppress(TpspanError):  # a consequence of what is raised here
                close_each(block.close for block in own)
            raise
        finally:
            for slot in reversed(self.slots):
                assert self.signals is not None
                self.signals.release(slot)
        for block in own:
            if block.driver is self.pool.driver:
                self.pool.give(block)
            else:
                block.close()


def make_parts(
    link: Link,
    request: object,
    check: Callable[[], Shape],
    places: Sequence[SidePlace],
    remapper: Remapper,
    *,
    timeout_s: float | None,
) -> tuple[Parts, Shape]:
    """Make everything. Collective among the ranks of the link.

    Args:
        request: what must be the same on all of them.
        check: refuses wrong arguments, or says what is to be made.
        places: of the producer and of the consumer on this rank.

    Raises:
        As ``Handoff``, with the ranks of the link.
    """
    world = link.world
    board = Board.of(world)
    signals = Signals.of(world) if streams_wait(world) else None
    waits: Waits = board if signals is None else signals
    pool = world.resource("pool", pool_of)
    owner_place = places[1]
    with contextlib.ExitStack() as undo:

        def create() -> tuple[Shape, list[Block], tuple[Side, ...]]:
            shape = check()
            own: list[Block] = []
            for nbytes in shape.sizes if world.rank == shape.dst[0] else ():
                if owner_place.driver is world.driver:
                    own.append(take_block(pool, nbytes, undo))
                else:
                    made = Block.create(owner_place.driver, nbytes)
                    own.append(undo.enter_context(made))
            roles = ((True, world.rank == shape.src), (False, world.rank in shape.dst))
            sides = []
            for (is_producer, is_here), place in zip(roles, places, strict=True):
                if is_here:
                    sizes = (shape.block_nbytes, shape.depth)
                    side = Side(is_producer, place, waits, *sizes, remaps=shape.remaps)
                    undo.callback(side.table.close)
                    sides.append(side)
            return shape, own, tuple(sides)

        what = "Handoff"
        shape, own, sides = board.begin(what, request, create, timeout_s=timeout_s)
        sizes: list[list[int]] = [[] for _ in range(world.world_size)]
        sizes[shape.dst[0]] = shape.sizes
        by_rank = exchange_blocks(board, world.driver, own, sizes, undo, timeout_s)
        blocks = list(by_rank[shape.dst[0]])
        for side in sides:  # again: before the blocks that they will map by then
            undo.callback(side.table.close)

        def map_all() -> None:
            for side in sides:
                known = [_known_to(side.place, block, undo) for block in blocks]
                blocks.extend(block for block in known if block not in blocks)
                undo.callback(side.table.close)
                may_write = side.is_producer or len(shape.dst) == 1
                placed = [SpanBlock(i, shape.dst[0], block) for i, block in enumerate(known)]
                side.map(placed, Right.READ_WRITE if may_write else Right.READ)
                if shape.remaps:
                    undo.callback(side.end_remaps, remapper)
                    side.begin_remaps(remapper)

        board.together("mapping", map_all, timeout_s=timeout_s)
        pages = Pages(board.exchange, HostDriver())
        undo.callback(pages.close)
        ops = HostOps(pages, board.exchange, world.timeout_s, board.num_cores)
        slots = [signals.acquire() for _ in range(shape.depth)] if signals is not None else []
        _set_turns(sides, shape, ops, signals, slots, world.backend)
        undo.pop_all()
    number = next(link.numbers)
    made = (number, board, waits, signals, slots, pool, remapper, blocks, pages, sides)
    return Parts(*made), shape


def round_up(nbytes: int, unit_nbytes: int) -> int:
    """The next multiple of a unit."""
    return -(-nbytes // unit_nbytes) * unit_nbytes


def streams_wait(world: World) -> bool:
    """Whether streams of several ranks wait for each other, and not hosts or a rank's streams."""
    return world.backend == "cuda" and world.world_size > 1


def _known_to(place: SidePlace, block: Block, undo: contextlib.ExitStack) -> Block:
    """The block as the driver of a side knows it: another GPU's driver imports it first."""
    if block.driver is place.driver:
        return block
    fd = block.export()
    try:
        return undo.enter_context(Block.from_fd(place.driver, fd, block.nbytes))
    finally:
        os.close(fd)


def _set_turns(
    sides: Sequence[Side],
    shape: Shape,
    ops: HostOps,
    signals: Signals | None,
    slots: Sequence[int],
    backend: str,
) -> None:
    events = [
        [torch.cuda.Event() for _ in range(shape.depth)]
        for _ in range(2 if backend == "cuda" and signals is None else 0)
    ]
    for side in sides:
        peers = shape.dst if side.is_producer else (shape.src,)
        hosts = HostTurns(ops, side.ring, peers, is_producer=side.is_producer)
        which = side.is_producer
        if signals is not None:
            side.turns = StreamTurns(hosts, signals, slots, side.ring, peers, is_producer=which)
        elif events:
            own, theirs = events if which else reversed(events)
            device = side.place.device
            side.turns = EventTurns(hosts, side.ring, own, theirs, device, is_producer=which)
        else:
            side.turns = hosts
