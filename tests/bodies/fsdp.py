"""FSDP2 over spans, compared with FSDP2's own communication."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import nn
from torch.distributed import checkpoint as _checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tpspan
from bodies.process_groups import process_group, store_world
from tpspan.distributed import groups
from tpspan.distributed.fsdp_model import _parameter_groups
from tpspan.launch.world import World
from tpspan.spans.reads import Read
from tpspan.tools.bench.transformer import Transformer, next_token_loss

distributed_checkpoint: Any = _checkpoint
VOCABULARY = 97


@dataclass(frozen=True)
class Recipe:
    """How a model is sharded and trained.

    Attributes:
        reshard: ``reshard_after_forward``.
        bf16: compute and gather in bf16, reduce in this dtype.
        accumulate: micro-batches to a step, of which the last one alone reduces.
        prefetch: blocks whose gathers are begun ahead.
        frozen: the first block is not trained.
        recompute: the blocks' activations are computed again in backward.
        factor: what gradients are divided by instead of the number of ranks.
        unshard_async: every module's gather is begun by hand before the step.
        num_layers, hidden, num_steps: sizes.
    """

    reshard: bool | int = True
    bf16: torch.dtype | None = None
    accumulate: int = 1
    prefetch: int = 0
    frozen: bool = False
    recompute: bool = False
    factor: float | None = None
    unshard_async: bool = False
    num_layers: int = 3
    hidden: int = 64
    num_steps: int = 4


RECIPES = {
    "default": Recipe(),
    "kept": Recipe(reshard=False),
    "bf16": Recipe(bf16=torch.bfloat16),
    "bf16 reduced in fp32": Recipe(bf16=torch.float32),
    "fp16": Recipe(bf16=torch.float16),
    "accumulated": Recipe(accumulate=3),
    "prefetched": Recipe(prefetch=2, num_layers=5),
    "frozen": Recipe(frozen=True),
    "recomputed": Recipe(recompute=True),
    "factor": Recipe(factor=3.0),
    "unsharded ahead": Recipe(unshard_async=True),
    "odd": Recipe(hidden=24),
}


def build(
    recipe: Recipe, mesh: DeviceMesh, device: torch.device, *, plain_sums: bool = False
) -> Any:
    torch.manual_seed(7)
    model: Any = Transformer(recipe.num_layers, recipe.hidden, 4, VOCABULARY).to(device)
    if recipe.frozen:
        model.blocks[0].requires_grad_(False)
    policy = MixedPrecisionPolicy()
    if recipe.bf16 is not None:
        narrow = torch.float16 if recipe.bf16 == torch.float16 else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=recipe.bf16)
    if recipe.recompute:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    options: Any = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": recipe.reshard}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if recipe.prefetch:
        blocks = list(model.blocks)
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 :][: recipe.prefetch])
            before = blocks[max(number - recipe.prefetch, 0) : number]
            block.set_modules_to_backward_prefetch(before[::-1])
    if recipe.factor is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                set_factor(module, recipe.factor)
                if plain_sums:  # gloo knows no sums with a factor
                    module.set_force_sum_reduction_for_comms(True)
    return model


def set_factor(module: Any, factor: float) -> None:
    """By the name that the release of torch has for it."""
    newer = getattr(module, "set_gradient_divide_factor", None)
    (newer or module.set_reduce_scatter_divide_factor)(factor)


def train(model: Any, recipe: Recipe, device: torch.device) -> list[float]:
    """Losses of the steps, and of evaluations behind them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    losses = []
    rank = torch_distributed.get_rank()
    for step in range(recipe.num_steps):
        if recipe.unshard_async:
            handles = [block.unshard(async_op=True) for block in model.blocks]
            for handle in handles:
                handle.wait()
        for part in range(recipe.accumulate):
            if recipe.accumulate > 1:
                model.set_requires_gradient_sync(part == recipe.accumulate - 1)
            torch.manual_seed(1000 * step + 100 * part + rank)
            tokens = torch.randint(VOCABULARY, (2, 17)).to(device)
            loss = next_token_loss(model, tokens)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(5)
        tokens = torch.randint(VOCABULARY, (2, 9)).to(device)
        with without_gradients():
            losses.append(float(next_token_loss(model, tokens)))
    return losses


@contextmanager
def reference_group(world: World) -> Iterator[DeviceMesh]:
    """A mesh over gloo or NCCL; gloo also where ranks share a GPU, which NCCL refuses."""
    shared = any(world.control.all_gather(world.shares_device))
    nccl = world.backend == "cuda" and not shared
    with process_group(world, "nccl" if nccl else "gloo"):
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        yield mesh
        close_groups()


def close_groups() -> None:
    """Worlds that were made over torch's groups."""
    gc.collect()
    for group in list(groups._of_process_group.values()):
        group.close()
    groups._of_process_group.clear()


def trained_alike(world: World, name: str, backend: str = "", read: Read = "auto") -> None:
    """A recipe with FSDP2's own communication and over spans: the same losses."""
    recipe = RECIPES[name]
    with reference_group(world) as mesh:
        reference = build(recipe, mesh, world.device, plain_sums=True)
        theirs = train(reference, recipe, world.device)
        if not backend:
            ours = train_over_spans(world, recipe, mesh, read)
    if backend:
        with process_group(world, backend):
            mesh = init_device_mesh(world.device.type, (world.world_size,))
            ours = train_over_spans(world, recipe, mesh, read)
    compare(world, recipe, ours, theirs)


def train_over_spans(world: World, recipe: Recipe, mesh: DeviceMesh, read: Read) -> list[float]:
    model = build(recipe, mesh, world.device)
    used = tpspan.use_spans(model, read=read)
    losses = train(model, recipe, world.device)
    stats = used.stats()
    num_modules = recipe.num_layers + 1
    if world.world_size == 1:
        assert stats.num_modules == 0 and len(stats.left) == num_modules
    else:
        assert stats.left == () and stats.num_modules == num_modules
        assert stats.num_gathers >= recipe.num_layers * recipe.num_steps
        assert stats.num_reduces == (num_modules - recipe.frozen) * recipe.num_steps
        assert 0 < stats.held_nbytes <= stats.most_nbytes
    used.close()
    used.close()
    assert used.stats().num_buffers == 0
    gathered = used.stats().num_gathers
    if recipe.factor is None:  # with it gloo could not go on
        assert losses != train(model, recipe, world.device), "training goes on, without spans"
    assert used.stats().num_gathers == gathered
    return losses


def compare(world: World, recipe: Recipe, ours: list[float], theirs: list[float]) -> None:
    """Two ranks can add in one order only; with more ranks the order is another than gloo's."""
    assert len(ours) == len(theirs)
    # torch reduces a sum with a factor in another way, and NCCL and gloo round 16 bits each time.
    if world.world_size <= 2 and world.backend == "host" and recipe.factor is None:
        assert ours == theirs, f"not the same bits: {ours} {theirs}"
    is_narrow = recipe.bf16 is not None
    tolerance = 3e-2 if is_narrow else 1e-6 if world.backend == "host" else 1e-4
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine - other) <= tolerance * abs(other), (ours, theirs)


def resharded_to_fewer(world: World) -> None:
    """Backward gathers among two of four ranks; both groups share spans, of their own."""
    recipe = Recipe(reshard=2)
    with reference_group(world) as mesh:
        theirs = train(build(recipe, mesh, world.device), recipe, world.device)
        model = build(recipe, mesh, world.device)
        used = tpspan.use_spans(model)
        ours = train(model, recipe, world.device)
        assert len(used._memories) == 2
        assert all(memory.gathers.buffers for memory in used._memories.values())
        used.close()
        compare(world, recipe, ours, theirs)
        hand_made = build(recipe, mesh, world.device)
        for module in hand_made.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(tpspan.SpanAllGather(world))
        message = raised(ValueError, lambda: train(hand_made, recipe, world.device))
        assert "use_spans" in message


def replicated_shards(world: World) -> None:
    """HSDP: the shards' group is served, the replicas' is torch's."""
    recipe = Recipe()
    with reference_group(world):
        names = ("replicas", "shards")
        shape = (world.world_size // 2, 2)
        grid = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        theirs = train(build(recipe, grid, world.device), recipe, world.device)
        model = build(recipe, grid, world.device)
        used = tpspan.use_spans(model)
        ours = train(model, recipe, world.device)
        stats = used.stats()
        assert stats.left == () and stats.num_reduces == 4 * recipe.num_steps
        used.close()
        compare(world, recipe, ours, theirs)


def made_by_hand(world: World) -> None:
    """The objects of the two setters, over a world; two models share the memory."""
    recipe = RECIPES["default"]
    with reference_group(world) as mesh:
        theirs = train(build(recipe, mesh, world.device), recipe, world.device)
        gather, reduce = tpspan.SpanAllGather(world), tpspan.SpanReduceScatter(world)
        model, other = (build(recipe, mesh, world.device) for _ in range(2))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
        ours = train(model, recipe, world.device)
        compare(world, recipe, ours, theirs)
        with tpspan.use_spans(other, world) as used:
            compare(world, recipe, train(other, recipe, world.device), theirs)
            with tpspan.use_spans(model, world):
                pass
            assert used.stats().num_buffers, "the other model's are still used"
        assert used.stats().num_buffers == 0


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of what a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def refusals(world: World) -> None:
    recipe = RECIPES["default"]
    assert "fully_shard" in raised(ValueError, lambda: tpspan.use_spans(nn.Linear(2, 2)))
    near: Any = "near"
    assert "'near'" in raised(ValueError, lambda: tpspan.SpanAllGather(world, read=near))
    alone = world.subset([world.rank])
    with reference_group(world) as mesh:
        model = build(recipe, mesh, world.device)
        message = raised(ValueError, lambda: tpspan.use_spans(model, alone))
        assert f"sharded over {world.world_size} ranks" in message
        used = tpspan.use_spans(model)
        before = used.stats()
        again = raised(ValueError, lambda: tpspan.use_spans(model))
        assert f"uses spans already, by <SpansInUse by a {type(model).__name__}>" in again
        inner = raised(ValueError, lambda: tpspan.use_spans(model.blocks[0]))
        assert "uses spans already" in inner
        assert used.stats() == before
        handle = model.blocks[0].unshard(async_op=True)
        assert "in use" in raised(tpspan.InUseError, used.close)
        handle.wait()
        losses = train(model, recipe, world.device)
        used.close()
        assert losses
        with tpspan.use_spans(model) as used:
            assert train(model, recipe, world.device)
        assert used.stats().num_buffers == 0
        kept = [type(comm).__name__ for comm in communication(model)]
        assert not any(name.startswith("Span") for name in kept), kept
    alone.close()


def communication(model: nn.Module) -> list[object]:
    """What the FSDP2 modules of a model gather with."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups(module)
    ]
    return [group._all_gather_comm for group in groups]


def not_one_domain(world: World) -> None:
    """Ranks that say they are on different hosts: torch's own communication stays, and says so."""
    recipe = RECIPES["default"]
    this_member, default_world = store_world.this_member, groups.Group._default_world

    def member(gpus: tuple[str, ...]) -> Any:
        return replace(this_member(gpus), host=f"host {world.rank}")

    store_world.this_member = member
    groups.Group._default_world = lambda self: None  # type: ignore[method-assign]
    try:
        with reference_group(world) as mesh:
            theirs = train(build(recipe, mesh, world.device), recipe, world.device)
            model = build(recipe, mesh, world.device)
            with tpspan.use_spans(model) as used:
                stats = used.stats()
                assert stats.num_modules == 0 and len(stats.left) == recipe.num_layers + 1
                assert all("domain" in reason for _, reason in stats.left)
                assert train(model, recipe, world.device) == theirs
            # Made by hand for such ranks they do what torch does, and count it.
            model = build(recipe, mesh, world.device)
            before = tpspan.distributed.stats().num_delegated
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(tpspan.SpanAllGather(mesh.get_group()))
                    module.set_custom_reduce_scatter(tpspan.SpanReduceScatter(mesh.get_group()))
            assert train(model, recipe, world.device) == theirs
            assert tpspan.distributed.stats().num_delegated > before
    finally:
        store_world.this_member = this_member
        groups.Group._default_world = default_world  # type: ignore[method-assign]


def checkpoints(world: World, folder: str) -> None:
    """A model over spans is saved, and loaded into another one."""
    recipe = RECIPES["default"]
    with reference_group(world) as mesh:
        model, other = (build(recipe, mesh, world.device) for _ in range(2))
        with tpspan.use_spans(model), tpspan.use_spans(other):
            train(model, recipe, world.device)
            saved = get_model_state_dict(model)
            distributed_checkpoint.save(saved, checkpoint_id=folder)
            loaded = get_model_state_dict(other)
            distributed_checkpoint.load(loaded, checkpoint_id=folder)
            set_model_state_dict(other, loaded)
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert isinstance(mine, DTensor) and isinstance(theirs, DTensor)
                # Not whole: gloo, which stands in where ranks share a GPU, cannot gather there.
                assert mine.to_local().equal(theirs.to_local())
            assert train(other, recipe, world.device) == train(model, recipe, world.device)
            del saved, loaded


def given_back(world: World) -> None:
    """Spans come and go with their handle; nothing is left behind."""
    recipe = RECIPES["default"]
    held = []
    with reference_group(world) as mesh:
        model = build(recipe, mesh, world.device)
        for _ in range(4):
            with tpspan.use_spans(model):
                train(model, recipe, world.device)
            maps = Path("/proc/self/maps").read_text().count("/memfd:")
            held.append((maps, len(list(Path("/proc/self/fd").iterdir()))))
    assert held[1:] == held[1:2] * 3, held
