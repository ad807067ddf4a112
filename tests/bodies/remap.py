"""Changing what lies behind an offset: data follow the block, rights stay with the offset."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bodies.common import failure, fill, finish, gather, holds, meet, pattern, raw, trim
from drivers import is_readable, is_writable
from faulty import FaultyDriver
from tpspan.errors import CollectiveMismatch, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, Right
from tpspan.spans import Placement, Span

PAGE = PAGE_NBYTES


def striped(world: World, num_pages: int = 0) -> Span:
    """One page a stripe, two stripes a rank unless said otherwise."""
    num_pages = num_pages or 2 * world.world_size
    return Span.allocate(world, (num_pages, PAGE), torch.uint8, layout="striped")


def value_at(span: Span, page: int) -> int:
    """The byte that fills a page; all of the page must be alike."""
    seen = raw(span)[page * PAGE : (page + 1) * PAGE]
    value = int(seen[0])
    assert bool((seen == value).all())
    return value


def mark(span: Span) -> None:
    """Fill each page with its own number plus one."""
    for page in range(len(span.blocks)):
        if span.layout.owner_of(page * PAGE) == span.world.rank:
            raw(span)[page * PAGE : (page + 1) * PAGE] = page + 1
    meet(span)


def agree(world: World, placements: tuple[Placement, ...]) -> None:
    """The table is the same on all ranks (invariant 2)."""
    table = [(p.offset_bytes, p.block.number, p.block.owner) for p in placements]
    assert all(other == table for other in gather(world, table))


def swapped(world: World) -> None:
    """The data follow the blocks, on all ranks, and the own shard's view follows the offset."""
    with striped(world) as span:
        mark(span)
        last = len(span.blocks) - 1
        own = span.local.view(-1, PAGE)
        pages = [page for page in range(last + 1) if page % world.world_size == world.rank]
        assert own[:, 0].tolist() == [page + 1 for page in pages]
        meet(span)
        before = span.blocks
        span.swap(0, last * PAGE, after=span.fence())
        assert value_at(span, 0) == last + 1
        assert value_at(span, last) == 1
        assert [value_at(span, page) for page in range(1, last)] == list(range(2, last + 1))
        mixed = {0: last, last: 0}
        assert own[:, 0].tolist() == [mixed.get(page, page) + 1 for page in pages]
        agree(world, span.blocks)
        assert span.blocks[0].block is before[last].block
        assert span.blocks[last].block is before[0].block
        assert span.stats().num_remaps == 2
        span.swap(0, last * PAGE, after=span.fence())
        assert [value_at(span, page) for page in range(last + 1)] == list(range(1, last + 2))
        assert span.blocks == before
        meet(span)
        del own


@contextlib.contextmanager
def one_step(world: World) -> Iterator[None]:
    """Let the host's driver replace a mapping as CUDA's does; what fails in between shows."""
    driver: Any = world.driver

    def replace(address: int, nbytes: int, handle: int, right: Right) -> bool:
        driver.unmap(address, nbytes)
        driver.map(address, nbytes, handle)
        driver.protect(address, nbytes, right)
        return True

    if world.backend == "host":
        driver.replace = replace
    try:
        yield
    finally:
        vars(driver).pop("replace", None)


def replaced_at_once(world: World, owner: int) -> None:
    """The same where the driver has one step for it."""
    with one_step(world):
        replaced(world, owner)


def replaced(world: World, owner: int) -> None:
    """A new block comes in and the old one goes out with its content, and back again."""
    with striped(world) as span:
        mark(span)
        num_blocks = span.stats().num_blocks
        block = span.new_block(owner, PAGE)
        assert (block.owner, block.nbytes) == (owner, PAGE)
        assert span.stats().num_blocks == num_blocks + 1
        assert span.blocks[1].block is not block
        agree(world, span.blocks)
        old = span.remap(PAGE, block, after=span.fence())
        assert span.blocks[1].block is block
        agree(world, span.blocks)
        if world.rank == owner:
            raw(span)[PAGE : 2 * PAGE] = 99
        meet(span)
        assert value_at(span, 1) == 99
        assert value_at(span, 0) == 1
        meet(span)
        assert span.remap(PAGE, old, after=span.fence()) is block
        assert value_at(span, 1) == 2, "the old block kept what was in it"
        assert span.remap(0, block, after=span.fence()) is not block
        assert value_at(span, 0) == 99
        meet(span)


def turned(world: World) -> None:
    """A whole round of blocks in one call; with rights that stay where they are."""
    with striped(world) as span:
        mark(span)
        span.protect(Right.READ, PAGE, PAGE)
        local = span.local  # made after: it takes the rights over
        placements = span.blocks
        count = len(placements)
        moves = [
            (placed.offset_bytes, placements[(index + 1) % count].block)
            for index, placed in enumerate(placements)
        ]
        old = span.remap_many(moves, after=span.fence())
        assert old == [placed.block for placed in placements]
        assert [value_at(span, page) for page in range(count)] == [*range(2, count + 1), 1]
        pages = [page for page in range(count) if page % world.world_size == world.rank]
        assert local.view(-1, PAGE)[:, 0].tolist() == [(page + 1) % count + 1 for page in pages]
        meet(span)
        if world.backend == "host":
            rights = [is_writable(span.base_address + at * PAGE) for at in range(count)]
            assert rights == [page != 1 for page in range(count)]
            own = [is_writable(local.data_ptr() + at * PAGE) for at in range(len(pages))]
            assert own == [page != 1 for page in pages]
        assert span.remap_many([], after=span.fence()) == []
        meet(span)
        del local


def misused(world: World) -> None:
    """Everything that would break the table is refused on all ranks, and nothing is changed."""
    with striped(world) as span, striped(world) as other:
        mark(span)
        block, foreign = span.new_block(0, PAGE), other.new_block(0, PAGE)
        large = span.new_block(world.world_size - 1, 2 * PAGE)
        before = span.blocks
        first, second = before[0].block, before[1].block
        fence = span.fence()
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: span.remap(0, second, after=fence), "two offsets (invariant 1)"),
            (lambda: span.remap_many([(0, block), (PAGE, block)], after=fence), "two offsets"),
            (lambda: span.remap_many([(0, block), (0, block)], after=fence), "named twice"),
            (lambda: span.swap(0, 0, after=fence), "named twice"),
            (lambda: span.swap(0, PAGE, after=other.fence()), "fence is one of another span"),
            (lambda: span.remap(0, foreign, after=fence), "does not belong to this span"),
            (lambda: span.remap(0, large, after=fence), "does not fit offset 0"),
            (lambda: span.remap(PAGE // 2, block, after=fence), "no block begins at offset"),
            (lambda: span.remap(-PAGE, block, after=fence), "no block begins at offset"),
            (lambda: span.remap(99 * PAGE, block, after=fence), "no block begins at offset"),
            (lambda: span.swap(0, 99 * PAGE, after=fence), "no block begins at offset"),
        ]
        with FaultyDriver(world.driver) as watch:
            for step, said in cases:
                error = failure(step)
                assert isinstance(error, ValueError), error
                assert said in str(error), error
            assert watch.calls == []
        assert span.blocks == before
        assert span.stats().num_remaps == 0
        assert [value_at(span, page) for page in range(len(before))] == list(
            range(1, len(before) + 1)
        )
        meet(span)
        assert span.remap(0, block, after=span.fence()) is first


def disagreed(world: World) -> None:
    """Different remaps on different ranks: nothing is changed anywhere."""
    with striped(world) as span:
        mark(span)
        block = span.new_block(0, PAGE)
        before = span.blocks
        target = PAGE if world.rank == world.world_size - 1 else 0
        error = failure(lambda: span.remap(target, block, after=span.fence()))
        assert isinstance(error, CollectiveMismatch), error
        assert sorted(error.requests) == list(range(world.world_size))
        asked = failure(
            lambda: (
                span.remap(0, block, after=span.fence())
                if world.rank
                else span.swap(0, PAGE, after=span.fence())
            )
        )
        assert isinstance(asked, CollectiveMismatch), asked
        assert "Span.swap" in str(asked) or "Span.remap" in str(asked)
        assert span.blocks == before
        meet(span)


class SlowFence:
    """A fence that is still in use on one rank for a while."""

    def __init__(self, span: Span, wait_s: float) -> None:
        self.of = span._streams
        self.wait_s = wait_s
        self.passed_s = 0.0

    def wait(self, timeout_s: float | None = None) -> None:
        time.sleep(self.wait_s)
        self.passed_s = time.monotonic()


def fenced(world: World, slow: int) -> None:
    """One rank still uses the range: no rank unmaps before that rank's host has waited."""
    with striped(world) as span:
        mark(span)
        fence = SlowFence(span, 0.3 if world.rank == slow else 0.0)
        with FaultyDriver(world.driver) as watch:
            span.swap(0, PAGE, after=fence)  # type: ignore[arg-type]
            first = min(call.start_s for call in watch.named("unmap"))
        passed = gather(world, fence.passed_s)
        assert first >= max(passed), "one clock: all ranks run on one host"
        assert value_at(span, 0) == 2
        meet(span)


def late_fence(world: World, slow: int) -> None:
    """A fence that does not come undoes the call on all ranks."""

    class Late(SlowFence):
        def wait(self, timeout_s: float | None = None) -> None:
            raise PeerError([slow], "work that uses the span has not finished within 0 s")

    with striped(world) as span:
        mark(span)
        before = span.blocks
        fence = Late(span, 0.0) if world.rank == slow else span.fence()
        error = failure(lambda: span.swap(0, PAGE, after=fence))  # type: ignore[arg-type]
        assert isinstance(error, PeerError), error
        assert error.ranks == (slow,)
        assert "has not finished" in str(error)
        assert span.blocks == before
        assert value_at(span, 0) == 1
        meet(span)


def slow_reader(world: World, slow: int) -> None:
    """Invariant 6: a block is free for its owner only after the slowest rank has unmapped it."""
    trim(world)
    span = striped(world)
    mark(span)
    pool = span._parts.pool  # type: ignore[union-attr]
    given: list[float] = []
    give = pool.give

    def noted(block: Any) -> None:
        given.append(time.monotonic())
        give(block)

    pool.give = noted  # type: ignore[method-assign]
    try:
        with FaultyDriver(world.driver) as watch:
            if world.rank == slow:
                watch.delay("unmap", 0.05)
            span.close()
            unmapped = max(call.end_s for call in watch.named("unmap"))
    finally:
        del pool.give  # type: ignore[method-assign]
    last = max(gather(world, unmapped))
    assert len(given) == 2
    assert min(given) >= last
    trim(world)


def read_only(world: World) -> None:
    """What is mapped read-only cannot be written: the writer fails, the data stay."""
    with striped(world) as span:
        mark(span)
        span.protect(Right.READ)
        local = span.local
        own = [page for page in range(len(span.blocks)) if page % world.world_size == world.rank]
        for address in (span.base_address, span.base_address + PAGE, local.data_ptr()):
            assert is_readable(address)
            assert not is_writable(address)
        writers = (
            lambda: raw(span).fill_(0),
            lambda: raw(span)[own[0] * PAGE : own[0] * PAGE + 1].zero_(),
            local.zero_,
        )
        for write in writers:
            assert died_by(write) == signal.SIGSEGV
        meet(span)
        assert [value_at(span, page) for page in range(len(span.blocks))] == list(
            range(1, len(span.blocks) + 1)
        )
        meet(span)
        span.protect(Right.READ_WRITE)
        span.protect(Right.READ, 0, PAGE)
        assert [is_writable(span.base_address + page * PAGE) for page in (0, 1)] == [False, True]
        if own[0] == 0:
            assert not is_writable(local.data_ptr())
        assert is_writable(local.data_ptr() + PAGE)
        with pytest.raises(ValueError, match="does not lie inside"):
            span.protect(Right.READ, 0, 99 * PAGE)
        span.protect(Right.NONE)
        assert not is_readable(span.base_address)
        span.protect(Right.READ_WRITE)
        assert holds_pages(span, skip=1)
        meet(span)
        del local, writers, write


def holds_pages(span: Span, skip: int) -> bool:
    """Every page but the first ones, whose probes wrote a zero, holds its mark."""
    return all(
        int(raw(span)[page * PAGE + 1]) == page + 1 for page in range(skip, len(span.blocks))
    )


def died_by(step: Callable[[], object]) -> int:
    """The signal that ends a child in which the step is done; 0 if it lives."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            import faulthandler

            faulthandler.disable()
            step()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def blocked_remap(world: World) -> None:
    """Blocks of several pages, cut inside pages, change places with new ones of the same size."""
    shape = (4 * world.world_size, PAGE // 2 + 3)
    with Span.allocate(world, shape, torch.uint8) as span:
        fill(span)
        placed = span.blocks[-1]
        new = span.new_block(0, placed.block.nbytes)
        old = span.remap(placed.offset_bytes, new, after=span.fence())
        if world.rank == 0:
            expected = pattern(span.nbytes).to(world.device)
            raw(span)[placed.offset_bytes :] = expected[placed.offset_bytes :]
            finish(world)
        meet(span)
        assert holds(span)
        meet(span)
        span.remap(placed.offset_bytes, old, after=span.fence())
        assert holds(span)
        meet(span)
