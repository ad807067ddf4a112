"""Programs of torch on ``init_process_group("tpspan")``, compared with the same ones on gloo."""

from __future__ import annotations

import gc
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import checkpoint as _checkpoint
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import tpspan.distributed as dist
from bodies.common import failure
from tpspan.distributed import groups, through_host
from tpspan.distributed import store_world as _store_world
from tpspan.errors import ClosedError, CollectiveMismatch
from tpspan.launch.hosts import Member
from tpspan.launch.world import World

store_world: Any = _store_world
distributed_checkpoint: Any = _checkpoint
distributed_c10d: Any = _c10d
LIMIT = timedelta(seconds=60)


def store_of(world: World) -> tuple[Store, int]:
    """A store for the ranks of a world, served by the first of them, and its port."""
    served: Any = None
    if world.rank == 0:
        served = TCPStore(
            "127.0.0.1", 0, world.world_size, is_master=True, timeout=LIMIT, wait_for_workers=False
        )
    port = world.control.broadcast(None if served is None else served.port)
    if served is not None:
        return served, port
    return TCPStore("127.0.0.1", port, world.world_size, is_master=False, timeout=LIMIT), port


@contextmanager
def process_group(world: World, backend: str) -> Iterator[None]:
    """torch's default group over the ranks of a world."""
    store, _ = store_of(world)
    torch_distributed.init_process_group(
        backend,
        store=PrefixStore(backend, store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=LIMIT,
    )
    try:
        yield
        world.control.barrier()
    finally:
        torch_distributed.destroy_process_group()
        world.control.barrier()
        del store
        gc.collect()


def perceptron(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return layers.to(device)


def train(module: nn.Module, device: torch.device) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(100 * step + torch_distributed.get_rank())
        loss = module(torch.randn(8, 32).to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def flat(module: nn.Module) -> torch.Tensor:
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in full]).cpu()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


def tensor_parallel(mesh: DeviceMesh, device: torch.device, results: dict[str, Any]) -> None:
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(perceptron(device), mesh, plan)
    torch.manual_seed(3)
    output = module(torch.randn(4, 32).to(device))
    output.sum().backward()
    results["tensor parallel"] = whole(output)
    plan = {
        "norm": SequenceParallel(),
        "linear": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    module = parallelize_module(Normed().to(device), mesh, plan)
    torch.manual_seed(4)
    x = torch.randn(2, 4 * torch_distributed.get_world_size(), 32).to(device)
    results["sequence parallel"] = whole(module(x))


def redistribute(mesh: DeviceMesh, device: torch.device, path: Path) -> dict[str, Any]:
    rank = torch_distributed.get_rank()
    torch.manual_seed(5)
    x = torch.randn(7, 6).to(device)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    assert rows.redistribute(placements=[Replicate()]).to_local().equal(x)
    assert rows.redistribute(placements=[Shard(1)]).full_tensor().equal(x)
    partial = DTensor.from_local(x * (rank + 1), mesh, [Partial()])
    results = {
        "partial to replicate": whole(partial.redistribute(placements=[Replicate()])),
        "partial to shard": whole(partial.redistribute(placements=[Shard(0)])),
    }
    distributed_checkpoint.save({"x": rows}, checkpoint_id=path)
    loaded = {"x": distribute_tensor(torch.zeros(7, 6).to(device), mesh, [Shard(0)])}
    distributed_checkpoint.load(loaded, checkpoint_id=path)
    assert loaded["x"].full_tensor().equal(x)
    return results


def calls(device: torch.device) -> dict[str, Any]:
    rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    summed = torch.arange(5.0, device=device) + rank
    torch_distributed.all_reduce(summed)
    gathered = [torch.zeros(3, device=device) for _ in range(size)]
    torch_distributed.all_gather(gathered, torch.full((3,), float(rank), device=device))
    sent = torch.full((2,), 1j * rank, dtype=torch.complex64, device=device)
    torch_distributed.broadcast(sent, size - 1)
    objects: list[Any] = [None] * size
    torch_distributed.all_gather_object(objects, {"rank": rank})
    first = torch_distributed.new_group([0])
    if rank == 0:
        torch_distributed.all_reduce(torch.ones(3, device=device), group=first)
    elif size > 1:
        assert first == torch_distributed.GroupMember.NON_GROUP_MEMBER
    swapped = torch.empty(size, device=device)
    own = torch.arange(float(size), device=device) + 10 * rank
    torch_distributed.all_to_all_single(swapped, own)
    if rank == 0 and size > 1:
        torch_distributed.send(torch.ones(2, device=device), 1)
    if rank == 1:
        received = torch.zeros(2, device=device)
        torch_distributed.recv(received, 0)
        assert float(received.sum()) == 2
    root = [torch.zeros(2, device=device) for _ in range(size)] if rank == 0 else None
    torch_distributed.gather(torch.ones(2, device=device) * rank, root, 0)
    work: Any = torch_distributed.all_reduce(own, async_op=True)
    future = work.get_future()
    work.wait()
    future.wait()
    torch_distributed.barrier()
    return {
        "all_reduce": summed.cpu(),
        "all_gather": torch.stack(gathered).cpu(),
        "broadcast": sent.cpu(),
        "objects": [each["rank"] for each in objects],
        "all_to_all": swapped.cpu(),
        "async": own.cpu(),
    }


def everything(device: torch.device, path: Path) -> dict[str, Any]:
    size = torch_distributed.get_world_size()
    results = calls(device)
    module: nn.Module = DistributedDataParallel(perceptron(device))
    train(module, device)
    results["ddp"] = flat(module)
    mesh = init_device_mesh(device.type, (size,))
    sharded = perceptron(device)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, device)
    results["fsdp"] = flat(sharded)
    results |= redistribute(mesh, device, path)
    tensor_parallel(mesh, device, results)
    if size % 2 == 0:
        grid = init_device_mesh(device.type, (size // 2, 2))
        inner = torch.ones(2, device=device) * (torch_distributed.get_rank() + 1)
        torch_distributed.all_reduce(inner, group=grid.get_group(1))
        results["mesh"] = inner.cpu()
    return results


def programs(world: World, folder: str, backend: str, reference: str) -> None:
    """The same programs on both backends give the same.

    Where ranks share a GPU the reference runs on the CPU: there is no NCCL then.
    """
    results = []
    for name in (backend, reference):
        device = torch.device("cpu") if name == "gloo" else world.device
        before = dist.stats()
        with process_group(world, name):
            path = Path(folder) / f"{name.replace(':', '-')}-{world.world_size}"
            results.append(everything(device, path))
        served = dist.stats().num_served - before.num_served
        assert (served > 20) == (name == backend)
        if name == backend and world.world_size > 1:
            assert dist.stats().delegated.get("send", 0) or world.rank
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    for what, value in theirs.items():
        if isinstance(value, torch.Tensor):
            # The CPU rounds otherwise than a GPU, from the first product on.
            rtol, atol = (1e-5, 1e-6) if device == world.device else (1e-4, 1e-5)
            torch.testing.assert_close(ours[what], value, rtol=rtol, atol=atol, msg=what)
            if world.world_size <= 2 and world.backend == "host":
                assert ours[what].equal(value), f"{what} must have the same bits with two ranks"
        else:
            assert ours[what] == value


def functions_over_torch_groups(world: World) -> None:
    """The functions take torch's groups of other backends, and delegate what spans cannot do."""
    size = world.world_size
    with process_group(world, "gloo"):
        group = torch_distributed.group.WORLD
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == size
        before = dist.stats().num_delegated
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,))
        dist.all_reduce(sparse, group=group)
        assert dist.stats().num_delegated == before + 1
        for wrong in (3, [group]):
            with pytest.raises(TypeError, match="group must be a World or a process group, not"):
                dist.all_reduce(x, group=wrong)
        groups._of_process_group[group].close()  # type: ignore[index]
        with pytest.raises(ClosedError, match="was destroyed"):
            dist.all_reduce(torch.ones(3), group=group)


@contextmanager
def worlds_of_their_own() -> Iterator[None]:
    """Groups do not find that the default world is one of their ranks."""
    default_world = groups.Group._default_world
    groups.Group._default_world = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        groups.Group._default_world = default_world  # type: ignore[method-assign]


def destroyed(world: World) -> None:
    """What was made for a group that torch destroys goes in the next call to whatever group."""
    everyone = list(range(world.world_size))
    x = torch.ones(1000)
    held = []
    with worlds_of_their_own(), process_group(world, "gloo"):
        for _ in range(5):
            group: Any = torch_distributed.new_group(everyone, backend="gloo")
            dist.all_reduce(x, group=group)
            held.append(holdings())
            torch_distributed.destroy_process_group(group)
            del group
        descriptors, *others = zip(*held[1:], strict=True)
        assert all(len(set(each)) == 1 for each in others), held
        # gloo's connections come and go in their own time; one kept each time would make three
        assert max(descriptors) - min(descriptors) < 3, held
        kept: Any = torch_distributed.new_group(everyone, backend="gloo")
        dist.all_reduce(x, group=kept)
        torch_distributed.destroy_process_group(kept)
        dist.all_reduce(x, group=torch_distributed.group.WORLD)
        assert len(groups._with_worlds) == 1, "held on to, and closed all the same"
        with pytest.raises(ClosedError, match="was destroyed"):
            dist.all_reduce(x, group=kept)
        other: Any = torch_distributed.new_group(everyone, backend="gloo")
        torch_distributed.destroy_process_group(other)
        with pytest.raises(ValueError, match="was destroyed"):
            dist.all_reduce(x, group=other)
        del kept, other
    groups._close_destroyed()
    assert not groups._with_worlds


def holdings() -> tuple[int, int, int]:
    """Descriptors, mapped memory files and threads of this process."""
    maps = Path("/proc/self/maps").read_text().count("/memfd:")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def gone_at_once(world: World, backend: str) -> None:
    """A destroyed group is gone without a garbage collection, and its store serves no more."""
    gc.collect()
    gc.disable()
    try:
        with worlds_of_their_own():
            for _ in range(2):
                make_and_destroy(world, backend)
    finally:
        gc.enable()


def make_and_destroy(world: World, backend: str) -> None:
    store, port = store_of(world)
    torch_distributed.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=LIMIT
    )
    group: Any = torch_distributed.group.WORLD
    dist.all_reduce(torch.ones(3, device=world.device), group=group)
    ours = getattr(group, "span_group", None) or groups._of_process_group[group]
    (own,) = ours._own_worlds
    parts = [own, own._channel, *own._resources.values(), *ours._engines.values()]
    known = [(type(part).__name__, weakref.ref(part)) for part in parts]
    assert {"World", "StoreChannel", "Board", "Exchange"} <= {name for name, _ in known}
    del store, group, ours, own, parts
    world.control.barrier()
    torch_distributed.destroy_process_group()
    if world.rank == 0:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
    groups._close_destroyed()
    assert [name for name, part in known if part() is not None] == []
    world.control.barrier()


def compiled(world: World, backend: str) -> None:
    """torch.compile breaks its graph at every function, traces nothing of it, and goes on."""

    def step(x: torch.Tensor) -> torch.Tensor:
        size = torch_distributed.get_world_size()
        y, out = x + 1, x.new_empty(size * x.numel())
        dist.all_reduce(y)
        dist.all_gather_into_tensor(out, y)
        dist.broadcast(y, 0)
        dist.barrier()
        told = [None] * size
        dist.all_gather_object(told, 3)
        parts = [x.new_empty(x.numel()) for _ in range(size)]
        dist.all_gather(parts, y)
        own, single = torch.empty_like(y), torch.empty_like(y)
        dist.reduce_scatter(own, parts)
        dist.reduce_scatter_tensor(single, out)
        return torch.cat([y, out, own, single, *parts]) * 2

    with process_group(world, backend):
        x = torch.arange(4.0, device=world.device) + world.rank
        expected = step(x)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Dynamo does not know")
            assert torch.equal(torch.compile(step, backend="aot_eager")(x), expected)


def coalesced(world: World, backend: str) -> None:
    """torch's manager for many calls as one, without and with waiting; sends and receives."""
    size, rank, device = world.world_size, world.rank, world.device
    manager = distributed_c10d._coalescing_manager
    gather = getattr(
        torch_distributed, "all_gather_single", torch_distributed.all_gather_into_tensor
    )
    scatter = getattr(
        torch_distributed, "reduce_scatter_single", torch_distributed.reduce_scatter_tensor
    )
    lengths = (1, 1000, 100_003)
    with process_group(world, backend):
        # With a device torch also tells the group where the calls begin and end.
        for async_ops, at in ((False, None), (True, None), (False, device), (True, device)):
            summed = [torch.full((n,), rank + 1.0, device=device) for n in lengths]
            pieces = [torch.full((n,), float(rank), device=device) for n in lengths]
            gathered = [torch.empty(size, n, device=device) for n in lengths]
            wholes = [torch.full((size, n), rank + 1.0, device=device) for n in lengths]
            parts = [torch.empty(n, device=device) for n in lengths]
            total = size * (size + 1) / 2
            before = dist.stats().num_served

            def done(block: Any, async_ops: bool = async_ops) -> None:
                if async_ops:
                    block.wait()
                if device.type == "cuda":
                    torch.cuda.synchronize()

            with manager(device=at, async_ops=async_ops) as block:
                for tensor in summed:
                    torch_distributed.all_reduce(tensor)
            done(block)
            assert all(bool((tensor == total).all()) for tensor in summed)
            with manager(device=at, async_ops=async_ops) as block:
                for out, piece in zip(gathered, pieces, strict=True):
                    gather(out, piece)
            done(block)
            rows = torch.arange(float(size), device=device).view(-1, 1)
            assert all(bool((out == rows).all()) for out in gathered)
            with manager(device=at, async_ops=async_ops) as block:
                for part, whole in zip(parts, wholes, strict=True):
                    scatter(part, whole)
            done(block)
            assert all(bool((part == total).all()) for part in parts)
            assert dist.stats().num_served - before == 3 * len(lengths)
        if world.backend == "host" and size > 1:
            odd = [torch.ones(3 + (rank == size - 1)), torch.ones(5)]
            with manager(async_ops=True) as block:
                for tensor in odd:
                    torch_distributed.all_reduce(tensor)
            error = failure(block.wait)  # of the first call; the second went well
            assert isinstance(error, CollectiveMismatch)
            assert bool((odd[1] == size).all())
        if size > 1:
            ring(rank, size, device)


def ring(rank: int, size: int, device: torch.device) -> None:
    """Everybody sends to the right and receives from the left, in one batch."""
    for numel in (1, 1 << 20):
        sent, got = (
            torch.full((numel,), float(rank), device=device),
            torch.empty(numel, device=device),
        )
        batch = [
            torch_distributed.P2POp(torch_distributed.isend, sent, (rank + 1) % size),
            torch_distributed.P2POp(torch_distributed.irecv, got, (rank - 1) % size),
        ]
        before = dist.stats().delegated
        for work in torch_distributed.batch_isend_irecv(batch):
            work.wait()
        assert bool((got == (rank - 1) % size).all())
        for name in ("send", "recv"):
            assert dist.stats().delegated[name] == before.get(name, 0) + 1


def subgroups(world: World, backend: str) -> None:
    """Ranks of a subgroup are told by their global or their own numbers, as torch has it."""
    size, rank, device = world.world_size, world.rank, world.device
    with process_group(world, backend):
        inner: Any = torch_distributed.new_group(list(range(1, size)))
        x = torch.full((4,), float(rank), device=device)
        if rank == 0:
            for call in (dist.all_reduce, torch_distributed.all_reduce):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    assert call(x, group=inner) is None
                assert any("does not belong to the given group" in str(w.message) for w in said)
            assert not x.any()
        else:
            assert torch_distributed.get_rank(inner) == rank - 1
            dist.broadcast(x, size - 1, inner)
            assert bool((x == size - 1).all())
            x.fill_(rank)
            torch_distributed.broadcast(x, group_src=0, group=inner)
            assert bool((x == 1).all())
            wrong_root = failure(lambda: dist.broadcast(x, 0, inner))
            assert isinstance(wrong_root, ValueError), wrong_root
            out = torch.empty(size - 1, device=device)
            dist.all_gather_into_tensor(out, torch.full((1,), float(rank), device=device), inner)
            assert out.tolist() == list(range(1, size))
            gather = getattr(
                torch_distributed, "all_gather_single", torch_distributed.all_gather_into_tensor
            )
            for function in (dist.all_gather_into_tensor, gather):
                short = torch.empty(size, device=device)
                error = failure(lambda f=function, o=short: f(o, x, group=inner))
                assert isinstance(error, ValueError), error
                assert "world_size times input tensor size" in str(error)
            dist.barrier(inner)
        dist.barrier()
        # Groups that overlap, made and used in turn: no group's call waits for another's.
        pairs = [sorted({r, (r + 1) % size}) for r in range(size)]
        made = [torch_distributed.new_group(pair) for pair in pairs]
        for turn in range(3):
            for pair, group in zip(pairs, made, strict=True):
                if rank in pair:
                    y = torch.full((1000,), rank + turn, device=device)
                    torch_distributed.all_reduce(y, group=group)
                    assert bool((y == sum(pair) + turn * len(pair)).all())


def through_host_memory(world: World) -> None:
    """gloo for tensors that it gets copies of: results come back when the work is waited for."""
    rank, size, device = world.rank, world.world_size, world.device
    moved = set(through_host._MOVED)
    through_host._MOVED.add("cpu")  # on the host a copy is a copy as well
    try:
        with process_group(world, "gloo"):
            pg: Any = torch_distributed.group.WORLD
            gloo = through_host.ThroughHost(pg._get_backend(torch.device("cpu")))
            x = torch.full((5,), rank + 1.0, device=device)
            work = gloo.allreduce([x], distributed_c10d.AllreduceOptions())
            assert bool((x == rank + 1).all()), "not before somebody waits"
            work.wait()
            assert bool((x == size * (size + 1) / 2).all())
            assert work.is_completed() and work.is_success() and work.result()[0] is x
            right, left = (rank + 1) % size, (rank - 1) % size
            sent = torch.full((1 << 18,), float(rank), device=device)
            got = torch.empty(1 << 18, device=device).t()
            works = [gloo.send([sent], right, 7), gloo.recv([got], left, 7)]
            sent.fill_(-1)  # gloo has a copy of its own
            for each in works:
                each.wait()
            assert bool((got == left).all()) and bool((sent == -1).all())
            swapped = torch.empty(size, device=device)
            own = torch.arange(float(size), device=device) + 10 * rank
            options = distributed_c10d.AllToAllOptions()
            gloo.alltoall_base(swapped, own, [], [], options).wait()
            assert swapped.tolist() == [10.0 * peer + rank for peer in range(size)]
            outputs = [[torch.empty(2, device=device) for _ in range(size)]] if rank == 0 else []
            options = distributed_c10d.GatherOptions()
            options.rootRank = 0
            gloo.gather(outputs, [torch.full((2,), float(rank), device=device)], options).wait()
            assert [float(each[0]) for row in outputs for each in row] == (
                list(map(float, range(size))) if rank == 0 else []
            )
            future = gloo.broadcast([x], distributed_c10d.BroadcastOptions()).get_future()
            assert future.value()[0] is x
    finally:
        through_host._MOVED.clear()
        through_host._MOVED.update(moved)


def between_domains(world: World) -> None:
    """Ranks that cannot all map each other's memory: gathers are hierarchical, the rest delegated.

    One host stands for several: every two ranks say that they are on a host of their own.
    """
    size, rank, device = world.world_size, world.rank, world.device
    this_member, default_world = store_world.this_member, groups.Group._default_world

    def member(gpus: tuple[str, ...]) -> Member:
        return replace(this_member(gpus), host=f"{socket.gethostname()} {rank // 2}")

    store_world.this_member = member
    groups.Group._default_world = lambda self: None  # type: ignore[method-assign]
    try:
        with process_group(world, "tpspan"):
            group = torch_distributed.group.WORLD
            for numel in (0, 1, 1000, 400_001):
                given = [torch.arange(numel, device=device) * (r + 1) for r in range(size)]
                out = torch.empty(size * numel, dtype=torch.int64, device=device)
                before = dist.stats().served.get("all_gather: between domains", 0)
                dist.all_gather_into_tensor(out, given[rank], group)
                assert out.equal(torch.cat(given))
                uneven = [torch.full((numel + r,), r, device=device) for r in range(size)]
                outs = [torch.empty_like(each) for each in uneven]
                work = dist.all_gather(outs, uneven[rank], group, async_op=True)
                work.wait()
                assert all(a.equal(b) for a, b in zip(outs, uneven, strict=True))
                counted = dist.stats().served.get("all_gather: between domains", 0) - before
                assert counted == (2 if size > 2 else 0)
            delegated_calls(group, rank, size, device, crosses=size > 2)
    finally:
        store_world.this_member = this_member
        groups.Group._default_world = default_world  # type: ignore[method-assign]


def delegated_calls(
    group: Any, rank: int, size: int, device: torch.device, *, crosses: bool
) -> None:
    """Between domains torch's own backends reduce and broadcast, and every call is counted."""
    total = size * (size + 1) / 2

    def call(name: str, function: Any) -> None:
        for async_op in (False, True):
            before = dist.stats()
            work = function(async_op)
            if async_op:
                work.wait()
            after = dist.stats()
            assert after.delegated.get(name, 0) - before.delegated.get(name, 0) == crosses, name
            assert after.num_delegated - before.num_delegated == crosses, name
            assert (after.num_served - before.num_served == 0) == crosses, name

    for dtype in (torch.float32, torch.int64):
        x = torch.empty(5, dtype=dtype, device=device)
        part = torch.empty(3, dtype=dtype, device=device)
        whole = torch.full((3 * size,), rank + 1, dtype=dtype, device=device)

        def reduced(async_op: bool, x: torch.Tensor = x) -> Any:
            x.fill_(rank + 1)
            return dist.all_reduce(x, group=group, async_op=async_op)

        def scattered(
            async_op: bool, part: torch.Tensor = part, whole: torch.Tensor = whole
        ) -> Any:
            return dist.reduce_scatter_tensor(part, whole, group=group, async_op=async_op)

        def scattered_list(
            async_op: bool, part: torch.Tensor = part, whole: torch.Tensor = whole
        ) -> Any:
            pieces = list(whole.view(size, 3))
            return dist.reduce_scatter(part, pieces, group=group, async_op=async_op)

        def sent(async_op: bool, x: torch.Tensor = x) -> Any:
            x.fill_(rank)
            return dist.broadcast(x, size - 1, group, async_op)

        call("all_reduce", reduced)
        assert bool((x == total).all())
        call("reduce_scatter_tensor", scattered)
        assert bool((part == total).all())
        part.zero_()
        call("reduce_scatter", scattered_list)
        assert bool((part == total).all())
        call("broadcast", sent)
        assert bool((x == size - 1).all())
    call("barrier", lambda async_op: dist.barrier(group, async_op))
    objects: list[Any] = [None] * size
    before = dist.stats().delegated.get("all_gather_object", 0)
    dist.all_gather_object(objects, {"rank": rank, "pad": "x" * 100 * rank}, group)
    assert [each["rank"] for each in objects] == list(range(size))
    assert dist.stats().delegated.get("all_gather_object", 0) - before == crosses
