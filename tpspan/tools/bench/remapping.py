"""What a remap costs the host, idle and under load, and what it costs the kernels that run on."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tpspan.memory import ADDRESS_SPACE_LOCK, Block, Right
from tpspan.spans import Layout, Span
from tpspan.spans.table import SpanBlock, Table
from tpspan.tools.bench import load, values
from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.measuring import Bench

BLOCK_NBYTES = (2 << 20, 64 << 20)
GROUP = "remap"
# How long after one remap the next begins. The second is a pipeline's rate; by then other work, or
# whoever shares the core, has had the processor's caches, and the same calls take twice as long.
_ONE_AFTER_ANOTHER, _EVERY_MS = "one after another", "one every ms"
_SHORTEST_S = 1e-4
_PACES_S = {_ONE_AFTER_ANOTHER: 0.0, _EVERY_MS: 1e-3}


@dataclass(frozen=True)
class Way:
    """One way to remap; ``once`` remaps once and returns the seconds to be counted.

    Attributes:
        in_turn: the ranks remap one after another, as the stages of a pipeline do, and not all at
            the same moment; their kernels run at the same time all the same.
    """

    name: str
    once: Callable[[], float]
    note: str = ""
    in_turn: bool = False


def measure(bench: Bench, train_s: float, block_nbytes: tuple[int, ...] = BLOCK_NBYTES) -> None:
    """All figures of remaps, for blocks of each size. Collective.

    Args:
        train_s: how long a train of kernels beside the remaps lasts, at least.
    """
    trains = _trains(bench, train_s)
    for nbytes in block_nbytes:
        with contextlib.ExitStack() as stack:
            ways = [
                stack.enter_context(_driver_calls(bench, nbytes)),
                *stack.enter_context(_table(bench, nbytes)),
                *stack.enter_context(_collective(bench, nbytes)),
            ]
            for way in ways:
                if not way.in_turn:
                    name = f"{shown(nbytes)}, {way.name}, idle"
                    samples = bench.sample(way.once, least=20, most=300)
                    bench.add_us(GROUP, name, samples, way.note)
            for kind, train in trains.items():
                # A plain loop of driver calls says least; the rest is what a program does.
                for way in ways[1:]:
                    if way.in_turn:
                        _under_load(bench, nbytes, way, kind, train, _ONE_AFTER_ANOTHER)
                    if kind == "products":
                        _under_load(bench, nbytes, way, kind, train, _EVERY_MS)


@contextlib.contextmanager
def _driver_calls(bench: Bench, nbytes: int) -> Iterator[Way]:
    """Unmap, map and access by the driver alone, on this rank's own memory."""
    driver = bench.world.driver
    handles = [driver.create(nbytes), driver.create(nbytes)]
    address = driver.reserve(nbytes)
    driver.map(address, nbytes, handles[0])
    driver.protect(address, nbytes, Right.READ_WRITE)

    def once() -> float:
        handles.reverse()
        with ADDRESS_SPACE_LOCK:
            start = time.perf_counter()
            driver.unmap(address, nbytes)
            driver.map(address, nbytes, handles[0])
            driver.protect(address, nbytes, Right.READ_WRITE)
            return time.perf_counter() - start

    yield Way("driver calls", once)
    driver.unmap(address, nbytes)
    driver.free(address, nbytes)
    for handle in handles:
        driver.release(handle)


@contextlib.contextmanager
def _table(bench: Bench, nbytes: int) -> Iterator[tuple[Way, Way]]:
    """The same through a span's table: what each rank does between the two votes."""
    driver = bench.world.driver
    rank = bench.world.rank
    with Block.create(driver, nbytes) as first, Block.create(driver, nbytes) as second:
        blocks = [SpanBlock(0, rank, first), SpanBlock(1, rank, second)]
        table = Table(driver, nbytes)
        table.place(0, blocks[0])
        table.reservation.protect(Right.READ_WRITE)

        def once() -> float:
            blocks.reverse()
            start = time.perf_counter()
            table.replace([(0, blocks[0])])
            return time.perf_counter() - start

        note = "unmap, map and access, with the span's books"
        yield (
            Way("driver part", once, f"{note}; one rank at a time", in_turn=True),
            Way("driver part, all at once", once, note),
        )
        table.close()


@contextlib.contextmanager
def _collective(bench: Bench, nbytes: int) -> Iterator[tuple[Way, Way]]:
    """``Span.remap`` of rank 0's block, and the fence before it; values are checked at the end."""
    world = bench.world
    layout = Layout.blocked([nbytes] * world.world_size, page_nbytes=world.driver.page_nbytes)
    numel = layout.nbytes // values.DTYPE.itemsize
    span = Span.allocate(world, (numel,), values.DTYPE)
    block = span.new_block(0, nbytes)
    values.fill(span, 3)
    span.barrier()
    block = span.remap(0, block, after=span.fence())
    values.fill(span, 4)
    num_remaps = 0

    def once() -> float:
        nonlocal block, num_remaps
        fence = span.fence()
        fence.wait()
        bench.board.barrier()
        start = time.perf_counter()
        block = span.remap(0, block, after=fence)
        num_remaps += 1
        return time.perf_counter() - start

    def fence_only() -> float:
        start = time.perf_counter()
        span.fence().wait()
        return time.perf_counter() - start

    yield (
        Way("whole collective call", once, "after a fence that is done; both votes included"),
        Way("fence alone", fence_only, "record and wait, on a stream with nothing else on it"),
    )
    bench.start_together()
    stop = nbytes // values.DTYPE.itemsize
    values.check(span, 3 if num_remaps % 2 else 4, f"after {num_remaps} remaps", stop=stop)
    values.check(span, 4, "beside the remapped block", start=stop)
    block = span.remap(0, block, after=span.fence())
    values.check(span, 4 if num_remaps % 2 else 3, "in the other block", stop=stop)
    span.close()


def _under_load(
    bench: Bench, nbytes: int, way: Way, kind: str, train: load.Train, pace: str
) -> None:
    """The way's figure beside a train, and by how much the train is slower for it."""
    times: list[float] = []
    pace_s = _PACES_S[pace]

    def ended() -> float:
        # Of ranks that share a GPU, which one gets more of it differs from train to train; the
        # last to end has seen all of the work.
        took = train.finish()
        return bench.agree(took) if bench.shares_device else took

    def alone() -> float:
        bench.start_together()
        train.start()
        return ended()

    def beside() -> tuple[float, int]:
        world = bench.world
        seconds, num_beside = 0.0, 0
        for turn in range(world.world_size if way.in_turn else 1):
            bench.start_together()
            train.start()
            is_mine = not way.in_turn or turn == world.rank
            for _ in range(num if is_mine else 0):
                _keep_busy(pace_s)
                remap_s = way.once()
                if train.is_running():  # all ranks remap equally often: count what was beside
                    times.append(remap_s)
                    num_beside += 1
            train_s = ended()
            seconds = train_s if is_mine else seconds
        return seconds, num_beside

    num = max(2, int(alone() / (pace_s or _SHORTEST_S) / 2))
    num = int(bench.agree(num))
    warm = beside()
    pairs = bench.num_repeats(4 * warm[0], least=11, most=40)
    times.clear()
    slower, noise, counts = [], [], []
    for _ in range(pairs):
        before = alone()
        seconds, num_beside = beside()
        after = alone()
        slower.append((seconds / ((before + after) / 2) - 1) * 100)
        noise.append(abs(before / after - 1) * 100)
        counts.append(num_beside)
    name = f"{shown(nbytes)}, {way.name}, {pace}, beside {kind}"
    fewest = int(min(bench.board.all_gather(len(times))))
    if fewest:
        notes = filter(None, [way.note, bench.crowd])
        bench.add(
            GROUP,
            name,
            "us",
            [seconds * 1e6 for seconds in times[:fewest]],
            combine="worst median" if way.in_turn else "slowest",
            note="; ".join(notes),
        )
    else:
        bench.leave_out(GROUP, name, "us", "no remap ended before the train did")
    varies = bench.agree(statistics.median(noise))
    clock = "" if bench.is_cuda else "processor time; "
    count = statistics.median(counts)
    note = f"{clock}a train alone varies by {varies:.2f} %; {count:g} remaps beside it"
    bench.add(
        GROUP,
        f"{shown(nbytes)}, {kind} slower, beside {way.name}, {pace}",
        "%",
        slower,
        combine="worst median",
        note="; ".join(filter(None, [note, bench.crowd])),
    )


def _keep_busy(seconds: float) -> None:
    """A thread that launches kernels does not sleep: one that wakes up is slow at first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _trains(bench: Bench, train_s: float) -> dict[str, load.Train]:
    device = bench.world.device
    is_small = train_s < 0.01
    size = (4096 if bench.is_cuda else 384) if not is_small else 64
    nbytes = (256 << 20 if bench.is_cuda else 16 << 20) if not is_small else 1 << 20
    steps = {"products": load.products(device, size), "copies": load.copies(device, nbytes)}
    return {kind: _train(bench, step, train_s, device) for kind, step in steps.items()}


def _train(
    bench: Bench, step: Callable[[], object], train_s: float, device: torch.device
) -> load.Train:
    """A train of this step that takes ``train_s`` on the fastest rank, when all run theirs."""

    def make(num_steps: int) -> load.Train:
        if bench.is_cuda:
            return load.StreamTrain(step, num_steps, device)
        return load.ThreadTrain(step, num_steps)

    took = []
    for num_steps in (2, 4):
        bench.start_together()
        trial = make(num_steps)
        trial.start()
        took.append(trial.finish() / num_steps)
    return make(int(bench.agree(max(4, train_s / took[-1]))))
