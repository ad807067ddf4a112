"""Ranks that do not come, and ranks that die."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

import torch

from bodies.common import failure, fill, finish, gather, holds, meet, pattern, raw, short_lived
from bodies.remap import mark, striped, value_at
from tpspan.errors import ClosedError, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.spans import Span

PAGE = PAGE_NBYTES
TIMEOUT_S = 1.0


def absent(world: World, victim: int, operation: str) -> None:
    """One rank never calls: the others are told which, soon after the deadline (invariant 9)."""
    with short_lived(world, TIMEOUT_S) as inner:
        span = striped(inner)
        mark(span)
        block = span.new_block(0, PAGE)
        steps: dict[str, Callable[[], object]] = {
            "allocate": lambda: Span.allocate(inner, (1,), torch.uint8),
            "remap": lambda: span.remap(PAGE, block, after=span.fence()),
            "new_block": lambda: span.new_block(0, PAGE),
            "close": span.close,
        }
        if world.backend == "host":  # on CUDA the stream waits, not the host
            steps["barrier"] = span.barrier
        step = steps[operation]
        if world.rank != victim:
            start = time.monotonic()
            error = failure(step)
            assert isinstance(error, PeerError), error
            assert error.ranks == (victim,), error
            assert "did not come within 1 s" in str(error)
            assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 2
            assert not span.is_closed
            assert [value_at(span, page) for page in (0, 1)] == [1, 2], "nothing was changed"
            again = time.monotonic()
            assert isinstance(failure(step), PeerError)
            assert time.monotonic() - again < TIMEOUT_S / 2, "they are out of step, and know it"
        world.control.barrier()
        span.close(force=True)


def short_timeout(world: World, victim: int) -> None:
    """The deadline of one call, where the world's is much later."""
    with short_lived(world, 30.0) as inner:
        if world.rank != victim:
            start = time.monotonic()
            error = failure(lambda: Span.allocate(inner, (1,), torch.uint8, timeout_s=0.5))
            assert isinstance(error, PeerError), error
            assert error.ranks == (victim,)
            assert 0.5 <= time.monotonic() - start < 2.5
        world.control.barrier()


def late(world: World) -> None:
    """Who comes after the others gave up fails in the same call, and does not go on alone."""
    with short_lived(world, 30.0) as inner:
        span = Span.allocate(inner, (world.world_size, 4), torch.uint8)
        if world.rank == 1:
            time.sleep(1.0)
        error = failure(lambda: span.host_barrier(timeout_s=0.4 if world.rank != 1 else 10.0))
        assert isinstance(error, PeerError), error
        if world.rank == 1:
            assert "gave up" in str(error)
        else:
            assert error.ranks == (1,)
        span.close(force=True)
        world.control.barrier()


def forked(world: World) -> None:
    """A forked child is refused, whatever it calls, and the rank goes on as if nothing had been."""
    with Span.allocate(world, (world.world_size, 4), torch.uint8) as span:
        child = os.fork()
        if child == 0:
            wrong = 0
            for call in (span.barrier, span.host_barrier, span.close):
                try:
                    call()
                    wrong += 1
                except ClosedError as error:
                    wrong += "forked" not in str(error)
            os._exit(wrong)
        assert os.waitpid(child, 0)[1] == 0
        fill(span)
        assert holds(span)
        meet(span)


def killed(world: World, victim: int) -> dict[str, float]:
    """Survivors find its memory bit for bit (invariant 11). Return how soon they knew."""
    shape = (8 * world.world_size, PAGE // 4)
    span = Span.allocate(world, shape, torch.uint8)
    stripes = Span.allocate(world, shape, torch.uint8, layout="striped")
    fill(span, 3)
    fill(stripes, 4)
    local = stripes.local.clone()
    finish(world)
    world.control.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = failure(lambda: Span.allocate(world, (1,), torch.uint8))
    assert isinstance(error, PeerError), error
    assert error.ranks == (victim,), error
    assert "left the world, or ended" in str(error)
    known_s = time.monotonic() - start
    if world.backend == "host":
        error = failure(span.barrier)
        assert isinstance(error, PeerError), error
        assert victim in error.ranks
    barrier_s = time.monotonic() - start
    assert isinstance(failure(span.close), PeerError)
    assert isinstance(failure(lambda: span.swap(0, PAGE, after=span.fence())), PeerError)
    assert not span.is_closed
    assert raw(span).cpu().equal(pattern(span.nbytes, 3)), "its shard is still there, bit for bit"
    assert raw(stripes).cpu().equal(pattern(stripes.nbytes, 4))
    assert stripes.local.equal(local)
    out = torch.empty(shape, dtype=torch.uint8, device=world.device)
    span.copy_to(out)
    finish(world)
    assert out.cpu().view(-1).equal(pattern(span.nbytes, 3))
    span.close(force=True)
    stripes.close(force=True)
    return {"known_s": known_s, "barrier_s": barrier_s}


def many_blocks(world: World, num_blocks: int, limit: int) -> float:
    """That many blocks a rank under a limit of open files; returns the seconds it took."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        shape = (num_blocks * world.world_size, PAGE)
        start = time.monotonic()
        with Span.allocate(world, shape, torch.uint8, layout="striped") as span:
            allocated_s = time.monotonic() - start
            assert len(span.blocks) == num_blocks * world.world_size
            first = raw(span)[:: 16 * PAGE]  # a byte in every 16th block
            own = [span.layout.owner_of(at * 16 * PAGE) == world.rank for at in range(len(first))]
            mask = torch.tensor(own, device=world.device)
            values = torch.arange(len(first), device=world.device) % 251
            for index in mask.nonzero().flatten().tolist():
                first[index] = int(values[index])
            meet(span)
            assert first.equal(values.to(torch.uint8))
            meet(span)
            del first
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return allocated_s


def huge(world: World, nbytes: int) -> None:
    """A span of which only a few pages are ever touched."""
    with Span.allocate(world, (nbytes,), torch.uint8) as span:
        whole = raw(span)
        step = nbytes // 97
        for index in range(97):
            if span.layout.owner_of(index * step) == world.rank:
                whole[index * step] = index + 1
        whole_last = world.rank == world.world_size - 1
        if whole_last:
            whole[-1] = 200
        meet(span)
        assert [int(whole[index * step]) for index in range(97)] == list(range(1, 98))
        assert int(whole[-1]) == 200
        meet(span)
        del whole


def agree_after(world: World) -> bool:
    """Whether the ranks still work together."""
    with Span.allocate(world, (world.world_size, 16), torch.uint8) as span:
        fill(span)
        good = holds(span)
        meet(span)
    return all(gather(world, good))
