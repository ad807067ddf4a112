"""Every driver call failing in turn, on one rank: all ranks raise, and everything is undone."""

from __future__ import annotations

import contextlib
import gc
import glob
import itertools
import os
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bodies.common import failure, fill, gather, holds, meet, raw, short_lived, trim
from bodies.remap import mark, one_step, striped, value_at
from drivers import open_descriptors
from faulty import NOTHING, FaultyDriver
from tpspan.errors import ClosedError, CollectiveMismatch, DriverError, OutOfMemoryError, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans import Board, Layout, Span

PAGE = PAGE_NBYTES


def check_all_raised(world: World, victim: int, error: BaseException | None) -> None:
    """The victim says what its driver said; the others say that it was the victim."""
    if world.rank == victim:
        assert isinstance(error, DriverError), error
        assert error.code_name == "INJECTED"
    else:
        assert isinstance(error, PeerError), error
        assert error.ranks == (victim,), error
        assert "INJECTED" in str(error), error


def _into(made: list[Any], step: Callable[..., Any], *args: Any) -> None:
    made.append(step(*args))


def each_call(
    world: World, victim: int, step: Callable[[], Callable[[], None] | None], check: Any
) -> int:
    """Do ``step`` with its first driver call failing on one rank, then the second, and so on.

    Args:
        step: what is done; what it returns undoes its success.
        check: called with nothing after every failure.

    Returns:
        How many calls were made to fail.
    """
    for nth in itertools.count(1):
        made: list[Callable[[], None] | None] = []
        with FaultyDriver(world.driver) as watch:
            if world.rank == victim:
                watch.fail(nth)
            error = failure(_into, made, step)
            fired = any(gather(world, watch.num_failed))
            if not fired:
                assert error is None, error
            else:
                check_all_raised(world, victim, error)
                trim(world)
                assert watch.held == NOTHING, (nth, watch.held, watch.calls)
        check()
        if not fired:
            undo = made[0]
            if undo is not None:
                undo()
            return nth - 1
    raise AssertionError("unreachable")


def allocate(world: World, victim: int, layout: str) -> int:
    trim(world)
    descriptors = len(list(open_descriptors()))

    def make() -> Callable[[], None]:
        span = Span.allocate(
            world, (2 * world.world_size, PAGE // 2 + 5), torch.uint8, layout=layout
        )
        return span.close

    def check() -> None:
        with Span.allocate(world, (world.world_size, 64), torch.uint8) as span:
            fill(span)
            assert holds(span)
            meet(span)
        trim(world)

    num_failed = each_call(world, victim, make, check)
    trim(world)
    assert len(list(open_descriptors())) == descriptors
    return num_failed


def first_use(world: World, victim: int) -> int:
    """Also what a world makes at its first allocation is made by all ranks or by none."""
    for nth in itertools.count(1):
        inner = world.subset(range(world.world_size))
        with FaultyDriver(world.driver) as watch:
            if world.rank == victim:
                watch.fail(nth)
            made: list[Span] = []
            error = failure(_into, made, Span.allocate, inner, (1,), torch.uint8)
            fired = any(gather(world, watch.num_failed))
            if fired:
                check_all_raised(world, victim, error)
            else:
                assert error is None, error
            watch.heal()
            for span in (*made, Span.allocate(inner, (1,), torch.uint8)):
                span.close()
            world.control.barrier()
            gc.collect()
            inner.close()
            assert watch.held == NOTHING, (nth, watch.held)
        if not fired:
            return nth - 1
    raise AssertionError("unreachable")


def new_block(world: World, victim: int) -> int:
    trim(world)
    with striped(world) as span:
        mark(span)
        before, num_blocks = span.blocks, span.stats().num_blocks

        def check() -> None:
            assert span.blocks == before
            meet(span)

        def make() -> None:
            span.new_block(world.world_size - 1, PAGE)

        num_failed = each_call(world, victim, make, check)
        assert span.stats().num_blocks == num_blocks + 1
        assert value_at(span, 0) == 1
        meet(span)
    trim(world)
    return num_failed


def remap(world: World, victim: int, operation: str, view: bool) -> int:
    """The old mapping and its data stay, on the failing rank and on those that had succeeded."""
    trim(world)
    with contextlib.ExitStack() as stack:
        if operation == "remap at once":
            stack.enter_context(one_step(world))
        span = stack.enter_context(striped(world))
        mark(span)
        held = [span.local] if view else []
        before = span.blocks
        block = span.new_block(0, PAGE)
        count = len(before)

        def change() -> None:
            fence = span.fence()
            if operation in ("remap", "remap at once"):
                span.remap(PAGE, block, after=fence)
            elif operation == "swap":
                span.swap(0, (count - 1) * PAGE, after=fence)
            else:
                moves = [(p.offset_bytes, before[i - 1].block) for i, p in enumerate(before)]
                span.remap_many(moves, after=fence)

        num_remaps = span.stats().num_remaps

        def check() -> None:
            if span.stats().num_remaps == num_remaps:
                assert span.blocks == before
                assert [value_at(span, page) for page in range(count)] == list(range(1, count + 1))
                for local in held:
                    own = [page for page in range(count) if page % world.world_size == world.rank]
                    assert local.view(-1, PAGE)[:, 9].tolist() == [page + 1 for page in own]
                raw(span)[world.rank * PAGE] = world.rank + 1  # still writable
            meet(span)

        num_failed = each_call(world, victim, change, check)
        assert span.blocks != before
        meet(span)
        held.clear()
    trim(world)
    return num_failed


def lost_mapping(world: World, victim: int, operation: str, view: bool) -> int:
    """Where not even the undo works, the span says so on that rank and can only be closed."""
    with contextlib.ExitStack() as stack:
        if operation == "remap at once":
            stack.enter_context(one_step(world))
        for nth in itertools.count(1):
            if not _lose_mapping(world, victim, operation, view, nth):
                return nth - 1
    raise AssertionError("unreachable")


def _lose_mapping(world: World, victim: int, operation: str, view: bool, nth: int) -> bool:
    """Let the nth driver call fail, and all behind it; say whether there were so many."""
    trim(world)
    span = striped(world)
    mark(span)
    local = span.local if view else None
    del local
    change, other = (
        (span.swap, PAGE) if operation == "swap" else (span.remap, span.new_block(0, PAGE))
    )
    with FaultyDriver(world.driver) as watch:
        if world.rank == victim:
            watch.fail(nth, count=100)
        error = failure(change, 0, other, after=span.fence())
        fired = any(gather(world, watch.num_failed))
        if fired:
            check_all_raised(world, victim, error)
        else:
            assert error is None, error
    if fired:
        again = failure(span.swap, 0, PAGE, after=SteadyFence(span))
        if world.rank == victim:
            assert isinstance(again, ClosedError), again
            assert "lost a mapping in a failed remap" in str(again)
            assert isinstance(failure(getattr, span, "gathered"), ClosedError)
        else:
            assert isinstance(again, PeerError), again
            assert again.ranks == (victim,)
            assert "lost a mapping" in str(again), "told at once, not at the deadline"
            assert [value_at(span, page) for page in (0, 1)] == [1, 2], "the others are as before"
    world.control.barrier()
    span.close()
    assert span.is_closed
    return fired


class SteadyFence:
    def __init__(self, span: Span) -> None:
        self.of = span._streams

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing uses the span."""


def close(world: World, victim: int) -> int:
    """All that can be given back is; all ranks are told; a block somebody kept is not reused."""
    for nth in itertools.count(1):
        trim(world)
        with FaultyDriver(world.driver) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of what the driver does not take
            span = Span.allocate(world, (2 * world.world_size, PAGE), torch.uint8, layout="striped")
            fill(span)
            local = span.local
            meet(span)
            del local
            pool = span._parts.pool  # type: ignore[union-attr]
            if world.rank == victim:
                watch.fail(nth)
            error = failure(span.close)
            fired = any(gather(world, watch.num_failed))
            assert span.is_closed
            span.close()
            if fired:
                check_all_raised(world, victim, error)
                assert pool.stats().held_nbytes == 0, "invariant 6"
                # What the driver refused to take back is all that is left, and only there.
                left = watch.give_back()
                assert bool(left) == bool(watch.num_failed), watch.held
            else:
                assert error is None, error
            del span
            gc.collect()
        if not fired:
            return nth - 1
        with Span.allocate(world, (world.world_size, 64), torch.uint8) as after:
            fill(after)
            assert holds(after)
            meet(after)
    raise AssertionError("unreachable")


def mismatch(world: World) -> None:
    """Different wishes: all ranks are told all of them, and nothing was done (invariant 3)."""
    trim(world)
    odd = world.rank == world.world_size - 1
    size = world.world_size
    plain: dict[str, Any] = {"shape": (size, 64), "dtype": torch.uint8}
    for change in (
        {"dtype": torch.int8},
        {"shape": (64, size)},
        {"layout": "striped"},
        {"rows": (size,) + (0,) * (size - 1)},
        {"stripe_nbytes": 2 * PAGE},
        {"layout": Layout.blocked([64] * size, page_nbytes=PAGE)},
    ):
        asked = {**plain, **change} if odd else plain
        with FaultyDriver(world.driver) as watch:
            error = failure(Span.allocate, world, **asked)
            assert isinstance(error, CollectiveMismatch), error
            assert error.operation == "Span.allocate"
            assert sorted(error.requests) == list(range(size))
            assert error.requests[size - 1] != error.requests[0]
            assert watch.held == NOTHING, watch.calls
    # A request that is wrong besides is a mismatch first: the others asked for something else.
    asked = {**plain, "shape": (-1,)} if odd else plain
    assert isinstance(failure(Span.allocate, world, **asked), CollectiveMismatch)

    span = Span.allocate(world, **plain)
    fill(span)
    another = Span.allocate(world, **plain)
    wrong_order: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (span.close, another.close),
        (span.close, lambda: Span.allocate(world, **plain)),
        (lambda: span.new_block(0, PAGE), lambda: span.new_block(0, 2 * PAGE)),
        (lambda: span.new_block(0, PAGE), lambda: another.new_block(0, PAGE)),
        (lambda: span.new_block(0, PAGE), lambda: Span.allocate(world, **plain)),
    ]
    for first, second in wrong_order:
        error = failure(second if odd else first)
        assert isinstance(error, CollectiveMismatch), error
        assert sorted(error.requests) == list(range(size))
        assert not span.is_closed
        assert not another.is_closed
    assert holds(span)
    late = Span.allocate(world, **plain)
    meet(span)
    for each in (late, span, another):
        each.close()


def out_of_memory(world: World, victim: int) -> None:
    """One rank has no memory left: it says how much it wanted, the others which rank it was."""
    trim(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, hard))
    try:
        with FaultyDriver(world.driver) as watch:
            error = failure(lambda: Span.allocate(world, (world.world_size, 8 * PAGE), torch.uint8))
            assert watch.held == NOTHING
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if world.rank == victim:
        assert isinstance(error, OutOfMemoryError), error
        assert error.requested_nbytes == 8 * PAGE
    else:
        assert isinstance(error, PeerError), error
        assert error.ranks == (victim,)
        assert "OutOfMemoryError" in str(error)
        assert "more ranks" in str(error)
    with Span.allocate(world, (world.world_size, 8 * PAGE), torch.uint8) as span:
        fill(span)
        assert holds(span)
        meet(span)
    trim(world)


@contextlib.contextmanager
def few_descriptors(room: int) -> Iterator[None]:
    """So many may be opened besides those that are open."""
    before = set(open_descriptors())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # no free numbers below the limit
    fillers = [os.dup(0) for number in range(max(before)) if number not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 1 + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in fillers:
            os.close(number)


def no_sockets(world: World, victim: int, room: int) -> str:
    """One rank has few descriptors when the ranks are to be connected. Return what it said."""
    with few_descriptors(room) if world.rank == victim else contextlib.nullcontext():
        error = failure(lambda: Span.allocate(world, (world.world_size, 64), torch.uint8))
    world.control.barrier()
    assert glob.glob(f"{tempfile.gettempdir()}/tpspan-*") == [], "the folder of the sockets"
    if world.rank != victim:
        assert isinstance(error, PeerError), error
        assert error.ranks == (victim,), error
        return ""
    assert isinstance(error, DriverError), error
    return f"{error.call} {error.code_name}"


def full_table(world: World, victim: int, num_blocks: int, num_others: int, room: int) -> str:
    """One rank has few descriptors left. Return what it said, or nothing if it was enough."""
    trim(world)
    sizes = [num_others * PAGE] * world.world_size
    sizes[victim] = num_blocks * PAGE
    layout = Layout.blocked(sizes, page_nbytes=PAGE, max_run_nbytes=PAGE)
    before = set(open_descriptors())
    span = None
    with (
        few_descriptors(room) if world.rank == victim else contextlib.nullcontext(),
        FaultyDriver(world.driver) as watch,
    ):
        try:
            span = Span.allocate_bytes(world, layout, timeout_s=20)
            error: BaseException | None = None
        except Exception as caught:
            error = caught.with_traceback(None)
            assert watch.held == NOTHING, watch.held
    if error is None:
        assert span is not None
        span.close()
        trim(world)
    elif world.rank == victim:
        assert isinstance(error, DriverError), error
        assert error.code_name == "EMFILE" or world.backend == "cuda", error
        assert "ulimit -n" in str(error), error
    else:
        assert isinstance(error, PeerError), error
        assert error.ranks == (victim,), error
    del span
    assert set(open_descriptors()) == before
    with Span.allocate(world, (world.world_size, 64), torch.uint8) as after:
        fill(after)
        assert holds(after)
        meet(after)
    trim(world)
    return "" if error is None else f"{getattr(error, 'call', '')}"


def first_deadline(world: World) -> None:
    """A deadline of the first call of a world holds for what that call makes for the world."""
    inner = world.subset(range(world.world_size))
    inner.timeout_s = 60.0
    if world.rank:
        start = time.monotonic()
        error = failure(Span.allocate, inner, (1,), torch.uint8, timeout_s=0.5)
        assert isinstance(error, PeerError) and error.ranks == (0,), error
        assert time.monotonic() - start < 20
    world.control.barrier(timeout_s=60.0)
    inner.close()


def forked_close(world: World) -> None:
    """A child is refused, and what it closes stays open in its parent."""
    inner = world.subset(range(world.world_size))
    if world.rank == 1:
        child = os.fork()
        if not child:
            refused = isinstance(failure(lambda: inner.control), ClosedError)
            inner.close()
            os._exit(0 if refused and not inner.is_closed else 1)
        assert os.waitpid(child, 0)[1] == 0
    inner.control.barrier()
    Span.allocate(inner, (1,), torch.uint8).close()
    inner.close()


class Interrupted(Exception):
    """What a signal handler raises, as Ctrl-C does."""


@contextlib.contextmanager
def interruption(
    after_s: float, act: Callable[[], object] = lambda: None, *, raises: bool = True
) -> Iterator[None]:
    """Let a signal handler do something in the main thread soon, and raise ``Interrupted``."""

    def handle(number: int, frame: object) -> None:
        act()
        if raises:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(world: World) -> None:
    """A rank is interrupted while it waits for the others in a call, and goes on to another one."""
    victim = world.world_size - 1
    with short_lived(world, 5.0) as inner:
        span = Span.allocate(inner, (8, 8), torch.float32)
        if world.rank == victim:
            with interruption(0.2):
                assert isinstance(failure(span.close), Interrupted)
        world.control.barrier()
        if world.rank != victim:
            error = failure(span.close)
            assert isinstance(error, PeerError) and error.ranks == (victim,), error
        assert not span.is_closed
        for _ in range(2):
            start = time.monotonic()
            error = failure(lambda: Span.allocate(inner, (4,), torch.uint8))
            assert isinstance(error, PeerError) and error.ranks == (victim,), error
            assert time.monotonic() - start < 5
        span.close(force=True)


def out_of_step(world: World) -> None:
    """A rank begins a call while the others are in the middle of one."""
    victim = world.world_size - 1
    with short_lived(world, 5.0) as inner:
        board = Board.of(inner)
        board.begin("first", 1, lambda: None)
        if world.rank == victim:
            error = failure(lambda: board.begin("second", 2, lambda: None))
        else:
            error = failure(lambda: board.together("the middle of it", lambda: None))
        assert isinstance(error, CollectiveMismatch), error
        assert error.requests[victim] == "second (begun)"
        assert error.requests[0] == "the middle of it (a later step)"
        error = failure(board.barrier)
        others = tuple(range(victim)) if world.rank == victim else (victim,)
        assert isinstance(error, PeerError) and error.ranks == others, error


def interrupted_barrier(world: World) -> None:
    """A rank that is interrupted in a barrier of a span does not go on as if it were in step."""
    victim = world.world_size - 1
    with short_lived(world, 1.0) as inner:
        span = Span.allocate(inner, (8, 8), torch.float32)
        if world.rank == victim:
            with interruption(0.2):
                assert isinstance(failure(span.barrier), Interrupted)
            error = failure(span.barrier)
            assert isinstance(error, PeerError) and error.ranks == (victim,), error
        world.control.barrier()
        if world.rank != victim:
            span.barrier()  # the victim had come to this one
            error = failure(span.barrier)
            assert isinstance(error, PeerError) and victim in error.ranks, error
        world.control.barrier()
        span.close(force=True)


def closed_by_a_handler(world: World) -> None:
    """A signal handler closes the world of the call that it comes into; it may raise or return."""
    for raises in (True, False):
        for name in ("host_barrier", "barrier"):
            with short_lived(world, 5.0) as inner:
                span = Span.allocate(inner, (8, 8), torch.float32)
                if world.rank == 0:
                    with interruption(0.2, inner.close, raises=raises):
                        error = failure(getattr(span, name))
                    assert isinstance(error, Interrupted if raises else ClosedError), error
                world.control.barrier()
                span.close(force=True)
