"""Channels that are misused, or whose ranks or driver calls fail."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bodies.common import failure, finish, trim
from bodies.failures import each_call
from bodies.handoff import MIB, SHAPES, give, side_of, take
from drivers import open_descriptors
from faulty import NOTHING, FaultyDriver
from tpspan import Handoff
from tpspan.errors import (
    ClosedError,
    CollectiveMismatch,
    DriverError,
    InUseError,
    PeerError,
)
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, BlockPool
from tpspan.parallel.link import Link
from tpspan.spans.allocation import pool_of


def late(world: World, side: int) -> None:
    """A live peer that does not come is named at the deadline; afterwards all goes on."""
    with Handoff(world, 0, 1, MIB, timeout_s=0.3) as handoff:
        if world.rank == 0:
            for _ in range(2):
                handoff.produce().release()
        if world.rank == side:
            if side == 1:
                for _ in range(2):
                    handoff.consume().release()
            start = time.monotonic()
            error = failure(handoff.acquire)
            assert isinstance(error, PeerError) and error.ranks == (1 - side,), error
            assert 0.3 <= time.monotonic() - start < 2
            assert ("no block is free" if side == 0 else "handed anything over") in str(error)
        world.control.barrier()
        steps: list[Callable[[], Any]] = []
        if side == 0:
            steps = [handoff.acquire] * (1 if world.rank == 0 else 3)
        else:
            steps = [handoff.acquire]
        for step in steps:
            step().release()
        world.control.barrier()


def killed(world: World, victim: int, phase: str, mode: str) -> float:
    """The survivor is told who died (invariant 9), and can give everything back. Seconds it took.

    What was handed over before stays readable (invariant 11).
    """
    survivor, spec = 1 - victim, [((1000,), torch.int32)]
    inner = world.subset(range(2))
    inner.timeout_s = 3.0
    Handoff(inner, 0, 1, MIB, mode=mode).close()  # what is made once is there
    _pool_of(inner).trim()
    descriptors = len(list(open_descriptors()))
    with FaultyDriver(world.driver) as watch:
        handoff = Handoff(inner, 0, 1, MIB, mode=mode)

        def turn(number: int) -> None:
            if world.rank == 0:
                give(handoff, number, spec)
            else:
                take(handoff, number, spec, by_header=False)

        for number in range(3):
            turn(number)
        finish(world)
        if phase == "holding" and victim == 1 and world.rank == 0:
            turn(3)
        if world.rank == victim:
            if phase == "holding":
                handoff.acquire()
            elif phase == "finished":
                turn(3)
            finish(world)
        if phase == "finished" and victim == 1 and world.rank == 0:
            turn(3)
        world.control.barrier()
        if world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        assert world.rank == survivor
        if phase == "finished" and victim == 0:
            turn(3)
        start = time.monotonic()
        steps: dict[str, Callable[[], Any]] = {
            "making": lambda: Handoff(inner, 0, 1, MIB, mode=mode),
            "closing": handoff.close,
        }
        step = steps.get(phase, lambda: handoff.acquire().release())
        error = None
        while error is None:
            error = failure(step)
            assert time.monotonic() - start < inner.timeout_s + 5, "the deadline has passed"
            time.sleep(0.01)
        known_s = time.monotonic() - start
        assert isinstance(error, PeerError), error
        assert error.ranks == (victim,), error
        handoff.close(force=True)
        gc.collect()
        assert watch.held == NOTHING, (watch.held, watch.calls)
        assert len(list(open_descriptors())) == descriptors
    inner.close()
    return known_s


def each_driver_call(world: World, victim: int, mode: str) -> int:
    """Whatever call fails on one rank, all fail and undo everything (invariant 4)."""
    trim(world)
    link_pool = _pool_of(world)

    def make() -> Callable[[], None]:
        return Handoff(world, 0, 1, MIB, mode=mode).close

    def check() -> None:
        with Handoff(world, 0, 1, MIB, mode=mode) as handoff:
            if world.rank == 0:
                give(handoff, 0, SHAPES[0])
            else:
                take(handoff, 0, SHAPES[0], by_header=True)
            finish(world)
        world.control.barrier()
        link_pool.trim()

    check()
    return each_call(world, victim, make, check)


def remap_fails(world: World, victim: int) -> None:
    """A remap that the driver refuses is raised by the next call, and the old one stays."""
    with Handoff(world, 0, 1, MIB, mode="remap") as handoff:
        with FaultyDriver(world.driver) as watch:
            slot = handoff.acquire()
            if world.rank == victim:
                watch.fail(1)
            slot.release()
            if world.rank == victim:
                end = time.monotonic() + 5
                error = None
                while error is None and time.monotonic() < end:
                    error = failure(handoff.check)
                    time.sleep(0.001)
                assert isinstance(error, DriverError) and error.code_name == "INJECTED", error
                assert watch.num_failed == 1
                assert isinstance(failure(handoff.acquire), DriverError)
                assert not side_of(handoff, producer=victim == 0).table.is_broken
        finish(world)
        world.control.barrier()


def _pool_of(world: World) -> BlockPool:
    return Link.of(world, (0, 1)).world.resource("pool", pool_of)


def misused(world: World) -> None:
    """Arguments that do not fit are refused, and say why."""
    others = 1 - world.rank

    def refused(match: str, *args: Any, **kwargs: Any) -> None:
        error = failure(Handoff, world, *args, **kwargs)
        assert error is not None and match in str(error), (match, error)

    refused("no rank 7", 0, 7, MIB)
    refused("one consumer, or several different", 0, (), MIB)
    refused("one consumer, or several different", 0, (1, 1), MIB)
    refused("to itself and to others", 0, (0, 1), MIB)
    refused("neither src", others, others, MIB)
    refused("devices are for one rank", 0, 1, MIB, devices=(world.device, world.device))
    refused("at least one byte", 0, 1, 0)
    refused("mode='map' is none of auto", 0, 1, MIB, mode="map")
    refused("has no fixed address", 0, 1, MIB, mode="window", fixed_address=True)
    refused("depth=0", 0, 1, MIB, depth=0)
    refused("depth=1: in remap mode 2", 0, 1, MIB, depth=1, mode="remap")
    refused("needs torch.distributed", 0, 1, MIB, mode="send")
    with Handoff(world, 0, 1, PAGE_NBYTES) as handoff:
        wrong = handoff.consume if world.rank == 0 else handoff.produce
        assert isinstance(failure(wrong), ValueError)
        assert "no address stays" in str(failure(handoff.fixed_tensor, (1,), torch.int8))
        with handoff.acquire() as slot:
            assert "do not fit into a block" in str(
                failure(slot.tensor, (PAGE_NBYTES + 1,), torch.int8)
            )
            assert isinstance(failure(slot.tensor, (1,), "float32"), TypeError)
            assert isinstance(failure(slot.tensor, (-1,), torch.int8), ValueError)
            if world.rank == 0:
                slot.tensor((5,), torch.int8)
                assert "knows what it packed" in str(failure(slot.tensors))
            else:
                assert len(slot.tensors()) == 1  # on CUDA this host may be ahead of the producer's
                assert "the producer packed: (5,)" in str(failure(slot.tensor, (6,), torch.int8))
    assert handoff.is_closed
    assert isinstance(failure(handoff.acquire), ClosedError)
    assert isinstance(failure(handoff.stats), ClosedError)
    handoff.close()


def disagreed(world: World) -> None:
    """Ranks that ask for different channels make none (invariant 3)."""
    kwargs: list[dict[str, Any]] = [{"depth": 2}, {"depth": 3}]
    error = failure(Handoff, world, 0, 1, MIB, **kwargs[world.rank])
    assert isinstance(error, CollectiveMismatch), error
    assert set(error.requests) == {0, 1}
    with Handoff(world, 0, 1, MIB) as handoff:
        if world.rank == 0:
            handoff.produce().release()
        else:
            handoff.consume().release()


def still_used(world: World) -> None:
    """It is not closed under a living tensor or a held slot; by force, it is."""
    handoff = Handoff(world, 0, 1, MIB)

    def refused(match: str) -> None:
        error = failure(handoff.close)
        assert match in str(error), error
        if world.rank == 0:
            assert isinstance(error, InUseError), error
        else:
            assert isinstance(error, PeerError) and error.ranks == (0,), error
        assert not handoff.is_closed

    if world.rank == 0:
        slot = handoff.produce()
        tensor = slot.tensor((4,), torch.int8)
        refused("slots of turns (0,)")
        slot.release()
        refused("1 tensors of")
        del tensor
    else:
        refused("slots of turns (0,)")
        refused("1 tensors of")
        handoff.consume().release()
    handoff.close()
    assert handoff.is_closed
    forced = Handoff(world, 0, 1, MIB, mode="remap")
    if world.rank == 0:
        slot = forced.produce()
        tensor = slot.tensor((4,), torch.int8)
        forced.close(force=True)
        assert isinstance(failure(slot.release), ClosedError)
        del tensor
    else:
        forced.close(force=True)
    world.control.barrier()


def closed_with_the_world(world: World) -> None:
    """A world takes its channels along; one that is forgotten says so."""
    inner = world.subset(range(world.world_size))
    kept = Handoff(inner, 0, 1, MIB, mode="remap")
    kept.acquire().release()
    world.control.barrier()
    inner.close()
    assert kept.is_closed
    world.control.barrier()
    inner = world.subset(range(world.world_size))
    lost = Handoff(inner, 0, 1, MIB)
    with pytest.warns(ResourceWarning, match="unclosed <Handoff 0 -> 1"):
        transport = lost._transport
        assert transport is not None
        del lost
        gc.collect()
    transport.close(force=True, forget=lambda: None, name="lost")
    world.control.barrier()
    inner.close()
