"""Models whose parameters the ranks share."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bodies.model_files import Everything, tiny_llama_on_meta
from tpspan import CheckpointError, CollectiveMismatch, InUseError, PeerError, World
from tpspan.parallel import SharedParameters, load_weights, loading, share_parameters
from tpspan.parallel.checkpoint import open_checkpoint

PAGE = 2 << 20


def meet(world: World) -> None:
    """Wait until all ranks, and what they have queued on their devices, have come here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.control.barrier()


def everything(seed: int) -> Everything:
    torch.manual_seed(seed)
    module = Everything()
    module.norm.eval()  # or ranks would write its shared statistics at the same time
    return module


def assert_same(module: nn.Module, expected: dict[str, torch.Tensor], world: World) -> None:
    """Bit for bit, whatever the type."""
    state = module.state_dict()
    for name, wanted in expected.items():
        got = state[name]
        assert got.device == world.device, name
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
        first, second = (t.cpu().contiguous().reshape(-1) for t in (got, wanted))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name


def share_a_real_module(world: World) -> None:
    """All ranks get the values of rank 0, in the same Parameters, and the module runs on them."""
    expected = everything(0)
    module = everything(world.rank)
    vars(module.alias)["note"] = "kept"
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    shared = share_parameters(module, world, buffers=True)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    assert_same(module, expected.state_dict(), world)
    assert torch.equal(module.table.cpu(), expected.table)
    for name in ("conv.weight", "transposed"):
        assert module.get_parameter(name).stride() == expected.get_parameter(name).stride()
    assert module.head.weight is module.embedding.weight
    assert module.alias.data_ptr() == module.scalar.data_ptr()
    assert vars(module.alias)["note"] == "kept"
    assert shared.entries["head.weight"] is shared.entries["embedding.weight"]
    for name, entry in shared.entries.items():
        assert entry.offset_bytes % 256 == 0, name
        assert torch.equal(
            shared.tensor(name).cpu(), {**expected.state_dict(), "table": expected.table}[name]
        )
    ids, image = torch.arange(12).reshape(3, 4), torch.ones(1, 32, 5, 5)
    wanted = expected(ids, image)
    got = module(ids.to(world.device), image.to(world.device))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-2)
    got.backward()
    assert module.transposed.grad is not None
    del got
    meet(world)
    shared.close()
    shared.close()
    assert_same(module, expected.state_dict(), world)
    assert module.transposed.stride() == expected.transposed.stride()
    assert module.alias.data_ptr() == module.scalar.data_ptr()
    again = share_parameters(module, world)
    again.close()


def share_where_only_rank_0_is_real(world: World) -> None:
    if world.rank == 0:
        module = everything(0)
    else:
        with torch.device("meta"):
            module = Everything()
    shared = share_parameters(module, world, buffers=True)
    expected = everything(0)
    assert_same(module, expected.state_dict(), world)
    assert module.head.weight is module.embedding.weight
    assert module.alias.data_ptr() == module.scalar.data_ptr()
    assert isinstance(module.transposed, nn.Parameter) and module.transposed.requires_grad
    assert not module.count.requires_grad
    assert module.transposed.stride() == expected.transposed.stride()
    assert all(
        t is p for t, p in zip(module.lstm._flat_weights, module.lstm.parameters(), strict=True)
    )
    shared.close()


def memory_is_divided(world: World, num_layers: int) -> tuple[int, int, int]:
    """Returns bytes of the model, of this rank's blocks, and of what it physically holds."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1000, 1300) for _ in range(num_layers)))
    shared = share_parameters(module, world)
    for entry in shared.entries.values():
        parameter = shared.tensor(entry.names[0])
        begin = parameter.data_ptr() - shared.span.base_address
        for offset, nbytes in shared.span.layout.owned_slices(world.rank, begin, parameter.nbytes):
            at = (offset - begin) // 4
            parameter.view(-1)[at : at + nbytes // 4] = world.rank
        del parameter
    meet(world)
    total = sum(float(parameter.detach().sum()) for parameter in module.parameters())
    assert len(set(world.control.all_gather(total))) == 1
    meet(world)
    result = shared.nbytes, shared.span.stats().own_nbytes, shared.held_nbytes()
    meet(world)
    shared.close()
    return result


def step_of_an_optimizer(world: World) -> None:
    """One rank steps, all read the new values: the parameters are ordinary ones."""
    module = nn.Linear(64, 64).to(world.device)
    shared = share_parameters(module, world)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    meet(world)
    if world.rank == 0:
        module(torch.ones(2, 64, device=world.device)).sum().backward()
        optimizer.step()
    meet(world)
    assert not torch.equal(module.weight, before)
    sums = world.control.all_gather(float(module.weight.detach().sum()))
    assert len(set(sums)) == 1
    shared.close()


def structures_differ(world: World, difference: str) -> str:
    """Invariant 3: all ranks raise, and nothing was done."""
    odd = world.rank == world.world_size - 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {}
    if odd and difference == "shape":
        module[1] = nn.Linear(4, 5)
    elif odd and difference == "dtype":
        module[1].half()
    elif odd and difference == "tie":
        module[1].weight = module[0].weight
    elif odd and difference == "name":
        module.add_module("more", nn.Linear(1, 1))
    elif odd:
        options["buffers"] = True
    kept = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    with pytest.raises(CollectiveMismatch, match="share_parameters") as caught:
        share_parameters(module, world, **options)
    for name, parameter in module.named_parameters():
        assert kept[name][0] is parameter and kept[name][1] == parameter.data_ptr()
    return str(caught.value)


def refused_on_one_rank(world: World, kind: str) -> None:
    """Invariant 4: it fails on all, and says on which rank."""
    module: nn.Module = nn.Linear(3, 3)
    odd = world.rank == world.world_size - 1
    if odd:
        refused: dict[str, Any] = {
            "sparse": lambda: nn.Parameter(torch.ones(3, 3).to_sparse()),
            "lazy": nn.UninitializedParameter,
            "expanded": lambda: nn.Parameter(torch.ones(1).expand(3, 3)),
            "overlap": lambda: nn.Parameter(module.get_parameter("weight").data.T),
            "subclass": lambda: _Subclass(torch.ones(3, 3)),
        }
        if kind == "shared":
            alone = world.subset([world.rank])
            held = share_parameters(module, alone)
        else:
            module.other = refused[kind]()
    with pytest.raises((TypeError, ValueError) if odd else PeerError, match="other|weight|bias"):
        share_parameters(module, world)
    if odd and kind == "shared":
        held.close()
        alone.close()


class _Subclass(nn.Parameter):
    """A parameter with a meaning of its own."""


def load_everything(world: World, path: str, read_only: bool = False) -> int:
    """Load a module of all kinds from safetensors; returns the bytes that this rank wrote."""
    with torch.device("meta"):
        module = Everything()
    shared = share_parameters(module, world, buffers=True, read_only=read_only)
    report = load_weights(module, path)
    assert shared.is_frozen == read_only
    assert_same(module, everything(0).state_dict(), world)
    if read_only:
        with pytest.raises(CheckpointError, match="read-only"):
            load_weights(module, path)
    shared.close()
    return report.nbytes


def load_tiny_llama(world: World, path: str, expected: dict[str, torch.Tensor], dtype: str) -> int:
    """Every bit as expected; pages end inside permuted rows and inside quantised blocks."""
    kind = getattr(torch, dtype)
    module = tiny_llama_on_meta(kind)
    shared = share_parameters(module, world, read_only=True)
    cut = {name.split(".")[-2] for name in _cut_blocks(shared)}
    assert cut >= ({"q_proj", "o_proj"} if dtype == "float32" else set())
    report = load_weights(module, path)
    assert_same(module, {name: tensor.to(kind) for name, tensor in expected.items()}, world)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert report.missing == report.unexpected == ()
    total = sum(world.control.all_gather(report.nbytes))
    assert total == shared.nbytes
    shared.close()
    return report.nbytes


def _cut_blocks(shared: SharedParameters) -> list[str]:
    """Tensors in which a block of the span begins inside a row, and inside 256 elements."""
    found = []
    for name, entry in shared.entries.items():
        for run in shared.span.layout.runs:
            inside = run.offset_bytes - entry.offset_bytes
            element = inside // entry.dtype.itemsize
            if 0 < inside < entry.nbytes and element % entry.shape[-1] and element % 256:
                found.append(name)
    return found


def checkpoint_that_does_not_fit(world: World, path: str, wanted: str) -> None:
    """Nothing is half loaded, on any rank."""
    module = tiny_llama_on_meta()
    shared = share_parameters(module, world)
    if world.rank == 0:
        shared.span.gathered.fill_(7)
    shared.span.barrier()
    with pytest.raises(CheckpointError, match=wanted):
        load_weights(module, path)
    meet(world)
    assert bool((shared.span.gathered == 7).all())
    meet(world)
    shared.close()


def checkpoint_missing_on_one_rank(world: World, path: str) -> str:
    """Invariant 4."""
    module = tiny_llama_on_meta()
    shared = share_parameters(module, world)
    mine = path if world.rank != world.world_size - 1 else path + ".gone.gguf"
    with pytest.raises(CheckpointError, match="there is no file") as caught:
        load_weights(module, mine)
    load_weights(module, path)
    shared.close()
    return str(caught.value)


def different_files(world: World, paths: list[str]) -> None:
    """Invariant 3."""
    module = nn.Linear(4, 4)
    shared = share_parameters(module, world)
    with pytest.raises(CollectiveMismatch, match="load_weights"):
        load_weights(module, paths[world.rank % 2], strict=False)
    shared.close()


def a_write_to_frozen_parameters_fails(world: World) -> None:
    """Invariant 12: the writer dies, the data does not change."""
    module = nn.Linear(8, 8)
    shared = share_parameters(module, world, read_only=True)
    assert shared.is_frozen
    before = module.weight.detach().clone()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(module.weight.data_ptr(), 0, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    assert torch.equal(module.weight, before)
    shared.thaw()
    meet(world)
    if world.rank == 0:
        module.weight.data.zero_()
    meet(world)
    assert float(module.weight.detach().abs().sum()) == 0
    meet(world)
    shared.close()


def close_waits_for_other_tensors(world: World) -> None:
    """A view that somebody kept is never left dangling."""
    module = nn.Linear(8, 8)
    shared = share_parameters(module, world)
    view = module.weight.detach()
    wanted = view.clone()
    with pytest.raises((InUseError, PeerError)):
        shared.close()
    assert torch.equal(view, wanted) and torch.equal(module.weight, wanted)
    assert module.weight.data_ptr() != view.data_ptr()
    del view
    shared.close()


def an_error_inside_with_asks_no_other_rank(world: World) -> None:
    """Rank 0 leaves the block with an error while the others wait for it elsewhere."""
    module = everything(0).to(world.device)  # the buffers are not shared, and stay
    with pytest.raises(KeyError, match="mine"), share_parameters(module, world) as shared:
        if world.rank != 0:
            world.control.barrier()
        raise KeyError("mine")
    if world.rank == 0:
        world.control.barrier()
    assert shared.span.is_closed
    with pytest.raises(ValueError, match="closed"):
        shared.freeze()
    assert_same(module, everything(0).state_dict(), world)
    world.control.barrier()  # a block is free when the last rank has dropped it, not sooner


def an_error_inside_with_leaves_views_alone(world: World) -> None:
    """A view that somebody keeps stays what it was, and the span can be closed later."""
    module = nn.Linear(8, 8)
    with pytest.raises(KeyError, match="mine"), share_parameters(module, world) as shared:
        kept = module.weight.detach()
        wanted = kept.clone()
        raise KeyError("mine")
    assert not shared.span.is_closed
    assert torch.equal(kept, wanted)
    assert module.weight.data_ptr() != kept.data_ptr()
    meet(world)
    del kept
    shared.close()
    assert shared.span.is_closed


def reading_fails_halfway_on_one_rank(world: World, path: str, kind: str) -> str:
    """A damaged checkpoint is that on all ranks, another failure is the rank's own."""
    module = tiny_llama_on_meta()
    shared = share_parameters(module, world)
    odd = world.rank == world.world_size - 1

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of luck")

    def opened(path: str, names: list[str]) -> object:
        found = open_checkpoint(path, names)
        if odd and kind == "checkpoint":
            vars(found)["read"] = fail
        return found

    wanted: dict[tuple[str, bool], type[Exception]] = {
        ("checkpoint", True): CheckpointError,
        ("checkpoint", False): CheckpointError,
        ("other", True): RuntimeError,
        ("other", False): PeerError,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_checkpoint", opened)
        if odd and kind == "other":
            patch.setattr(loading, "box_shape", fail)
        with pytest.raises(wanted[kind, odd], match="out of luck") as caught:
            load_weights(module, path)
    text = str(caught.value)
    del caught
    load_weights(module, path)
    shared.close()
    return text


def a_dropped_module_is_not_copied(world: World) -> None:
    with torch.device("meta"):
        module = nn.Linear(100, 100)
    shared = share_parameters(module, world)
    del module
    shared.close()
    with pytest.raises(ValueError, match="closed"):
        shared.freeze()


def a_copy_is_private(world: World) -> None:
    """What is copied off a shared module is not shared, and can be loaded and shared itself."""
    module = nn.Linear(8, 8)
    shared = share_parameters(module, world)
    private = copy.deepcopy(module)
    assert private.weight.data_ptr() != module.weight.data_ptr()
    second = share_parameters(private, world)
    second.close()
    shared.close()


def nothing_to_share(world: World) -> None:
    module = nn.Sequential(nn.ReLU())
    shared = share_parameters(module, world)
    assert shared.nbytes == 0
    shared.freeze()
    shared.close()


def demo(world: World, model: str | None, prompts: list[str]) -> str:
    """Run ``tpspan demo --verify``; returns what rank 0 prints."""
    import contextlib
    import io

    from tpspan.tools import demo as command

    arguments = ["--verify", "--max-new-tokens", "12"]
    arguments += ["--model", model] if model else []
    for prompt in prompts:
        arguments += ["--prompt", prompt]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command.run(world, command.parser().parse_args(arguments))
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def generate_alike(world: World, path: str) -> None:
    """A tiny model of transformers, shared, generates what it does privately."""
    from transformers import LlamaForCausalLM

    folder = Path(path)
    private = LlamaForCausalLM.from_pretrained(folder).to(world.device)
    module = LlamaForCausalLM.from_pretrained(folder)
    shared = share_parameters(module, world, read_only=True)
    module.to(world.device)
    ids = torch.arange(1, 9, device=world.device).reshape(1, 8)
    wanted = private.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    got = module.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(got, wanted)
    del module
    shared.close()
