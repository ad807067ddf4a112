"""What once went wrong in collective calls: each body is one kind of mistake."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import ReduceOp

import tpspan.distributed as dist
from bodies.common import failure, gather, short_lived
from bodies.cuda_logic import played
from bodies.distributed import group_of, same
from bodies.process_groups import distributed_c10d, process_group
from tpspan.distributed.journal import Journal
from tpspan.distributed.lines import HostLine
from tpspan.distributed.requests import Operation, words
from tpspan.distributed.work import Worker
from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.launch.world import World
from tpspan.spans import Span


def forked(world: World) -> None:
    """A child of a rank is refused everywhere, and its parent's peers notice nothing."""
    with group_of(world) as group:
        x = torch.ones(4)
        dist.all_reduce(x, group=group)
        with Span.allocate(group, (group.world_size, 4), torch.float32) as span:
            gather_in_place(span)
            line, journal = HostLine(group), Journal(group)
            barrier = words(Operation.BARRIER)
            cases: list[Callable[[], object]] = [
                lambda: dist.all_reduce(torch.ones(2), group=group),
                lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True),
                lambda: gather_in_place(span),
                lambda: dist.all_gather_object([None] * group.world_size, 1, group),
                lambda: dist.barrier(group),
                lambda: line.meet(barrier),
                lambda: journal.note(barrier),
            ]
            assert in_child(cases) == [ClosedError.__name__] * len(cases)
            line.meet(barrier)
            journal.note(barrier)
            line.close()
            journal.close()
            assert in_child(cases[-2:]) == [ClosedError.__name__] * 2
            cases.clear()
        x.fill_(1.0)
        dist.all_reduce(x, group=group, async_op=True).wait()
        assert float(x[0]) == group.world_size


def in_child(cases: list[Callable[[], object]]) -> list[str]:
    """The kind of error that each raises in a forked child; "NoneType" for none."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        os.write(write, pickle.dumps([type(failure(case)).__name__ for case in cases]))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        message = told.read()
    assert os.waitpid(child, 0)[1] == 0
    found: list[str] = pickle.loads(message)
    return found


def other_span(world: World, engine: str) -> None:
    """Invariant 3: gathers in place in different spans, at one offset, are different requests.

    On a GPU, where the host does not wait for its peers, the last to come finds it at once.
    """
    with on_engine(engine), short_lived(world, 2.0) as group:
        size = group.world_size
        spans = [Span.allocate(group, (size, 4), torch.float32) for _ in range(2)]
        dist.barrier(group)
        span = spans[group.rank == size - 1]
        error = failure(gather_in_place, span)
        mismatch = isinstance(error, CollectiveMismatch)
        assert mismatch or (engine == "cuda" and isinstance(error, PeerError)), error
        if isinstance(error, CollectiveMismatch):
            assert str(error.requests[group.rank]).endswith(f"of span {span.number}"), error
        assert any(gather(world, mismatch))
        for each in spans:
            each.close(force=True)


def gather_in_place(span: Span) -> None:
    dist.all_gather_into_tensor(span.gathered, span.local, span.world)


def on_engine(engine: str) -> Any:
    """A context in which groups have the host's engine, or the GPU's as played on the host."""
    return nullcontext() if engine == "host" else played(through_host=False, captured=False)


def callbacks(world: World) -> None:
    """A future's callback calls, waits and starts calls while the caller waits for its own."""
    size = world.world_size
    with group_of(world) as group:
        for turn in range(20):
            x, y, z = torch.ones(1000), torch.ones(1000), torch.ones(1000)
            seen: list[float] = []

            def call(future: Any, x: torch.Tensor = x, seen: list[float] = seen) -> None:
                dist.all_reduce(x, group=group)
                later = dist.all_reduce(x, group=group, async_op=True)
                later.wait()
                dist.barrier(group)
                seen.append(float(x[0]))

            if group.rank == size - 1 and turn % 2:
                threading.Event().wait(0.01)  # the others' callback is given before the call ends
            work = dist.all_reduce(x, group=group, async_op=True)
            ended = work.get_future().then(call)
            second = dist.all_reduce(y, group=group, async_op=True)
            dist.all_reduce(z, group=group)
            ended.wait()
            assert second.wait() and float(y[0]) == float(z[0]) == size
            assert seen == [float(size) ** 3] and float(x[0]) == size**3


def callback_that_waits(world: World) -> None:
    """A callback waits for a later call, which its own thread has to make; or for ever (9)."""
    with group_of(world) as group:
        gate = threading.Event()
        works: list[Any] = []

        def call(future: Any) -> None:
            gate.wait(1)
            works[1].wait()

        first = dist.barrier(group, async_op=True)
        works.append(first)
        ended = first.get_future().then(call)
        # Where the barrier was over already, the callback has run here, and found no second work.
        works.append(dist.barrier(group, async_op=True))
        gate.set()
        failure(ended.wait)
        works[1].wait()
        dist.barrier(group)
    worker, stuck = Worker(group.rank, 0.2), threading.Event()
    opened = threading.Event()
    work = worker.submit([], lambda: opened.wait(10))
    ended = work.get_future().then(lambda future: stuck.wait(30))
    opened.set()
    for wait in (worker.drain, worker.submit([], lambda: None).wait):
        error = failure(wait)
        assert isinstance(error, PeerError) and "callback" in str(error)
        assert error.ranks == (group.rank,)
    stuck.set()
    worker.close()
    ended.wait()


def copies_in_order(world: World) -> None:
    """What has to be copied is copied when its call's turn comes, not when the call is made."""
    size = world.world_size
    with group_of(world) as group:
        strided = torch.ones(1 << 17)[::2]
        for _ in range(2):
            dist.all_reduce(strided, group=group, async_op=True)
        whole = torch.zeros(size * strided.numel())
        dist.all_gather_into_tensor(whole, strided, group, async_op=True)
        parts = [torch.empty(strided.numel()) for _ in range(size)]
        dist.all_gather(parts, strided, group, async_op=True)
        summed = torch.empty(strided.numel())
        dist.reduce_scatter(summed, [strided] * size, group=group, async_op=True)
        dist.all_reduce(strided, group=group)
        assert bool((strided == size**3).all())
        assert bool((whole == size**2).all()) and bool((summed == size**3).all())
        assert all(bool((part == size**2).all()) for part in parts)


def refused_by_one(world: World) -> None:
    """Invariant 4: the last rank alone is wrong; it sees its own error, the others its name."""
    size = world.world_size
    with group_of(world) as group:
        last = group.rank == size - 1

        def either(wrong: Any, right: Any) -> Any:
            return wrong if last else right

        x, long = torch.ones(4), torch.zeros(4 * size)
        conjugate = torch.zeros(2 * size, dtype=torch.complex64)
        conjugate = either(conjugate.conj(), conjugate)
        short, resized = torch.ones(1 << 16), torch.ones(4)
        short.untyped_storage().resize_(4096)
        resized.untyped_storage().resize_(0)
        zeros = torch._efficientzerotensor(4)  # type: ignore[attr-defined]
        big, meta = torch.ones(1 << 16), torch.ones(4, device="meta")
        shared = torch.zeros(1).expand(4 * size)
        objects: list[Any] = [None] * size
        cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (
                ValueError,
                "all_gather ",
                lambda: dist.all_gather_into_tensor(either(long[:-1], long), x, group),
            ),
            (
                ValueError,
                "all_gather ",
                lambda: dist.all_gather_into_tensor(
                    either(long[:-1], long), x, group, async_op=True
                ).wait(),
            ),
            (
                TypeError,
                "all_gather ",
                lambda: dist.all_gather_into_tensor(either(None, long), x, group),
            ),
            (
                RuntimeError,
                "all_gather ",
                lambda: dist.all_gather_into_tensor(conjugate, x, group),
            ),
            (
                ValueError,
                "all_gather ",
                lambda: dist.all_gather_into_tensor(either(shared, long), x, group),
            ),
            (
                TypeError,
                "all_gather_list ",
                lambda: dist.all_gather(either((x,) * size, list(long.split(4))), x, group),
            ),
            (
                ValueError,
                "all_gather_list ",
                lambda: dist.all_gather(list(long.split(4)), either(x.double(), x), group),
            ),
            (ValueError, "broadcast ", lambda: dist.broadcast(x, either(size + 7, 0), group)),
            (ValueError, "broadcast ", lambda: dist.broadcast(x, either(None, 0), group)),
            (ValueError, "broadcast ", lambda: dist.broadcast(either(resized, x), 0, group)),
            (TypeError, "all_reduce ", lambda: dist.all_reduce(either([x], x), group=group)),
            (
                TypeError,
                "all_reduce ",
                lambda: dist.all_reduce(x, either(None, ReduceOp.SUM), group),
            ),
            (
                TypeError,
                "all_reduce ",
                lambda: dist.all_reduce(x, either("sum", ReduceOp.SUM), group),
            ),
            (ValueError, "all_reduce ", lambda: dist.all_reduce(either(short, big), group=group)),
            (ValueError, "all_reduce ", lambda: dist.all_reduce(either(zeros, x), group=group)),
            (
                NotImplementedError,
                "all_reduce ",
                lambda: dist.all_reduce(either(meta, x), group=group),
            ),
            (
                ValueError,
                "reduce_scatter ",
                lambda: dist.reduce_scatter_tensor(x, either(long[1:], long), group=group),
            ),
            (
                ValueError,
                "reduce_scatter ",
                lambda: dist.reduce_scatter(x, [x] * either(size + 1, size), group=group),
            ),
            (
                Exception,
                "all_gather_object ",
                lambda: dist.all_gather_object(objects, either(lambda: 0, 1), group),
            ),
        ]
        for number, (kind, name, call) in enumerate(cases):
            error = failure(call)
            if last:
                assert isinstance(error, kind), (number, error)
                assert not isinstance(error, CollectiveMismatch), (number, error)
            else:
                assert isinstance(error, CollectiveMismatch), (number, error)
                assert str(error.requests[size - 1]).startswith(name), (number, error)
                assert "refused" in str(error.requests[size - 1]), (number, error)
        assert not long.any() and not conjugate.any() and objects == [None] * size
        dist.all_reduce(x, group=group)
        assert float(x[0]) == size


def every_rank_refuses(world: World) -> None:
    """Nobody has memory, or data, or an operation: no rank touches anything, and all say why."""
    with group_of(world) as group:
        x = torch.ones(4)
        x.untyped_storage().resize_(0)
        view = torch.ones(1 << 16)[1 << 15 :]
        strided = view[::2]
        view.untyped_storage().resize_(1 << 15)
        for tensor in (x, view, strided):
            for error in (
                failure(dist.all_reduce, tensor, group=group),
                failure(dist.broadcast, tensor, 0, group),
                failure(dist.all_gather, [tensor] * group.world_size, tensor, group),
            ):
                assert isinstance(error, ValueError) and "storage" in str(error), error
        meta = torch.ones(4, device="meta")
        error = failure(lambda: dist.all_reduce(meta, group=group))
        assert isinstance(error, NotImplementedError) and "meta" in str(error)
        error = failure(lambda: dist.all_reduce(torch.ones(4), 17, group))
        assert isinstance(error, TypeError) and "17" in str(error)
        zeros = torch._efficientzerotensor(4)  # type: ignore[attr-defined]
        gathered = torch.ones(4 * group.world_size)
        dist.all_gather_into_tensor(gathered, zeros, group)
        assert not gathered.any()


def served(world: World) -> None:
    """Expanded tensors, unsigned integers, strided outputs that require gradients."""
    size = world.world_size
    with group_of(world) as group:
        expanded = torch.ones(1, 3).expand(4, 3)
        dist.all_reduce(expanded, group=group)
        assert bool((expanded == size).all())
        leaf = torch.zeros(4 * size, 2, requires_grad=True)
        dist.all_gather_into_tensor(leaf[:, 0], torch.full((4,), float(group.rank)), group)
        assert bool((leaf[:, 0] == torch.arange(size).repeat_interleave(4)).all())
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            top = torch.iinfo(dtype).max
            for numel in (2, 100_000):
                pair = torch.tensor([top - group.rank, group.rank + 1], dtype=dtype)
                expected = {
                    "SUM": [size * top - size * (size - 1) // 2, size * (size + 1) // 2],
                    "MIN": [top - size + 1, 1],
                    "MAX": [top, size],
                }
                for name, values in expected.items():
                    tensor = pair.repeat(numel // 2)
                    dist.all_reduce(tensor, getattr(ReduceOp, name), group)
                    assert tensor[-2:].tolist() == [v % (top + 1) for v in values], (dtype, name)
        error = failure(lambda: dist.all_reduce(pair, ReduceOp.AVG, group))
        assert isinstance(error, TypeError) and "uint64" in str(error)


def overlapping(world: World, engine: str) -> None:
    """An input anywhere in the output, larger than a step: as if it had been a copy."""
    size = world.world_size
    numel = 300_000
    with on_engine(engine), group_of(world) as group:
        for shift in (0, 7, -5, numel // 2):
            memory = torch.zeros(numel * (size + 2))
            out = memory[numel:-numel]
            begin = numel * (1 + group.rank) + shift
            piece = memory[begin : begin + numel]
            piece.copy_(torch.arange(numel) + group.rank)
            expected = torch.stack([torch.arange(float(numel)) + rank for rank in range(size)])
            dist.all_gather_into_tensor(out, piece, group)
            assert same(out.view(size, numel), expected), shift
            memory.zero_()
            piece.copy_(torch.arange(numel) + group.rank)
            dist.all_gather(list(out.split(numel)), piece, group)
            assert same(out.view(size, numel), expected), shift
        for start in (group.rank * numel, 3, (group.rank + 1) % size * numel):
            whole = torch.arange(float(size * numel + 8))
            expected = whole[group.rank * numel : (group.rank + 1) * numel] * size
            part = whole[start : start + numel]
            dist.reduce_scatter_tensor(part, whole[: size * numel], group=group)
            assert same(part, expected), start


def left_by_a_peer(world: World) -> None:
    """A refusal that nobody answers is still the rank's own error (9)."""
    with short_lived(world, 0.5) as group:
        dist.barrier(group)
        if group.rank == 0:
            error = failure(lambda: dist.all_reduce(torch.ones(2), "sum", group))
            assert isinstance(error, TypeError)


def lists_of_tensors(world: World) -> None:
    """A list that is dense and sparse is refused before anything; works give the outputs."""
    size = world.world_size
    with process_group(world, "tpspan"):
        group: Any = torch_distributed.group.WORLD
        dense, sparse = torch.ones(3), torch.ones(3).to_sparse()
        for tensors in ([dense, sparse], [sparse, dense]):
            error = failure(group.allreduce_coalesced, tensors)
            assert isinstance(error, ValueError) and "layout" in str(error), error
        assert bool((dense == 1).all())
        meta = torch.ones(3, device="meta")
        for call in (lambda: group.allreduce([meta]), lambda: group.send([meta], 0, 0)):
            error = failure(call)
            assert isinstance(error, NotImplementedError) and "meta" in str(error), error
        for is_async in (False, True):
            gather_options = distributed_c10d.AllgatherOptions()
            gather_options.asyncOp = is_async
            out, parts = torch.zeros(3 * size), [torch.zeros(3) for _ in range(size)]
            works = (
                (group._allgather_base(out, dense, gather_options), [out]),
                (group.allgather([parts], [dense], gather_options), parts),
                (group.allgather_into_tensor_coalesced([out], [dense], gather_options), [out]),
            )
            for work, outputs in works:
                given = work.result()
                assert len(given) == len(outputs)
                assert all(one is other for one, other in zip(given, outputs, strict=True))
                assert all(bool((one == 1).all()) for one in outputs)
