"""Gathered layers and read policies: the values of torch.nn.Linear, whichever way they are read."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import tpspan
from bodies.common import finish, gather
from tpspan import ClosedError, GatheredLinear, World, read_policy, share_parameters
from tpspan.errors import InUseError, PeerError
from tpspan.parallel import SharedParameters, chunks, staging
from tpspan.parallel.policy import Rates
from tpspan.parallel.rates import CACHE_VARIABLE, KnownRates, measure
from tpspan.spans import Span

PAGE = 2 << 20
# Rates that a test measures are nobody else's.
os.environ[CACHE_VARIABLE] = "0"


@contextmanager
def small_chunks(nbytes: int) -> Iterator[None]:
    """Cut weights as if they were far larger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_SMALLEST_CHUNK_NBYTES", nbytes)
        patch.setattr(chunks, "_LARGEST_CHUNK_NBYTES", 3 * nbytes)
        yield


def meet(world: World) -> None:
    finish(world)
    world.control.barrier()


def ordinary(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """The same layer on every rank."""
    torch.manual_seed(7)
    return nn.Linear(shape[1], shape[0], dtype=dtype).to(device)


def inputs(rank: int, features: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """What a rank multiplies: any leading dimensions, none at all, no rows, other strides."""
    random = torch.Generator().manual_seed(100 + rank)

    def new(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random).to(dtype).to(device)

    return [
        new(3, features),
        new(2, 1, features),
        new(features),
        new(0, features),
        new(features, 2).T,
        new(4, features)[::2],
        new(1, features, 2).transpose(1, 2),
    ]


def close_to(got: torch.Tensor | None, wanted: torch.Tensor | None, scale: float = 1.0) -> None:
    assert got is not None and wanted is not None
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 3e-2}[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=scale * tolerance)


def like_linear(
    world: World,
    shape: tuple[int, int],
    dtype: str,
    read: str,
    layout: str = "blocked",
    rows: list[int] | None = None,
    chunk_nbytes: int = PAGE,
) -> tuple[int, int, int]:
    """Forward and backward as ``nn.Linear`` on all ranks' inputs together; returns the counts."""
    kind, device = getattr(torch, dtype), world.device
    linear = ordinary(shape, kind, device)
    with small_chunks(chunk_nbytes):
        layer = GatheredLinear.from_linear(
            linear,
            world,
            read=read,  # type: ignore[arg-type]
            layout=layout,
            rows=rows,
        )
        bias = layer.bias
        assert bias is not None
        num = len(inputs(0, shape[1], kind, device))
        for index in range(num):
            results = []
            linear.zero_grad()
            for rank in range(world.world_size):
                x = inputs(rank, shape[1], kind, device)[index].requires_grad_()
                y = linear(x)
                # float32 partial sums of a bf16 layer would differ: the same grad everywhere
                y.backward(torch.ones_like(y))
                results.append((y.detach(), x.grad))
            layer.zero_grad()
            mine = inputs(world.rank, shape[1], kind, device)[index].requires_grad_()
            with torch.no_grad():
                close_to(layer(mine), results[world.rank][0], 10)
            y = layer(mine)
            assert y.shape == results[world.rank][0].shape
            close_to(y.detach(), results[world.rank][0], 10)
            y.backward(torch.ones_like(y))
            close_to(mine.grad, results[world.rank][1], 10)
            assert layer.weight.grad is not None and linear.weight.grad is not None
            wanted = layer._own_part(linear.weight.grad)
            close_to(layer.weight.grad, wanted, 10)
            close_to(bias.grad, linear.bias.grad, 10)
            del y
        stats = layer.stats()
    assert stats.scratch_nbytes <= 2 * shape[0] * shape[1] * kind.itemsize
    meet(world)
    layer.close()
    layer.close()
    return stats.num_in_place, stats.num_staged, stats.scratch_nbytes


def trains_like_linear(world: World, read: str, layout: str) -> None:
    """Each rank steps its own rows; with a barrier behind the step all read the new ones."""
    shape, device = (96, 16384), world.device
    linear = ordinary(shape, torch.float64, device)
    layer = GatheredLinear.from_linear(linear, world, read=read, layout=layout)  # type: ignore[arg-type]
    ours = torch.optim.AdamW(layer.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(linear.parameters(), lr=0.01)
    for step in range(4):
        batches = [
            torch.rand(3, shape[1], generator=torch.Generator().manual_seed(10 * step + rank))
            .double()
            .to(device)
            for rank in range(world.world_size)
        ]
        theirs.zero_grad()
        sum(linear(batch).square().sum() for batch in batches).backward()
        theirs.step()
        ours.zero_grad()
        layer(batches[world.rank]).square().sum().backward()
        ours.step()
        layer.barrier()
    close_to(layer.gathered, linear.weight.detach())
    meet(world)
    state = layer.state_dict()
    assert state["weight"].shape == layer.weight.shape
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.zero_()
    layer.load_state_dict(state if world.rank else {**state, "weight": before})
    meet(world)
    # The whole weight: each takes its rows, and they stay in the span.
    layer.load_state_dict(linear.state_dict(), assign=True)
    layer.barrier()
    assert torch.equal(layer.gathered, linear.weight)
    del state
    meet(world)
    layer.close()


def refusals(world: World) -> None:
    """Every misuse is answered in words; nothing is half done."""
    layer = GatheredLinear(64, 48, world=world, dtype=torch.float32)
    device = world.device
    x = torch.ones(2, 64, device=device)
    with pytest.raises(TypeError, match="x is of torch.float64, the weight of torch.float32"):
        layer(x.double())
    with pytest.raises(ValueError, match=r"x must be \(\*, 64\)"):
        layer(torch.ones(2, 63, device=device))
    with pytest.raises(ValueError, match="x must be on"):
        layer(torch.ones(2, 64, device="meta"))
    for refused in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            refused(layer)
    for changed in (layer.double, layer.half, lambda: layer.to("meta")):
        with pytest.raises(TypeError, match="lies in a span of"):
            changed()
    assert layer.to(device) is layer and layer.float() is layer
    assert layer.weight.data_ptr() == layer.span.local.data_ptr() or not layer.weight.numel()
    with pytest.raises(ValueError, match="read must be one of"):
        GatheredLinear(2, 2, world=world, read="sometimes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be multiplied"):
        GatheredLinear(2, 2, world=world, dtype=torch.int32)
    with pytest.raises(ValueError, match="is no weight of shape"):
        GatheredLinear(2, 2, world=world, span=layer.span)
    stays_in_its_span(layer, x)
    again = layer(x.requires_grad_())
    (first,) = torch.autograd.grad(again.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        first.sum().backward()
    del again, first
    late = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    if layer.weight.numel():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
    del late
    meet(world)
    own = layer.weight.detach().clone()
    layer.close()
    assert torch.equal(layer.weight, own)
    with pytest.raises(ClosedError):
        layer(x)
    with pytest.raises(ClosedError):
        layer.gathered  # noqa: B018


def stays_in_its_span(layer: GatheredLinear, x: torch.Tensor) -> None:
    """What would take the rows out of the span is refused, and changes nothing."""
    device, address = x.device, layer.weight.data_ptr()
    with torch.no_grad():
        expected = layer(x)
    moves = [lambda: layer.to_empty(device=device)]
    if device.type == "cpu":  # torch shares memory of a GPU without moving it
        moves.append(layer.share_memory)
    for moved in moves:
        with pytest.raises(TypeError, match="cannot be moved to other memory"):
            moved()
    assert layer.weight.data_ptr() == address
    other = {"weight": torch.zeros_like(layer.weight) if layer.weight.numel() else torch.ones(1)}
    with pytest.raises(RuntimeError, match="was replaced by one that no other rank can see"):
        functional_call(layer, other, (x,))
    own = layer.weight.data
    layer.weight.data = torch.ones(3, 64, device=device)
    for replaced in (lambda: layer(x), lambda: layer.gathered):
        with pytest.raises(RuntimeError, match="was replaced by one that no other rank can see"):
            replaced()
    layer.weight.data = own
    del own
    prune.identity(layer, "weight")
    if layer.weight.numel():
        with pytest.raises(RuntimeError, match="was replaced by one that no other rank can see"):
            layer(x)
    prune.remove(layer, "weight")
    layer.weight.data = layer.span.local
    # A refused close leaves a layer that trains the rows of the span, as before.
    kept = layer.gathered
    with pytest.raises((InUseError, PeerError)):
        layer.close()
    assert layer.weight.data_ptr() == address and not layer.span.is_closed
    del kept
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    meet(layer.span.world)


def over_a_given_span(world: World) -> None:
    """The span's values are kept, and the span is its owner's to close."""
    span = Span.allocate(world, (12, 8), torch.float32)
    span.local.fill_(float(world.rank))
    span.barrier()
    with GatheredLinear(8, 12, False, world=world, span=span) as layer:
        assert layer.bias is None
        y = layer(torch.ones(3, 8, device=world.device))
        assert torch.equal(y, (span.gathered.sum(1)).expand(3, 12))
        meet(world)
    assert not span.is_closed
    span.close()
    with pytest.raises(ClosedError):
        layer(torch.ones(3, 8, device=world.device))


def new_values_are_no_copies(world: World) -> None:
    """Ranks with one seed draw different rows; the bias is the same on all."""
    torch.manual_seed(3)
    layer = GatheredLinear(32, 40, world=world)
    assert layer.bias is not None
    bound = 32**-0.5
    whole = layer.gathered.clone()
    assert whole.unique().numel() > 0.95 * whole.numel()
    assert float(whole.abs().max()) <= bound and float(whole.std()) == pytest.approx(
        bound / 3**0.5, rel=0.1
    )
    assert len(set(gather(world, tuple(layer.bias.tolist())))) == 1
    meet(world)
    layer.close()


def under_autocast(world: World, read: str) -> None:
    shape, device = (64, 16384), world.device
    linear = ordinary(shape, torch.float32, device)
    layer = GatheredLinear.from_linear(linear, world, read=read)  # type: ignore[arg-type]
    x = torch.rand(3, shape[1], device=device)
    results = []
    for module in (linear, layer):
        with torch.autocast(device.type, torch.bfloat16):
            given = x.clone().requires_grad_()
            y = module(given)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert given.grad is not None
        results.append((y.detach(), given.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=2e-2, atol=2e-2)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert linear.weight.grad is not None
    wanted = layer._own_part(linear.weight.grad) * world.world_size
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=2e-2, atol=2e-2)
    meet(world)
    layer.close()


def agrees_with_differences(world: World, read: str) -> None:
    """Gradients against finite differences, with the same x on every rank."""
    layer = GatheredLinear(3, 5, world=world, dtype=torch.float64, read=read)  # type: ignore[arg-type]
    x = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.to(world.device).requires_grad_()
    layer.requires_grad_(False)
    assert torch.autograd.gradcheck(layer, (x,))
    meet(world)
    layer.close()


# ---------------------------------------------------------------- whole models


class Stack(nn.Module):
    """Linear layers of different sizes, in an order that can be changed; the last one is tied."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.order = [0, 1, 2, 3]
        self.checkpointed = False
        self.fails_at: int | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index in self.order:
            if index == self.fails_at:
                raise ArithmeticError("on purpose")
            step = self.layers[index]
            if self.checkpointed:
                x = x + torch.relu(checkpoint(step, x, use_reentrant=False))
            else:
                x = x + torch.relu(step(x))
        return self.head(self.norm(x))


@contextmanager
def shared_stack(
    world: World, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Stack, Stack, SharedParameters, torch.Tensor]]:
    """A shared model, a private one with the same values, and what this rank gives both."""
    torch.manual_seed(5)
    module = Stack().to(dtype)
    private = copy.deepcopy(module).to(world.device)
    shared = share_parameters(module, world)
    ids = torch.randint(0, 400, (3, 7), generator=torch.Generator().manual_seed(world.rank))
    yield module, private, shared, ids.to(world.device)
    meet(world)
    shared.close()


def alike(module: Stack, private: Stack, ids: torch.Tensor) -> None:
    """Forward and backward have the values of the private model."""
    results: list[list[torch.Tensor | None]] = []
    for model in (module, private):
        model.zero_grad()
        y = model(ids)
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    for got, wanted in zip(*results, strict=True):
        if got is not None or wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def model_like_private(world: World, read: str) -> tuple[int, int]:
    """Values, learned order, other orders, failures, checkpointing; returns the counts."""
    with shared_stack(world) as (module, private, shared, ids):
        policy = read_policy(module, read)  # type: ignore[arg-type]
        parameters = dict(module.named_parameters())
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0], [3, 1, 0, 0, 2], [], [1]):
            module.order = private.order = order
            alike(module, private, ids)
            with torch.no_grad():
                torch.testing.assert_close(module(ids), private(ids), rtol=1e-4, atol=1e-5)
        module.order = private.order = [0, 1, 2, 3]
        module.fails_at = 2
        with pytest.raises(ArithmeticError):
            module(ids)
        module.fails_at = None
        alike(module, private, ids)
        module.checkpointed = True
        alike(module, private, ids)
        module.checkpointed = False
        assert {n: id(p) for n, p in module.named_parameters()} == {
            n: id(p) for n, p in parameters.items()
        }
        stats = policy.stats()
        largest = max(p.nbytes for p in module.parameters())
        assert stats.scratch_nbytes <= 2 * largest
        assert (stats.scratch_nbytes > 0) == (stats.num_staged > 0)
        policy.remove()
        alike(module, private, ids)
        assert policy.stats() == stats
    return stats.num_in_place, stats.num_staged


def prefetches(world: World) -> list[tuple[int, int]]:
    """Copies begun ahead of their use, and weights waited for, per pass."""
    counts: list[list[int]] = []
    take, fill = staging_of("take"), staging_of("_fill")

    def counted(position: int, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[-1][position] += 1
            return step(*arguments)

        return call

    with shared_stack(world) as (module, _, _, ids), pytest.MonkeyPatch.context() as patch:
        buffers = tpspan.parallel.buffers.Buffers
        patch.setattr(buffers, "take", counted(0, take))
        patch.setattr(buffers, "_fill", counted(1, fill))
        read_policy(module, "staged")
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [3, 2, 1, 0]):
            module.order = order
            counts.append([0, 0])
            with torch.no_grad():
                module(ids)
    return [(taken, filled) for taken, filled in counts]


def staging_of(name: str) -> Callable[..., Any]:
    return getattr(tpspan.parallel.buffers.Buffers, name)


def sees_new_weights(world: World) -> None:
    """Between passes every rank may write; within a pass a write spoils the gradient audibly."""
    with shared_stack(world) as (module, private, shared, ids):
        read_policy(module, "staged")
        for factor in (2.0, 0.5, 3.0):
            with torch.no_grad():
                torch.testing.assert_close(module(ids), private(ids), rtol=1e-4, atol=1e-5)
                meet(world)
                if world.rank == world.world_size - 1:
                    for layer in module.layers:
                        layer.weight.mul_(factor)  # type: ignore[operator, union-attr]
                for layer in private.layers:
                    layer.weight.mul_(factor)  # type: ignore[operator, union-attr]
                meet(world)
                torch.testing.assert_close(module(ids), private(ids), rtol=1e-4, atol=1e-5)
        alike(module, private, ids)
        late = module(ids).sum()
        meet(world)
        with torch.no_grad():
            module.layers[1].weight.mul_(1)  # type: ignore[operator, union-attr]
        if world.world_size > 1 and _remote(shared, "layers.1.weight"):
            with pytest.raises(RuntimeError, match="has been written since"):
                late.backward()
        del late
        meet(world)
        alike(module, private, ids)


def _remote(shared: SharedParameters, name: str) -> bool:
    entry = shared.entries[name]
    owned = shared.span.layout.owned_slices(
        shared.span.world.rank, entry.offset_bytes, entry.nbytes
    )
    return sum(nbytes for _, nbytes in owned) < entry.nbytes


def graphs_of_gradients(world: World) -> None:
    """A second derivative keeps no copy; neither does looking at what a node has saved."""
    with shared_stack(world) as (module, private, _, ids):
        read_policy(module, "staged")
        results = []
        for model in (module, private):
            y = model(ids).square().mean()
            if model is module:
                weights = [
                    node._saved_mat2
                    for node in _nodes(y.grad_fn)
                    if type(node).__name__ == "MmBackward0"
                ]
                assert all(weight.isfinite().all() for weight in weights)
                del weights
            bias = model.layers[0].bias
            (first,) = torch.autograd.grad(y, bias, create_graph=True)  # type: ignore[arg-type]
            (second,) = torch.autograd.grad(first.square().sum(), model.layers[1].weight)  # type: ignore[arg-type]
            results.append((first.detach(), second.detach()))
            del y, first, second
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-7)
        duplicate = copy.deepcopy(module)
        with torch.no_grad():
            torch.testing.assert_close(duplicate(ids), private(ids), rtol=1e-4, atol=1e-5)
        with pytest.raises(TypeError, match="remove"):
            pickle.dumps(module)
        replaced = read_policy(module, "in_place")
        alike(module, private, ids)
        assert replaced.stats().num_staged == 0
    assert torch.isfinite(module(ids)).all()  # private by now


def _nodes(node: Any) -> Iterator[Any]:
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def trains_owned_pieces(world: World, read: str) -> None:
    """Each rank steps what it owns; as one process with all ranks' losses."""
    # In float32 the order in which gradients are added can turn a ReLU on or off.
    with shared_stack(world, torch.float64) as (module, private, shared, ids):
        policy = read_policy(module, read)  # type: ignore[arg-type]
        owned = tpspan.owned_parameters(module)
        with pytest.raises(ValueError, match=r"in the pieces of an earlier owned_parameters"):
            tpspan.owned_parameters(module)
        total = sum(entry.nbytes for entry in set(shared.entries.values()))
        assert sum(gather(world, sum(piece.nbytes for piece in owned.pieces))) == total
        ours = torch.optim.SGD(owned.pieces, lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(private.parameters(), lr=0.1, momentum=0.9)
        every = [torch.tensor(other, device=world.device) for other in gather(world, ids.tolist())]
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            for _ in range(2):  # gradients add up, as ever
                for other in every:
                    private(other).square().mean().backward()
                module(ids).square().mean().backward()
            assert all(parameter.grad is None for parameter in module.parameters())
            theirs.step()
            ours.step()
            owned.barrier()
        for got, wanted in zip(module.parameters(), private.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        meet(world)
        del ours
        owned.remove()
        policy.remove()
        module(ids).sum().backward()
        assert module.norm.weight.grad is not None
        tpspan.owned_parameters(module).remove()


def sparse_gradients_are_refused(world: World) -> None:
    module = nn.Embedding(8, 4, sparse=True).to(world.device)
    with share_parameters(module, world):
        owned = tpspan.owned_parameters(module)
        ids = torch.tensor([1, 2], device=world.device)
        with pytest.raises(TypeError, match="sparse, and owned_parameters adds up dense ones"):
            module(ids).sum().backward()
        assert all(piece.grad is None for piece in owned.pieces)
        module.weight.grad = None
        module.sparse = False
        module(ids).sum().backward()
        assert module.weight.grad is None
        assert all(piece.grad is not None for piece in owned.pieces)
        owned.remove()


def decides_by_rates(world: World) -> list[tuple[int, int]]:
    """``auto`` goes by rows of x once rates of a link are known; per rows, the counts."""
    rates = Rates(1e9, 1e9, 16, 1e11, 1e13, overlaps=True, start_s=1e-6)
    KnownRates.of(world).set(torch.float32, rates)
    layer = GatheredLinear(16384, 128, world=world, dtype=torch.float32)
    counts = []
    for rows in (1, 16, 32, 256):
        before = layer.stats()
        layer(torch.ones(rows, 16384, device=world.device))
        after = layer.stats()
        counts.append(
            (after.num_in_place - before.num_in_place, after.num_staged - before.num_staged)
        )
    meet(world)
    layer.close()
    KnownRates.of(world)._rates.clear()
    return counts


def order_of_steps(world: World) -> list[str]:
    """What a staged product asks of streams, in order, as a host alone can see it."""
    log: list[str] = []

    def noted(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            log.append(name)
            return step(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch, small_chunks(2 * PAGE):
        layer = GatheredLinear(32768, 512, world=world, dtype=torch.float32, read="staged")
        for name in ("follow", "copy", "wait", "join"):
            patch.setattr(staging.CopyLane, name, noted(name, getattr(staging.CopyLane, name)))
        patch.setattr(staging, "multiply", noted("multiply", staging.multiply))
        with torch.no_grad():
            layer(torch.ones(2, 32768, device=world.device))
    meet(world)
    layer.close()
    return log


# ---------------------------------------------------------------- streams


def slow_products(world: World, guarded: bool = True) -> bool:
    """Whether a product is right although the stream that multiplies is far behind the copies."""
    with pytest.MonkeyPatch.context() as patch, small_chunks(2 * PAGE):
        if not guarded:
            patch.setattr(staging.CopyLane, "follow", lambda self, streams=(): None)
        linear = ordinary((512, 32768), torch.float32, world.device)
        layer = GatheredLinear.from_linear(linear, world, read="staged")
        multiply = staging.multiply

        def slowly(*arguments: Any) -> None:
            torch.cuda._sleep(20_000_000)  # type: ignore[attr-defined]
            multiply(*arguments)

        patch.setattr(staging, "multiply", slowly)
        x = torch.rand(4, 32768, device=world.device)
        y, wanted = layer(x), linear(x)
        right = bool(torch.allclose(y, wanted, rtol=1e-3, atol=1e-3))
        meet(world)
        layer.close()
    return right


def captured(world: World, read: str, num_replays: int) -> None:
    """A graph of the layer's forward and of a model's is right with changing x and weights."""
    linear = ordinary((256, 16384), torch.float32, world.device)
    with small_chunks(PAGE), shared_stack(world) as (module, private, _, ids):
        layer = GatheredLinear.from_linear(linear, world, read=read)  # type: ignore[arg-type]
        read_policy(module, read)  # type: ignore[arg-type]
        x = torch.rand(4, 16384, device=world.device)
        with torch.no_grad():
            for _ in range(2):
                layer(x), module(ids)
            meet(world)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y, z = layer(x), module(ids)
            for step in range(num_replays):
                x.uniform_(generator=torch.Generator(world.device).manual_seed(step))
                ids.copy_((ids + 1) % 400)
                graph.replay()
                if step % 10 == 0 or step == num_replays - 1:
                    torch.testing.assert_close(y, linear(x), rtol=1e-3, atol=1e-3)
                    torch.testing.assert_close(z, private(ids), rtol=1e-3, atol=1e-4)
            meet(world)
            layer.weight.mul_(2)
            linear.weight.mul_(2)
            meet(world)
            graph.replay()
            torch.testing.assert_close(y, linear(x), rtol=1e-3, atol=1e-3)
        meet(world)
        del graph, y, z
        layer.close()


def measured_rates(world: World) -> dict[str, float]:
    """Measure on a weight of 64 MiB; plausible numbers come out."""
    with GatheredLinear(8192, 4096, world=world, dtype=torch.bfloat16) as layer:
        rates = measure(layer.reader.weight)
        meet(world)
    return {name: float(value) for name, value in asdict(rates).items()}
