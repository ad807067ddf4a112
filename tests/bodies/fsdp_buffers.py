"""The buffers in which FSDP2 gathers and reduces, without FSDP2."""

from __future__ import annotations

import time

import torch
import torch.distributed as torch_distributed

import tpspan
from bodies.fsdp import raised
from tpspan.distributed.fsdp_memory import FsdpMemory
from tpspan.distributed.lines import Buffer
from tpspan.launch.world import World
from tpspan.spans.reads import Read


def memory_of(world: World, read: Read = "auto") -> FsdpMemory:
    memory = FsdpMemory.among(world, world.device, read)
    assert memory is not None
    return memory


def slow_reader(world: World, is_guarded: bool, read: Read) -> None:
    """Invariant 6: a buffer is written again only when the slowest reader has read it.

    There is one buffer. The last rank reads late, or brings the others' parts late; they write the
    next values as soon as they are let. Without the guard they overwrite what it has yet to read.
    """
    rank, size, delay_s = world.rank, world.world_size, 0.4
    memory = memory_of(world, read)
    bring, is_late = memory._bring, iter([read == "staged" and rank == size - 1])

    def bring_late(buffer: Buffer, nbytes: int) -> None:
        if next(is_late, False):
            delay(world, delay_s)
        bring(buffer, nbytes)

    memory._bring = bring_late  # type: ignore[method-assign]
    pool = memory.gathers
    num_of_a_size, pool._num_of_a_size = pool._num_of_a_size, 1
    numel = 1000 * size
    waited_s, seen = 0.0, []
    synchronize(world)
    world.control.barrier()
    try:
        for turn in range(3):
            start = time.monotonic()
            buffer = pool.take(4 * numel)
            whole = memory.whole(buffer, numel, torch.float32)
            whole[rank * 1000 : (rank + 1) * 1000] = turn
            if turn == 1:
                synchronize(world)
                waited_s = time.monotonic() - start
            if turn == 1 and not is_guarded:
                break
            memory.gather(buffer, whole, async_op=False)
            if turn == 0 and rank == size - 1 and read == "in_place":
                delay(world, delay_s)
            seen.append(whole.clone())
            del whole
            buffer.is_free |= not is_guarded
        assert len(pool.buffers) == 1 and pool.num_guards >= 2 * is_guarded
    finally:
        pool._num_of_a_size = num_of_a_size
        del memory._bring  # type: ignore[method-assign]
    whole, buffer = torch.empty(0), pool.buffers[0]
    del whole, buffer
    synchronize(world)
    world.control.barrier()
    memory.close_buffers()
    if not is_guarded:
        overwritten = rank == size - 1 and bool((seen[0] != 0).any())
        assert any(world.control.all_gather(overwritten)), "the test cannot tell"
        return
    assert rank == size - 1 or waited_s > 0.6 * delay_s
    for turn, values in enumerate(seen):
        assert bool((values == turn).all()), f"turn {turn} was overwritten before it was read"


def synchronize(world: World) -> None:
    if world.backend == "cuda":
        torch.cuda.synchronize(world.device)


def delay(world: World, seconds: float) -> None:
    """Hold what reads next: the stream, or on the host this rank."""
    if world.backend == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))
    else:
        time.sleep(seconds)


def random_requests(world: World, seed: int, read: Read, num_requests: int = 60) -> None:
    """Any sizes, some held for a while: values are right, and memory stays within FSDP2's own."""
    dice = torch.Generator().manual_seed(seed)

    def roll(most: int) -> int:
        return int(torch.randint(most, (), generator=dice))

    rank, size = world.rank, world.world_size
    memory = memory_of(world, read)
    pool = memory.gathers
    sizes = [(3 << 18) + 1, 1 << 20, 5, 1 << 18, (7 << 18) + 3]
    held: list[tuple[Buffer, torch.Tensor, int]] = []
    for number in range(num_requests):
        part = sizes[roll(len(sizes))]
        buffer = pool.take(4 * part * size)
        whole = memory.whole(buffer, part * size, torch.float32)
        whole[rank * part : (rank + 1) * part] = number * size + rank
        memory.gather(buffer, whole, async_op=number % 3 == 0)
        synchronize(world)
        held.append((buffer, whole, number))
        del buffer, whole
        while len(held) > roll(3):
            check_values(held.pop(roll(len(held))), size)
        total = sum(each.span.layout.span_nbytes for each in pool.buffers)
        slack = (2 << 20) * len(pool.buffers)
        if read == "staged":  # one may serve a much smaller request
            slack = size * (slack + max(each.capacity for each in pool.buffers))
        assert total <= pool._allowed_nbytes * size + slack
        reduce_once(world, memory, read, 1 + roll(1 << 18), number)
    assert "in use" in raised(tpspan.InUseError, memory.refuse_if_in_use) if held else True
    while held:
        check_values(held.pop(), size)
    largest = max(each.capacity for each in memory.reduces.buffers)
    assert len(memory.reduces.buffers) == 1 and largest <= 8 * (size << 18)
    memory.close_buffers()
    assert memory.gathers.held_nbytes == memory.reduces.held_nbytes == 0


def check_values(item: tuple[Buffer, torch.Tensor, int], size: int) -> None:
    _, whole, number = item
    rows = whole.view(size, -1)
    expected = torch.arange(size, device=whole.device) + number * size
    assert bool((rows == expected[:, None]).all())


def reduce_once(world: World, memory: FsdpMemory, read: Read, part: int, number: int) -> None:
    comm = tpspan.SpanReduceScatter(world, read=read)
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    given = comm.allocate((part * world.world_size,), dtype=dtype, device=world.device)
    given.fill_(number % 7 + world.rank)
    output = comm.allocate((part,), dtype=dtype, device=world.device)
    assert memory.reduces.find(given) is not None and memory.reduces.find(output) is None
    op = (torch_distributed.ReduceOp.SUM, torch_distributed.ReduceOp.AVG)[number % 2]
    comm(output, given, Ranks(world), op)
    total = sum(number % 7 + rank for rank in range(world.world_size))
    expected = total / (world.world_size if number % 2 else 1)
    assert output.equal(torch.full_like(output, expected))


class Ranks:
    """As much of a process group as the objects look at."""

    def __init__(self, world: World) -> None:
        self._world = world

    def rank(self) -> int:
        return self._world.rank

    def size(self) -> int:
        return self._world.world_size


def different_requests(world: World) -> None:
    """Invariant 3: ranks that gather different things are told."""
    memory = memory_of(world)
    comm = tpspan.SpanAllGather(world)
    numel = 100 * world.world_size
    whole = comm.allocate((numel,), dtype=torch.float32, device=world.device)
    given = whole if world.rank else whole.view(torch.int32)
    message = ""
    try:
        comm(given, given, Ranks(world))
        synchronize(world)
        comm.allocate((2 * numel,), dtype=torch.float32, device=world.device)
    except (tpspan.CollectiveMismatch, tpspan.PeerError) as error:
        message = str(error)
    assert world.backend == "cuda" or "in buffer 1" in message
    del whole, given
    world.control.barrier()
    memory.gathers.forget()
