"""What tpspan.distributed must do as torch.distributed does, on any backend."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import tpspan.distributed as dist
from bodies.common import failure, finish, gather, short_lived
from tpspan.distributed import cuda_group, host_group, requests
from tpspan.distributed.buffers import Buffers
from tpspan.distributed.journal import Journal
from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.launch.world import World
from tpspan.spans import Span

SIZES = (0, 1, 5, 4099, 300_007)
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@contextmanager
def group_of(world: World) -> Iterator[World]:
    """A world of the same ranks, closed with all that its calls have made."""
    inner = world.subset(range(world.world_size))
    try:
        yield inner
        finish(world)
    finally:
        world.control.barrier()
        inner.close()


def values(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank gives: small numbers that every dtype holds."""
    numbers = (torch.arange(numel) * (rank + 3)) % 11
    if dtype in (torch.uint8, torch.bool):
        return numbers.to(dtype).to(device)
    return (numbers.float() - 3).to(dtype).to(device)


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in the order of the ranks, narrow floats in fp32; "or" of truth values."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return torch.stack(tensors).any(0)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    result = tensors[0].to(wide)
    for tensor in tensors[1:]:
        result = result + tensor.to(wide)
    return result.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    pair = [
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)
    ]
    return one.shape == other.shape and pair[0].equal(pair[1])


def every_call(world: World, dtype: str, async_op: bool = False) -> None:
    """All functions over all sizes for one dtype."""
    kind, device, size = getattr(torch, dtype), world.device, world.world_size
    with group_of(world) as group:

        def done(work: Any) -> None:
            assert (work is not None) == async_op
            if async_op:
                work.wait()
                assert work.get_future().wait() is not None
                finish(world)
                assert work.is_completed()

        for numel in SIZES:
            given = [values(rank, numel, kind, device) for rank in range(size)]
            own = given[group.rank]
            out = torch.empty(size * numel, dtype=kind, device=device)
            done(dist.all_gather_into_tensor(out, own, group, async_op))
            assert same(out, torch.cat(given))
            stacked = torch.empty(size, numel, dtype=kind, device=device)
            done(dist.all_gather_single(stacked, own, group, async_op))
            assert same(stacked, torch.stack(given))

            reduced = own.clone()
            done(dist.all_reduce(reduced, group=group, async_op=async_op))
            assert same(reduced, total(given))
            part = torch.empty(numel, dtype=kind, device=device)
            whole = torch.cat([own] * size)
            done(dist.reduce_scatter_tensor(part, whole, group=group, async_op=async_op))
            assert same(part, total(given))

            sent = own.clone()
            done(dist.broadcast(sent, size - 1, group, async_op))
            assert same(sent, given[-1])

            lengths = [numel + 3 * rank for rank in range(size)]
            uneven = [values(r, n, kind, device) for r, n in enumerate(lengths)]
            outs = [torch.empty(n, dtype=kind, device=device) for n in lengths]
            done(dist.all_gather(outs, uneven[group.rank], group, async_op))
            assert all(same(got, want) for got, want in zip(outs, uneven, strict=True))

            inputs = [values(group.rank, n, kind, device) for n in lengths]
            short = torch.empty(lengths[group.rank], dtype=kind, device=device)
            done(dist.reduce_scatter(short, inputs, group=group, async_op=async_op))
            longest = [values(r, lengths[group.rank], kind, device) for r in range(size)]
            assert same(short, total(longest))
        done(dist.barrier(group, async_op))


def every_reduction(world: World) -> None:
    """The other operations, the mean, and bits that are the same on all ranks."""
    device, size = world.device, world.world_size
    with group_of(world) as group:
        for name, combine in OPS.items():
            given = [values(rank, 70_001, torch.int32, device) for rank in range(size)]
            expected = given[0]
            for more in given[1:]:
                expected = combine(expected, more)
            tensor = given[group.rank].clone()
            dist.all_reduce(tensor, getattr(ReduceOp, name), group)
            assert same(tensor, expected), name
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for numel in (1000, 400_001):
                tensor = torch.full((numel,), float(group.rank), dtype=dtype, device=device)
                dist.all_reduce(tensor, ReduceOp.AVG, group)
                assert same(tensor, torch.full_like(tensor, (size - 1) / 2))
        for numel in (999, 200_003):
            torch.manual_seed(group.rank)
            tensor = torch.randn(numel).to(device)
            dist.all_reduce(tensor, group=group)
            copies = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(copies, tensor, group)
            assert all(same(copy, tensor) for copy in copies)
        # 1 + 2**-9 three times: rounding to bf16 after each addition would lose the small parts.
        tensor = torch.full((5000,), 1 / 256 if group.rank else 1.0, device=device).bfloat16()
        dist.all_reduce(tensor, group=group)
        exact = torch.tensor(1 + (size - 1) / 256).bfloat16()
        assert bool((tensor.cpu() == exact).all())


def odd_tensors(world: World) -> None:
    """Strides, conjugates, graphs of gradients, in place in an ordinary tensor, objects."""
    device, size = world.device, world.world_size
    with group_of(world) as group:
        base = torch.arange(24.0, device=device).view(4, 6) + group.rank
        out = torch.empty(size, 6, 4, device=device)
        dist.all_gather_into_tensor(out, base.t(), group)
        assert all(same(out[r], base.t() - group.rank + r) for r in range(size))
        wide = torch.empty(6, 4 * size, device=device)
        target = wide.t()  # not contiguous, and shaped as the concatenation
        dist.all_gather_into_tensor(target, base.t().contiguous().view(4, 6), group)
        flat = base.t().contiguous().view(4, 6)
        assert same(target[group.rank * 4 : group.rank * 4 + 4].contiguous(), flat)
        column = torch.ones(5, 3, device=device)[:, 1]
        dist.all_reduce(column, group=group)
        assert bool((column == size).all())
        conjugate = torch.full((3,), 1 + 2j, device=device).conj()
        gathered = torch.empty(3 * size, dtype=torch.complex64, device=device)
        dist.all_gather_into_tensor(gathered, conjugate, group)
        assert bool((gathered == 1 - 2j).all())
        leaf = torch.ones(4, device=device, requires_grad=True)
        dist.all_gather_into_tensor(torch.empty(4 * size, device=device), leaf * 2, group)
        whole = torch.zeros(size, 100, device=device)
        whole[group.rank] = group.rank + 1
        dist.all_gather_into_tensor(whole, whole[group.rank], group)
        assert all(bool((whole[r] == r + 1).all()) for r in range(size))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": group.rank, "pad": "x" * group.rank}, group)
        assert [each["rank"] for each in objects] == list(range(size))


def gathered_in_place(world: World) -> None:
    """The output is a view of a span and the input this rank's part of it: nothing is copied."""
    size = world.world_size
    ranks = torch.arange(size, dtype=torch.float32)
    with group_of(world) as group:
        before = dist.stats().served.get("all_gather: in place", 0)
        with Span.allocate(group, (size * 4, 1000), torch.float32) as span:
            for turn in range(3):
                span.local.fill_(10 * turn + group.rank)
                dist.all_gather_into_tensor(span.gathered, span.local, group)
                for rank in range(size):
                    assert bool((span.shard(rank) == 10 * turn + rank).all())
                dist.barrier(group)
            other = torch.zeros(size * 4, 1000, device=world.device)
            dist.all_gather_into_tensor(other, span.local, group)
            assert same(other, span.gathered)
            dist.barrier(group)
            whole, own = span.gathered, span.local
            for turn in range(3):  # the same tensors again: the call is known
                own.fill_(100 * turn + group.rank)
                dist.all_gather_into_tensor(whole, own, group)
                assert bool((whole.view(size, -1)[:, 0].cpu() == 100 * turn + ranks).all())
                dist.barrier(group)
            assert dist.stats().served["all_gather: in place"] == before + 6
            # The same objects, but they lie elsewhere now.
            own.data = torch.full((4, 1000), float(group.rank), device=world.device)
            dist.all_gather_into_tensor(whole, own, group)
            assert bool((whole.view(size, -1)[:, 0].cpu() == ranks).all())
            whole.data = torch.zeros(size * 4, 1000, device=world.device)
            dist.all_gather_into_tensor(whole, own, group)
            assert bool((whole.view(size, -1)[:, 0].cpu() == ranks).all())
            dist.barrier(group)
            del whole, own
        assert dist.stats().served["all_gather: in place"] == before + 6


def refused(world: World) -> None:
    """Wrong arguments raise as torch's do, on all ranks, and the group goes on."""
    device, size = world.device, world.world_size
    with group_of(world) as group:
        x = torch.ones(4, device=device)
        long = torch.empty(4 * size, device=device)
        complex_x = torch.ones(4, dtype=torch.complex64, device=device)
        cases: list[tuple[type[Exception], Callable[[], object]]] = [
            (ValueError, lambda: dist.all_gather_into_tensor(long[:-1], x, group)),
            (TypeError, lambda: dist.all_gather_into_tensor(long.double(), x, group)),
            (ValueError, lambda: dist.all_gather([x] * (size + 1), x, group)),
            (ValueError, lambda: dist.all_gather([x[:3]] * size, x, group)),
            (ValueError, lambda: dist.all_gather([x.double()] * size, x, group)),
            (TypeError, lambda: dist.all_gather((x,) * size, x, group)),  # type: ignore[arg-type]
            (TypeError, lambda: dist.all_reduce([x], group=group)),  # type: ignore[arg-type]
            (ValueError, lambda: dist.all_reduce(complex_x, ReduceOp.MAX, group)),
            (TypeError, lambda: dist.all_reduce(x, ReduceOp.BAND, group)),
            (ValueError, lambda: dist.reduce_scatter_tensor(x, long[:-1], group=group)),
            (TypeError, lambda: dist.reduce_scatter_tensor(x, long.double(), group=group)),
            (ValueError, lambda: dist.reduce_scatter(x, [x] * (size - 1), group=group)),
            (ValueError, lambda: dist.broadcast(x, size, group)),
            (ValueError, lambda: dist.broadcast(x, None, group)),
            (TypeError, lambda: dist.all_reduce(x, group=3)),
        ]
        for number, (kind, call) in enumerate(cases):
            error = failure(call)
            assert type(error) is kind, (number, error)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == size


def mismatched(world: World) -> None:
    """Invariant 3: different requests raise on all ranks, nothing is done, the group goes on."""
    size, device = world.world_size, world.device
    if size == 1:
        return
    with group_of(world) as group:
        last = group.rank == size - 1
        x = torch.full((4,), 1.0 + group.rank, device=device)
        out = torch.zeros(4 * size, device=device)
        cases: list[Callable[[], object]] = [
            lambda: dist.all_reduce(x[:3] if last else x, group=group),
            lambda: dist.all_reduce(x, ReduceOp.MAX if last else ReduceOp.SUM, group),
            lambda: dist.broadcast(x, int(last), group),
            lambda: (
                dist.all_gather_into_tensor(out, x, group)
                if last
                else dist.all_reduce(x, group=group)
            ),
            lambda: dist.all_reduce(x.int() if last else x, group=group),
            # Lists of other sizes, although the longest are alike.
            lambda: dist.reduce_scatter(
                torch.empty(4 if last or not group.rank else 1, device=device),
                [x[:2] if last else x, *([x[:1]] * (size - 2)), x if last else x[:1]],
                group=group,
            ),
            # One rank refuses its own arguments: the others are told.
            lambda: dist.all_gather_into_tensor(out[:-1] if last else out, x, group),
        ]
        for number, call in enumerate(cases):
            error = failure(call)
            refuses = number == len(cases) - 1 and last
            assert isinstance(error, ValueError if refuses else CollectiveMismatch), error
            if isinstance(error, CollectiveMismatch):
                assert set(error.requests) == set(range(size))
            assert float(x[0]) == 1 + group.rank and not out.any(), number
        dist.all_reduce(x, group=group)
        assert float(x[0]) == sum(range(1, size + 1))


def left_alone(world: World) -> None:
    """Invariant 9: a rank that does not come is named, and the group is then broken."""
    if world.world_size == 1:
        return
    with short_lived(world, 0.5) as group:
        dist.barrier(group)
        if group.rank:
            for _ in range(2):
                error = failure(lambda: dist.barrier(group))
                assert isinstance(error, PeerError)
                assert 0 in error.ranks
        else:
            time.sleep(1.5)


@contextmanager
def slow_reader(world: World, rank: int, guarded: bool) -> Iterator[None]:
    """That rank waits before it reads what was staged; without the guard all use one buffer."""
    if world.backend == "host":
        module: Any = host_group
        pull, turn_of = module.host_pull, host_group.HostGroup._next_buffer

        def slow(*arguments: int) -> None:
            time.sleep(0.3)
            pull(*arguments)

        try:
            if not guarded:
                host_group.HostGroup._next_buffer = lambda self: 0  # type: ignore[method-assign]
            if world.rank == rank:
                module.host_pull = slow
            yield
        finally:
            module.host_pull = pull
            host_group.HostGroup._next_buffer = turn_of  # type: ignore[method-assign]
        return
    module, stage = cuda_group, Buffers.stage
    pull = module.pull

    def slow_on_stream(*arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(600_000_000)  # type: ignore[attr-defined]
        pull(*arguments, **options)

    def stage_in_one(self: Buffers, source: int, nbytes: int, stream: int) -> int:
        self._turn = 0
        return stage(self, source, nbytes, stream)

    try:
        if not guarded:
            Buffers.stage = stage_in_one  # type: ignore[method-assign]
        if world.rank == rank:
            module.pull = slow_on_stream
        yield
    finally:
        module.pull = pull
        Buffers.stage = stage  # type: ignore[method-assign]


def write_after_read(world: World, guarded: bool = True) -> list[bool]:
    """Invariant 6: while a reader is slow, the writer waits; without the guard it overwrites.

    Returns:
        Whether what this rank read was right.
    """
    size, device = world.world_size, world.device
    # On a GPU smaller calls are one kernel, or go through host memory by copy engines.
    numel = 1000 if world.backend == "host" else 1_000_000
    with group_of(world) as group:
        out = torch.zeros(size, numel, device=device)
        x = torch.zeros(numel, device=device)
        dist.all_gather_into_tensor(out, x, group)
        finish(world)
        right = []
        with slow_reader(world, 0, guarded):
            start = time.monotonic()
            for turn in (1, 2, 3):
                x.fill_(turn)
                dist.all_gather_into_tensor(out, x, group)
                right.append(bool((out == turn).all()))
            waited_s = time.monotonic() - start
        assert waited_s > 0.25 or not guarded, "a writer was let in before the slow reader left"
    return right


def in_order(world: World) -> None:
    """Calls with and without ``async_op`` happen in the order in which they were made."""
    size, device = world.world_size, world.device
    with group_of(world) as group:
        x = torch.ones(50_000, device=device)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(5)]
        dist.all_reduce(x, group=group)
        finish(world)
        assert all(work.is_completed() for work in works)
        assert float(x[0]) == float(size) ** 6
        called = threading.Event()
        work = dist.barrier(group, async_op=True)
        work.get_future().then(lambda future: called.set())
        work.wait()
        assert called.wait(5)
        if world.backend == "host" and size > 1:
            last = group.rank == size - 1
            work = dist.all_reduce(x[:3] if last else x, group=group, async_op=True)
            assert isinstance(failure(work.wait), CollectiveMismatch)
            assert isinstance(work.exception(), CollectiveMismatch)


def random_calls(world: World, num_calls: int, seed: int = 0) -> None:
    """Random calls of random sizes, dtypes and groups against what they must give."""
    size, device = world.world_size, world.device
    dice = random.Random(seed)
    with group_of(world) as everyone:
        members = [list(range(size))] + [
            [r for r in range(size) if r != out] for out in range(size)
        ]
        members = [ranks for ranks in members if ranks]
        worlds = [everyone.subset(ranks) if world.rank in ranks else None for ranks in members]
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]
        dtypes += [torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
        for _ in range(num_calls):
            which = dice.randrange(len(members))
            numel = int(2 ** dice.uniform(0, 16)) - 1
            dtype, call = dice.choice(dtypes), dice.randrange(5)
            async_op, shift = dice.random() < 0.3, dice.randrange(5)
            group = worlds[which]
            if group is None:
                continue
            ranks = members[which]
            given = [values(rank + shift, numel, dtype, device) for rank in ranks]
            own = given[group.rank].clone()
            expected, got, outs = total(given), own, []
            if call == 0:
                got = torch.empty(len(ranks) * numel, dtype=dtype, device=device)
                work = dist.all_gather_into_tensor(got, own, group, async_op)
                expected = torch.cat(given)
            elif call == 1:
                work = dist.all_reduce(own, group=group, async_op=async_op)
            elif call == 2:
                got = torch.empty(numel, dtype=dtype, device=device)
                whole = torch.cat([own] * len(ranks))
                work = dist.reduce_scatter_tensor(got, whole, group=group, async_op=async_op)
            elif call == 3:
                root = shift % len(ranks)
                work = dist.broadcast(own, root, group, async_op)
                expected = given[root]
            else:
                outs = [torch.empty_like(each) for each in given]
                work = dist.all_gather(outs, own, group, async_op)
                expected = torch.stack(given)
            if work is not None:
                work.wait()
            got = torch.stack(outs) if outs else got
            assert same(got, expected), (call, numel, dtype, ranks)
        del group


def replayed(world: World, num_replays: int) -> None:
    """A captured graph of calls gives the right values for inputs that change."""
    if world.backend != "cuda":
        pytest.skip("graphs are CUDA's")
    size, device = world.world_size, world.device
    with group_of(world) as group:
        for numel in (1000, 300_000):
            x = torch.zeros(numel, device=device)
            out = torch.empty(size, numel, device=device)
            reduced = torch.empty_like(x)
            part = torch.empty(numel // size, device=device)
            rows = torch.empty(size, numel, device=device)
            sent, seen = torch.empty_like(x), torch.empty_like(out)
            largest = torch.empty_like(x)
            span = Span.allocate(group, (size, numel), torch.float32)
            local, gathered = span.local, span.gathered

            def step(
                x: torch.Tensor = x,
                out: torch.Tensor = out,
                reduced: torch.Tensor = reduced,
                part: torch.Tensor = part,
                rows: torch.Tensor = rows,
                sent: torch.Tensor = sent,
                seen: torch.Tensor = seen,
                largest: torch.Tensor = largest,
                local: torch.Tensor = local,
                gathered: torch.Tensor = gathered,
            ) -> None:
                dist.all_gather_into_tensor(out, x, group)
                reduced.copy_(x)
                dist.all_reduce(reduced, group=group)
                dist.reduce_scatter_tensor(part, x[: part.numel() * size], group=group)
                dist.all_gather(list(rows), x, group)
                sent.copy_(x)
                dist.broadcast(sent, size - 1, group)
                largest.copy_(x)
                dist.all_reduce(largest, ReduceOp.MAX, group)
                local.copy_(x)
                dist.all_gather_into_tensor(gathered, local, group)
                seen.copy_(gathered)
                dist.barrier(group)  # all have read: the next replay may write

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            world.control.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            wrong = torch.zeros((), device=device)
            ranks = torch.arange(size, device=device).view(-1, 1)
            for turn in range(num_replays):
                x.fill_(group.rank + turn)
                graph.replay()
                summed = float(sum(rank + turn for rank in range(size)))
                wrong += (out != ranks + turn).sum() + (reduced != summed).sum()
                wrong += (part != summed).sum()
                wrong += (rows != ranks + turn).sum() + (seen != ranks + turn).sum()
                wrong += (sent != size - 1 + turn).sum() + (largest != size - 1 + turn).sum()
                if turn % 10 == 3:
                    dist.all_reduce(torch.ones(5000, device=device), group=group)
                if turn == 7:  # for which the buffers grow: the graph goes on in the old ones
                    large = torch.full((3 << 20,), float(group.rank), device=device)
                    largest_of_all = torch.empty(size * (3 << 20), device=device)
                    dist.all_gather_into_tensor(largest_of_all, large, group)
                    wrong += (largest_of_all.view(size, -1) != ranks).sum()
                    del large, largest_of_all
            torch.cuda.synchronize()
            assert float(wrong) == 0
            world.control.barrier()
            del graph, step, local, gathered
            span.close()


def words_agree(world: World) -> None:
    """Codes of dtypes are the same on all ranks."""
    codes = gather(world, [str(dtype) for dtype in requests.DTYPES])
    assert all(each == codes[0] for each in codes)


def journal_finds(world: World) -> None:
    """Invariant 3 without waiting: whoever comes last finds a difference, the others later."""
    size = world.world_size
    with group_of(world) as group:
        journal = Journal(group)
        last = size - 1
        barrier = requests.words(requests.Operation.BARRIER)
        other = requests.words(requests.Operation.BROADCAST, torch.int8, 4)
        for _ in range(5000):  # more than its ring holds
            journal.note(barrier)
        world.control.barrier()
        if group.rank < last:
            journal.note(barrier)
        world.control.barrier()
        if group.rank == last and size > 1:
            error = failure(lambda: journal.note(other))
            assert isinstance(error, CollectiveMismatch)
            assert "broadcast of 4 bytes" in error.requests[last]  # type: ignore[operator]
        world.control.barrier()
        if group.rank < last:
            assert isinstance(failure(lambda: journal.note(barrier)), CollectiveMismatch)
        world.control.barrier()
        journal.close()
        assert isinstance(failure(lambda: journal.note(barrier)), ClosedError)
