"""Channels between ranks: what is handed over arrives, unharmed in order; nothing is copied."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bodies.common import failure, finish, gather, trim
from bodies.failures import each_call
from bodies.process_groups import process_group
from bodies.streams import LONG_CYCLES
from drivers import is_readable, is_writable, open_descriptors
from faulty import NOTHING, FaultyDriver
from tpspan import Handoff
from tpspan.errors import (
    CaptureError,
    ClosedError,
    CollectiveMismatch,
    DriverError,
    InUseError,
    PeerError,
)
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, BlockPool
from tpspan.parallel.handoff_mapped import MappedTransport
from tpspan.parallel.link import Link
from tpspan.parallel.side import Side
from tpspan.spans.allocation import pool_of

MIB = 1 << 20
SHAPES: list[list[tuple[tuple[int, ...], torch.dtype]]] = [
    [((3, 5), torch.float32)],
    [((1000, 257), torch.bfloat16), ((7,), torch.int64), ((), torch.float64)],
    [((0, 4), torch.int8), ((129,), torch.uint8), ((2, 3, 5, 7), torch.float16)],
    [],
    [((4, 4), torch.bool), ((MIB // 4,), torch.float32)],
]


def side_of(handoff: Handoff, *, producer: bool) -> Side:
    """The inside of one end."""
    transport = handoff._transport
    assert isinstance(transport, MappedTransport)
    return transport._side(producer)


def values(shape: tuple[int, ...], dtype: torch.dtype, turn: int, index: int) -> torch.Tensor:
    """What belongs in a tensor of a turn."""
    numel = int(torch.tensor(shape).prod()) if shape else 1
    numbers = (torch.arange(numel) + 13 * turn + 5 * index) % 97
    return numbers.to(dtype).reshape(shape)


def give(handoff: Handoff, turn: int, specs: Any) -> None:
    with handoff.produce() as slot:
        assert slot.turn == turn
        slot.wait_until_mapped()  # for what is copied in
        for index, (shape, dtype) in enumerate(specs):
            slot.tensor(shape, dtype).copy_(values(shape, dtype, turn, index))


def take(handoff: Handoff, turn: int, specs: Any, *, by_header: bool) -> None:
    with handoff.consume() as slot:
        assert slot.turn == turn
        if by_header:
            found = slot.tensors()
            assert len(found) == len(specs)
        else:
            found = tuple(slot.tensor(shape, dtype) for shape, dtype in specs)
        slot.wait_until_mapped()
        for index, ((shape, dtype), tensor) in enumerate(zip(specs, found, strict=True)):
            assert tensor.shape == shape and tensor.dtype == dtype
            assert tensor.data_ptr() % min(256, max(1, dtype.itemsize)) == 0
            right = values(shape, dtype, turn, index)
            assert tensor.cpu().equal(right), (turn, index, tensor, right)
        del found


def varied(world: World, mode: str, depth: int, num: int = 12) -> None:
    """Shapes and dtypes change from turn to turn; several channels, also beyond neighbours."""
    pairs = [(a, b) for a in range(world.world_size) for b in range(world.world_size) if a != b]
    pairs = [pair for pair in pairs if abs(pair[0] - pair[1]) in (1, world.world_size - 1)]
    pairs.sort(key=lambda pair: (min(pair), max(pair), pair))
    mine = [pair for pair in pairs if world.rank in pair]
    channels = [Handoff(world, a, b, 2 * MIB, mode=mode, depth=depth) for a, b in mine]
    for turn in range(num):
        specs = SHAPES[turn % len(SHAPES)]
        for (source, _), channel in zip(mine, channels, strict=True):
            if world.rank == source:
                give(channel, turn, specs)
        for (source, _), channel in zip(mine, channels, strict=True):
            if world.rank != source:
                take(channel, turn, specs, by_header=turn % 3 == 0)
    finish(world)
    for channel in channels:
        stats = channel.stats()
        assert (stats.mode, stats.depth, stats.num_handovers) == (mode, depth, num)
        assert stats.copied_nbytes == 0, "nothing is copied"
        channel.close()
        assert stats.num_remaps in ((num - 1, num) if mode == "remap" else (0,))


def held(world: World) -> None:
    """Several slots at once, released in any order."""
    with Handoff(world, 0, 1, MIB, depth=3) as handoff:
        for start in (0, 3):
            slots = [handoff.acquire() for _ in range(3)]
            error = failure(handoff.acquire)
            assert isinstance(error, InUseError), error
            assert "holds 3 of at most 3 slots" in str(error)
            for slot in slots:
                tensor = slot.tensor((8,), torch.int32)
                if world.rank == 0:
                    tensor.fill_(slot.turn)
                else:
                    assert tensor.tolist() == [slot.turn] * 8
                del tensor
            assert [slot.turn for slot in slots] == [start, start + 1, start + 2]
            order = [1, 0, 2] if world.rank == 0 else [2, 1, 0]
            for index in order:
                slots[index].release()
                slots[index].release()
            assert isinstance(failure(slots[0].tensor, (1,), torch.int8), ClosedError)
            del slots


def small_blocks(world: World) -> None:
    """Blocks lie side by side in as few pages as hold them all; remaps take whole ones."""
    with Handoff(world, 0, 1, 5000, depth=200) as handoff:
        stats = handoff.stats()
        assert stats.nbytes == handoff.block_nbytes == 8192
        pages = 200 * 8192 if world.backend == "host" else PAGE_NBYTES
        assert stats.ring_nbytes == pages
        side = side_of(handoff, producer=world.rank == 0)
        assert side.table.reservation.nbytes == PAGE_NBYTES
        slots = [handoff.acquire() for _ in range(200)]
        tensors = [slot.tensor((2048,), torch.int32) for slot in slots]
        gaps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors)}
        assert gaps == {8192}
        for turn, tensor in enumerate(tensors):
            if world.rank == 0:
                tensor.fill_(turn)
            else:
                assert bool((tensor == turn).all())
        assert "do not fit" in str(failure(slots[0].tensor, (1,), torch.int8))
        for slot in slots:
            slot.release()
        del tensors, tensor, slot, slots, side
        finish(world)
    with Handoff(world, 0, 1, 5000, mode="remap") as handoff:
        stats = handoff.stats()
        assert (stats.nbytes, stats.ring_nbytes) == (PAGE_NBYTES, 2 * PAGE_NBYTES)


def one_address_one_slot(world: World) -> None:
    with Handoff(world, 0, 1, MIB, mode="remap") as handoff:
        if world.rank == 0:
            slot = handoff.produce()
            assert "holds 1 of at most 1" in str(failure(handoff.produce))
            slot.release()
            handoff.produce().release()
        else:
            handoff.consume().release()
            handoff.consume().release()


def slow_consumer(world: World, mode: str, guarded: bool) -> int:
    """The producer runs ahead as far as it may; how many turns arrived damaged (invariant 6)."""
    num, numel, damaged = 6, 65536, 0
    handoff = Handoff(world, 0, 1, numel * 4, mode=mode)
    if world.rank == 0:
        if not guarded:  # it waits only when it has written
            turns = side_of(handoff, producer=True).turns
            wait, hand_over = turns.wait, turns.finish

            def finish_late(turn: int, stream: int) -> None:
                wait(turn, stream, 10.0)
                hand_over(turn, stream)

            turns.wait = lambda *_: None  # type: ignore[method-assign]
            turns.finish = finish_late  # type: ignore[method-assign]
        world.control.barrier()
        for turn in range(num):
            with handoff.produce() as slot:
                slot.tensor((numel,), torch.int32).fill_(turn)
        finish(world)
        world.control.barrier()
    else:
        world.control.barrier()
        for turn in range(num):
            with handoff.consume() as slot:
                time.sleep(0.05)
                seen = slot.tensor((numel,), torch.int32)
                damaged += not bool((seen == turn).all())
                del seen
        world.control.barrier()
    handoff.close()
    return damaged


def fixed(world: World, num: int) -> dict[str, int]:
    """One address on each side for ever, and what is read there is what was written."""
    with Handoff(world, 0, 1, 4096, fixed_address=True) as handoff:
        assert handoff.mode == "remap"
        whole = handoff.fixed_tensor((1024,), torch.int32)
        address, wrong = whole.data_ptr(), 0
        for turn in range(num):
            with handoff.acquire() as slot:
                tensor = slot.tensor((1024,), torch.int32)
                assert tensor.data_ptr() == address == whole.data_ptr()
                if world.rank == 0:
                    tensor.fill_(turn)
                else:
                    wrong += int((whole != turn).any())
                del tensor
        finish(world)
        del whole
        stats = handoff.stats()
    return {"wrong": wrong, "num": stats.num_handovers, "copied": stats.copied_nbytes}


def ended_by_an_exception(world: World, mode: str) -> None:
    """What a producer leaves by an exception is not handed over; the turn begins anew."""
    with Handoff(world, 0, 1, MIB, mode=mode) as handoff:
        if world.rank == 0:
            for turn in range(4):
                with pytest.raises(KeyError), handoff.produce() as slot:
                    slot.tensor((4,), torch.int32).fill_(-1)
                    raise KeyError
                give(handoff, turn, [((4,), torch.int32)])
        else:
            take(handoff, 0, [((4,), torch.int32)], by_header=False)
            with pytest.raises(KeyError), handoff.consume():
                raise KeyError
            for turn in (2, 3):
                take(handoff, turn, [((4,), torch.int32)], by_header=True)


def without_waiting(world: World) -> None:
    """The ``try_`` forms say None instead of waiting."""
    with Handoff(world, 0, 1, MIB) as handoff:
        if world.rank == 0:
            world.control.barrier()
            for _ in range(2):
                slot = handoff.try_produce()
                assert slot is not None
                slot.release()
            assert handoff.try_produce() is None
            world.control.barrier()
            world.control.barrier()
            slot = handoff.try_produce()
            assert slot is not None and slot.turn == 2
            slot.release()
        else:
            assert handoff.try_consume() is None
            world.control.barrier()
            world.control.barrier()
            slot = handoff.try_consume()
            assert slot is not None and slot.tensors() == ()
            slot.release()
            world.control.barrier()
            for _ in range(2):
                handoff.consume().release()
        world.control.barrier()


def fan_out(world: World, mode: str) -> None:
    """One block, read by all the others; free when the slowest of them has released it."""
    consumers = range(1, world.world_size)
    with Handoff(world, 0, consumers, MIB, mode=mode) as handoff:
        for turn in range(8):
            with handoff.acquire() as slot:
                tensor = slot.tensor((1000,), torch.int32)
                if world.rank == 0:
                    tensor.fill_(turn)
                else:
                    if world.rank == 1 + turn % len(consumers):
                        time.sleep(0.01)
                    slot.wait_until_mapped()
                    assert tensor.tolist() == [turn] * 1000
                    if world.backend == "host":  # invariant 12: others read it, too
                        assert is_readable(tensor.data_ptr())
                        assert not is_writable(tensor.data_ptr())
                del tensor
        finish(world)


def in_one_process(world: World, mode: str, threads: bool) -> None:
    """The same rank on both sides: by turns, or with a thread for each side."""
    with Handoff(world, 0, 0, 2 * MIB, mode=mode) as handoff:
        assert "both sides" in str(failure(handoff.acquire))
        num = 20
        if not threads:
            for turn in range(num):
                give(handoff, turn, SHAPES[turn % len(SHAPES)])
                take(handoff, turn, SHAPES[turn % len(SHAPES)], by_header=turn % 2 == 0)
        else:
            errors: list[BaseException | None] = []

            def consume() -> None:
                for turn in range(num):
                    specs = SHAPES[turn % len(SHAPES)]
                    errors.append(failure(take, handoff, turn, specs, by_header=True))

            thread = threading.Thread(target=consume)
            thread.start()
            for turn in range(num):
                give(handoff, turn, SHAPES[turn % len(SHAPES)])
            thread.join()
            assert not any(errors), errors
        finish(world)
        assert handoff.stats().num_handovers == 2 * num
        slots = [handoff.produce(timeout_s=5) for _ in range(1 if mode == "remap" else 2)]
        for slot in slots:
            slot.release()
        if mode == "remap":
            handoff.produce().release()
        if world.backend == "host" or mode == "window":
            start = time.monotonic()
            error = failure(handoff.produce, timeout_s=0.2)
            assert isinstance(error, PeerError) and "no block is free" in str(error), error
            assert time.monotonic() - start < 2


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


def by_torch(world: World) -> None:
    """The same interface where only torch.distributed reaches."""
    with (
        process_group(world, "gloo"),
        Handoff(world, 0, tuple(range(1, world.world_size)), 2 * MIB, mode="send") as handoff,
    ):
        sent = 0
        for turn in range(9):
            specs = SHAPES[turn % len(SHAPES)]
            if world.rank == 0:
                with handoff.produce() as slot:
                    for index, (shape, dtype) in enumerate(specs):
                        slot.tensor(shape, dtype).copy_(values(shape, dtype, turn, index))
                    sent += slot.used_nbytes
            else:
                take(handoff, turn, specs, by_header=turn % 2 == 0)
        stats = handoff.stats()
        assert stats.mode == "send" and stats.num_handovers == 9
        copied = gather(world, stats.copied_nbytes)
        if world.rank == 0:
            assert copied == [sent * (world.world_size - 1)] + [sent] * (world.world_size - 1)
        world.control.barrier()


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
                watch.fail(1 if world.backend == "host" else 2)
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


def remap_waits(world: World, guarded: bool) -> list[bool]:
    """Whether a kernel that was running when a slot was released had ended at each unmap."""
    driver, seen = world.driver, []
    handoff = Handoff(world, 0, 1, MIB, mode="remap")
    side = side_of(handoff, producer=world.rank == 0)
    slot = handoff.acquire()
    if world.rank == 0:
        slot.tensor((16,), torch.int32).fill_(5)
    torch.cuda._sleep(LONG_CYCLES)  # touches nothing: without the guard it does not crash
    done = torch.cuda.current_stream().record_event()
    unmap = driver.unmap

    def watched(address: int, nbytes: int) -> None:
        seen.append(done.query())
        unmap(address, nbytes)

    driver.unmap = watched  # type: ignore[method-assign]
    try:
        if not guarded:
            side.streams.fence = lambda: SimpleNamespace(is_done=lambda: True)  # type: ignore
        start = time.monotonic()
        slot.release()
        assert time.monotonic() - start < 0.05, "the launching thread does not wait"
        while not seen and time.monotonic() - start < 10:
            time.sleep(0.001)
    finally:
        del driver.unmap
        if not guarded:
            del side.streams.fence
    del slot
    finish(world)
    world.control.barrier()
    handoff.close(force=True)
    return seen


def during_a_capture(world: World, guarded: bool) -> list[bool]:
    """Slots are refused in a capture, and a remap waits for its end (invariant 7).

    Returns:
        For each unmap whether a capture was going on.
    """
    driver, seen, capturing = world.driver, [], [False]
    handoff = Handoff(world, 0, 1, MIB, mode="remap")
    fixed = handoff.fixed_tensor((16,), torch.int32)
    side = side_of(handoff, producer=world.rank == 0)
    out = torch.zeros(16, dtype=torch.int32, device=world.device)
    unmap = driver.unmap

    def watched(address: int, nbytes: int) -> None:
        seen.append(capturing[0])
        unmap(address, nbytes)

    with handoff.acquire() as slot:
        if world.rank == 0:
            fixed.fill_(1)
    finish(world)
    assert side.lane is not None
    side.lane.drain()
    if not guarded:
        side.lane._refuse_capture = lambda: None
    slot = handoff.acquire()
    stream = torch.cuda.Stream(world.device)
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(LONG_CYCLES)
    driver.unmap = watched  # type: ignore[method-assign]
    try:
        slot.release()  # the remap waits for the kernel; meanwhile a capture begins
        handoff.record_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # torch.cuda.graph would wait
            capturing[0] = True
            if world.rank == 0:
                fixed.add_(1)
            else:
                torch.add(fixed, 0, out=out)
            assert isinstance(failure(handoff.acquire), CaptureError)
            time.sleep(0.6)
            capturing[0] = False
            graph.capture_end()
        start = time.monotonic()
        while not seen and time.monotonic() - start < 10:
            time.sleep(0.001)
    finally:
        del driver.unmap
    finish(world)
    world.control.barrier()
    del fixed, slot, graph
    handoff.close(force=True)
    return seen


def through_a_graph(world: World, num: int) -> int:
    """A graph captured once writes, another reads, whatever is mapped by then; wrong turns."""
    device = world.device
    with Handoff(world, 0, 1, 4 * MIB, mode="remap") as handoff:
        fixed = handoff.fixed_tensor((MIB,), torch.int32)
        number = torch.zeros(1, dtype=torch.int32, device=device)
        wrong = torch.zeros(1, dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        for turn in range(num):
            with handoff.acquire() as slot:
                assert slot.tensor((MIB,), torch.int32).data_ptr() == fixed.data_ptr()
                if turn == 0:
                    stream = torch.cuda.Stream(device)
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        if world.rank == 0:
                            fixed.copy_(number.expand(MIB))
                        else:
                            wrong.add_((fixed != number).sum())
                        number.add_(1)
                graph.replay()
        finish(world)
        result = int(wrong.item())
        handoff.check()
        del fixed, graph
    return result


def never_synchronises(world: World, mode: str, num: int) -> None:
    """In a steady state nothing of torch waits on the host, and no turn is damaged."""
    numel = 4 * MIB
    ones = torch.ones(numel, dtype=torch.int32, device=world.device)
    wrong = torch.zeros(1, dtype=torch.int64, device=world.device)
    with Handoff(world, 0, 1, 4 * numel, mode=mode) as handoff:
        finish(world)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for turn in range(num):
                with handoff.acquire() as slot:
                    tensor = slot.tensor((numel,), torch.int32)
                    if world.rank == 0:
                        torch.mul(ones, turn, out=tensor)
                    else:
                        wrong.add_((tensor != turn).sum())
                    del tensor
        finally:
            torch.cuda.set_sync_debug_mode("default")
        finish(world)
        assert int(wrong.item()) == 0
        assert handoff.stats().copied_nbytes == 0


def without_exchange(world: World) -> dict[str, int]:
    """Where the driver cannot let blocks trade places quickly, they are unmapped and mapped."""
    driver = world.driver
    driver.exchange = lambda *_: False  # type: ignore[method-assign]
    try:
        return fixed(world, 200)
    finally:
        del driver.exchange


def between_two_devices(world: World, mode: str) -> None:
    """One process that drives two GPUs hands over from one to the other."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU, and this takes 2")
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    with Handoff(world, 0, 0, MIB, mode=mode, devices=devices) as handoff:
        for turn in range(20):
            with torch.cuda.device(devices[0]), handoff.produce() as slot:
                tensor = slot.tensor((1000,), torch.int32)
                assert tensor.device == devices[0]
                tensor.fill_(turn)
                del tensor
            with torch.cuda.device(devices[1]), handoff.consume() as slot:
                tensor = slot.tensor((1000,), torch.int32)
                assert tensor.device == devices[1]
                slot.wait_until_mapped()
                assert tensor.tolist() == [turn] * 1000
                del tensor
        for device in devices:
            torch.cuda.synchronize(device)
