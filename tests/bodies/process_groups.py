"""Programs of torch on ``init_process_group("tpspan")``, compared with the same ones on gloo."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import checkpoint as _checkpoint
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
from tpspan.distributed import groups
from tpspan.distributed import store_world as _store_world
from tpspan.launch.hosts import Member
from tpspan.launch.world import World

store_world: Any = _store_world
distributed_checkpoint: Any = _checkpoint
LIMIT = timedelta(seconds=60)


@contextmanager
def process_group(world: World, backend: str) -> Iterator[None]:
    """torch's default group over the ranks of a world."""
    store: Store | None = None
    if world.rank == 0:
        store = TCPStore(
            "127.0.0.1", 0, world.world_size, is_master=True, timeout=LIMIT, wait_for_workers=False
        )
    port = world.control.broadcast(store.port if isinstance(store, TCPStore) else None)
    if store is None:
        store = TCPStore("127.0.0.1", port, world.world_size, is_master=False, timeout=LIMIT)
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
    """The same programs on both backends give the same."""
    results = []
    for name in (backend, reference):
        before = dist.stats()
        with process_group(world, name):
            path = Path(folder) / f"{name.replace(':', '-')}-{world.world_size}"
            results.append(everything(world.device, path))
        served = dist.stats().num_served - before.num_served
        assert (served > 20) == (name == backend)
        if name == backend and world.world_size > 1:
            assert dist.stats().delegated.get("send", 0) or world.rank
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    for what, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[what], value, rtol=1e-5, atol=1e-6, msg=what)
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
        groups._of_process_group[group].close()  # type: ignore[index]


def between_domains(world: World) -> None:
    """Ranks that cannot all map each other's memory: gathers are hierarchical, the rest delegated.

    One host stands for several: every two ranks say that they are on a host of their own.
    """
    size, rank = world.world_size, world.rank
    this_member, default_world = store_world.this_member, groups.Group._default_world

    def member(gpus: tuple[str, ...]) -> Member:
        return replace(this_member(gpus), host=f"{socket.gethostname()} {rank // 2}")

    store_world.this_member = member
    groups.Group._default_world = lambda self: None  # type: ignore[method-assign]
    try:
        with process_group(world, "tpspan"):
            group = torch_distributed.group.WORLD
            for numel in (0, 1, 1000, 400_001):
                given = [torch.arange(numel) * (r + 1) for r in range(size)]
                out = torch.empty(size * numel, dtype=torch.int64)
                before = dist.stats().served.get("all_gather: between domains", 0)
                dist.all_gather_into_tensor(out, given[rank], group)
                assert out.equal(torch.cat(given))
                uneven = [torch.full((numel + r,), r) for r in range(size)]
                outs = [torch.empty_like(each) for each in uneven]
                work = dist.all_gather(outs, uneven[rank], group, async_op=True)
                work.wait()
                assert all(a.equal(b) for a, b in zip(outs, uneven, strict=True))
                counted = dist.stats().served.get("all_gather: between domains", 0) - before
                assert counted == (2 if size > 2 else 0)
            delegated = dist.stats().num_delegated
            x = torch.ones(5)
            dist.all_reduce(x, group=group)
            assert float(x[0]) == size
            dist.barrier(group)
            assert (dist.stats().num_delegated > delegated) == (size > 2)
    finally:
        store_world.this_member = this_member
        groups.Group._default_world = default_world  # type: ignore[method-assign]
