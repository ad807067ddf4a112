"""Channels between ranks: what is handed over arrives, unharmed in order; nothing is copied."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch

from bodies.common import failure, finish, gather
from bodies.process_groups import process_group
from drivers import is_readable, is_writable
from tpspan import Handoff
from tpspan.errors import (
    ClosedError,
    InUseError,
    PeerError,
)
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES
from tpspan.parallel.handoff_mapped import MappedTransport
from tpspan.parallel.side import Side

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


def packed(world: World, mode: str) -> None:
    """Tensors of slots that all hold the same, placed once; what was not packed is refused."""
    specs: Any = [((1000,), torch.int32), ((3, 5), torch.float64), ((), torch.bool)]
    others: Any = [((20, 50), torch.int32), *specs[1:]]
    wrong: Any = [((999,), torch.int32), *specs[1:]]
    end_bytes = 4096 + 256 + 1
    with Handoff(world, 0, 1, MIB, mode=mode) as handoff:
        places = handoff.pack(specs)
        assert isinstance(failure(handoff.pack, [((2 * MIB,), torch.int16)]), ValueError)
        for turn in range(7):
            slot = handoff.acquire()
            if world.rank == 0:
                tensors = slot.all_of(places)
                slot.wait_until_mapped()
                for index, (tensor, (shape, dtype)) in enumerate(zip(tensors, specs, strict=True)):
                    tensor.copy_(values(shape, dtype, turn, index))
            else:
                if turn % 3 == 2:
                    error = failure(slot.all_of, handoff.pack(wrong))
                    assert isinstance(error, ValueError) and "producer packed" in str(error)
                    slot.release()
                    continue
                asked = others if turn % 3 else specs
                tensors = slot.all_of(handoff.pack(asked))
                slot.wait_until_mapped()
                for index, (tensor, (shape, dtype)) in enumerate(zip(tensors, asked, strict=True)):
                    assert tensor.cpu().equal(values(shape, dtype, turn, index)), (turn, index)
            assert slot.specs == tuple((tuple(each.shape), each.dtype) for each in tensors)
            assert slot.used_nbytes == end_bytes
            assert isinstance(failure(slot.tensor, (1,), torch.int8), ValueError)
            assert isinstance(failure(slot.all_of, places), ValueError)
            slot.release()
            assert isinstance(failure(slot.all_of, places), ClosedError)
            del tensors, tensor
        world.control.barrier()


def packed_by_torch(world: World) -> None:
    with process_group(world, "gloo"):
        packed(world, "send")


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
                wait(turn, stream, 10.0, has_come=False)
                hand_over(turn, stream)

            turns.wait = lambda *_, **__: None  # type: ignore[method-assign]
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
        if mode == "remap":
            return
        if world.rank == 0:
            first, second = handoff.produce(), handoff.produce()
            with pytest.raises(KeyError), first:
                raise KeyError
            assert not first.is_released, "a later turn is held: this one cannot be put back"
            for slot in (first, second):
                slot.release()
        else:
            for turn in (4, 5):
                take(handoff, turn, [], by_header=True)


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
