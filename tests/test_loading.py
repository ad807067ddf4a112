"""Checkpoints into modules: every bit in its place, or nothing at all."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bodies.model_files import HIDDEN, Everything, TinyLlama, write_gguf
from harness import Ranks
from tpspan.errors import CheckpointError
from tpspan.parallel.boxes import boxes_in_memory, memory_order
from tpspan.parallel.gguf_header import read_header
from tpspan.parallel.loading import load_weights

PAIR = pytest.mark.ranks(2, launchers=("mpirun",))


@dataclass(frozen=True)
class Files:
    """Checkpoints of the same tiny model, and what must be loaded from each."""

    gguf: Path
    from_gguf: dict[str, torch.Tensor]
    single: Path
    index: Path
    weights: dict[str, torch.Tensor]
    everything: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    folder = tmp_path_factory.mktemp("checkpoints")
    expected = write_gguf(folder / "tiny.gguf")
    torch.manual_seed(1)
    weights = {
        name: torch.randn(tensor.shape).to(torch.float16)
        for name, tensor in TinyLlama().state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "tiny.safetensors")
    index = write_shards(folder / "sharded", weights)
    torch.manual_seed(0)
    state = {name: tensor.contiguous() for name, tensor in Everything().state_dict().items()}
    del state["head.weight"], state["alias"]
    save_file(state, folder / "everything.safetensors")
    return Files(
        folder / "tiny.gguf",
        expected,
        folder / "tiny.safetensors",
        index,
        weights,
        folder / "everything.safetensors",
    )


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Three files and an index; returns the index."""
    folder.mkdir()
    where = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        part = {name: tensor for name, tensor in weights.items() if where[name] == file}
        save_file(part, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


@pytest.mark.ranks()
def test_gguf_is_dequantised_by_the_owners(ranks: Ranks, files: Files) -> None:
    ranks.run(
        "bodies.models:load_tiny_llama",
        path=str(files.gguf),
        expected=files.from_gguf,
        dtype="float32",
    )


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_gguf_is_rounded_as_torch_rounds(ranks: Ranks, files: Files) -> None:
    ranks.run(
        "bodies.models:load_tiny_llama",
        path=str(files.gguf),
        expected=files.from_gguf,
        dtype="bfloat16",
    )


@pytest.mark.ranks(1, 2, 4, launchers=("mpirun",))
def test_safetensors_single_and_sharded(ranks: Ranks, files: Files) -> None:
    for path in (files.single, files.index, files.index.parent):
        ranks.run(
            "bodies.models:load_tiny_llama",
            path=str(path),
            expected=files.weights,
            dtype="float32",
        )


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_every_kind_of_tensor_and_each_byte_once(ranks: Ranks, files: Files) -> None:
    for read_only in (False, True):
        written = ranks.run(
            "bodies.models:load_everything", path=str(files.everything), read_only=read_only
        )
        module = Everything()
        tensors = [
            *module.parameters(),
            *(
                module.get_buffer(n)
                for n in module.state_dict()
                if "norm.running" in n or "num_batches" in n
            ),
        ]
        whole = sum(tensor.nbytes for tensor in tensors) - module.alias.nbytes
        assert sum(written) == whole


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_files_cut_short_load_nothing(ranks: Ranks, files: Files, tmp_path: Path) -> None:
    for source in (files.gguf, files.single):
        data = source.read_bytes()
        for size in (0, 3, 40, 2000, len(data) // 2, len(data) - 1):
            short = tmp_path / f"short-{size}{source.suffix}"
            short.write_bytes(data[:size])
            ranks.run(
                "bodies.models:checkpoint_that_does_not_fit",
                path=str(short),
                wanted="damaged|cut short",
            )


@PAIR
def test_all_that_does_not_fit_is_one_error(ranks: Ranks, files: Files, tmp_path: Path) -> None:
    wrong = dict(files.weights)
    del wrong["model.norm.weight"]
    wrong["model.nothing"] = torch.ones(3)
    wrong["model.embed_tokens.weight"] = torch.ones(2, HIDDEN)
    save_file(wrong, tmp_path / "wrong.safetensors")
    ranks.run(
        "bodies.models:checkpoint_that_does_not_fit",
        path=str(tmp_path / "wrong.safetensors"),
        wanted=r"1 missing \(model.norm.weight\); 1 unexpected \(model.nothing\); "
        r"1 misshapen \(model.embed_tokens.weight is \(2, 768\)",
    )


@PAIR
def test_a_failure_on_one_rank_fails_on_all(ranks: Ranks, files: Files, tmp_path: Path) -> None:
    first, second = ranks.run("bodies.models:checkpoint_missing_on_one_rank", path=str(files.gguf))
    assert first.startswith("on rank 1: ")
    assert second.startswith("there is no file")
    for number in (1, 2):
        save_file({f"more{number}": torch.ones(1)}, tmp_path / f"{number}.safetensors")
    paths = [str(tmp_path / f"{number}.safetensors") for number in (1, 2)]
    ranks.run("bodies.models:different_files", paths=paths)


@PAIR
def test_a_failure_halfway_leaves_undefined_parameters_and_says_so(
    ranks: Ranks, files: Files
) -> None:
    """Invariant 4, as far as it can be kept: all ranks raise."""
    body = "bodies.models:reading_fails_halfway_on_one_rank"
    first, second = ranks.run(body, path=str(files.single), kind="checkpoint")
    wanted = "reading failed halfway, so the parameters are undefined: out of luck"
    assert (first, second) == (f"on rank 1: {wanted}", wanted)
    first, second = ranks.run(body, path=str(files.single), kind="other")
    assert second == "out of luck"
    assert "rank 1" in first and "left the parameters undefined: RuntimeError" in first


def test_a_private_module_is_loaded_too(files: Files) -> None:
    module = TinyLlama()
    report = load_weights(module, files.gguf, progress=False)
    state = module.state_dict()
    for name, wanted in files.from_gguf.items():
        assert torch.equal(state[name], wanted), name
    assert report.format_name == "GGUF"
    assert report.ignored == ("rope_freqs.weight",)
    assert report.nbytes == sum(parameter.nbytes for parameter in module.parameters())


def test_a_base_model_has_shorter_names(files: Files) -> None:
    module = TinyLlama().model
    load_weights(module, files.gguf)
    name = "layers.1.self_attn.q_proj.weight"
    assert torch.equal(module.get_parameter(name), files.from_gguf[f"model.{name}"])


def test_the_rows_of_qwen_stay_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    for architecture in ("qwen2", "qwen3"):
        expected = write_gguf(tmp_path / f"{architecture}.gguf", architecture)
        module = TinyLlama()
        load_weights(module, tmp_path / f"{architecture}.gguf")
        for name, wanted in expected.items():
            assert torch.equal(module.state_dict()[name], wanted), name


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    write_gguf(tmp_path / "other.gguf", "gemma2")
    with pytest.raises(CheckpointError, match="architecture 'gemma2'; those that can be loaded"):
        load_weights(TinyLlama(), tmp_path / "other.gguf")


def test_gguf_alike_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    write_gguf(tmp_path / "tiny.gguf", bias=False)
    for dtype in (torch.float32, torch.bfloat16):
        reference = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, gguf_file="tiny.gguf", dtype=dtype
        )
        module = transformers.LlamaForCausalLM(reference.config).to(dtype)
        load_weights(module, tmp_path / "tiny.gguf")
        wanted = reference.state_dict()
        assert set(wanted) == set(module.state_dict())
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name


def linear_with(weight: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file({"weight": weight, "bias": torch.ones(2)}, path)


@pytest.mark.parametrize(
    ("name", "write", "wanted"),
    [
        ("x.safetensors", linear_with(torch.ones(2, 2, dtype=torch.complex64)), "complex64 in"),
        ("x.bin", lambda path: path.write_bytes(b"x"), "neither a .safetensors nor a .gguf"),
        ("x.safetensors", lambda path: path.write_bytes(b"x" * 30), "cut short or damaged"),
        ("x.safetensors", lambda path: None, "there is no file"),
        ("", lambda path: None, "holds neither safetensors nor GGUF"),
        ("x.index.json", lambda path: path.write_text("[1]"), "is not an index"),
        (
            "x.index.json",
            lambda path: path.write_text('{"weight_map": {"weight": "gone.safetensors"}}'),
            "gone.safetensors is missing",
        ),
        ("x.gguf", lambda path: path.write_bytes(b""), "the file is empty"),
        ("x.gguf", lambda path: path.write_bytes(b"GGML" + bytes(40)), "magic bytes"),
        (
            "x.gguf",
            lambda path: path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(40)),
            "byte order",
        ),
        (
            "x.gguf",
            lambda path: path.write_bytes(b"GGUF" + struct.pack("<I", 9) + bytes(40)),
            "version 9",
        ),
    ],
)
def test_bad_files_are_answered_in_a_sentence(
    tmp_path: Path, name: str, write: Callable[[Path], None], wanted: str
) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    write(tmp_path / name)
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=wanted):
        load_weights(module, tmp_path / name)
    assert torch.equal(module.weight, before)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    index = write_shards(tmp_path / "sharded", {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    data = json.loads(index.read_text())
    data["weight_map"]["more"] = data["weight_map"]["bias"]
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="1 tensors that are not in the files it gives: more"):
        load_weights(nn.Linear(2, 2), tmp_path / "sharded")


def test_not_strict_loads_what_there_is(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2, 2), 3.0), "x": torch.ones(1)}, tmp_path / "x.safetensors")
    module = nn.Linear(2, 2)
    report = load_weights(module, tmp_path, strict=False)
    assert report.missing == ("bias",)
    assert report.unexpected == ("x",)
    assert float(module.weight.detach().sum()) == 12.0


def test_tied_weights_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    same = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}
    save_file(same, tmp_path / "same.safetensors")
    load_weights(module, tmp_path / "same.safetensors")
    assert float(module.get_parameter("b.weight").detach().sum()) == 4.0
    other = {"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="are tied in the module, but differ in the file"):
        load_weights(module, tmp_path / "other.safetensors")


def test_a_module_on_meta_has_nowhere_to_load_to(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="call share_parameters or to_empty first"):
        load_weights(nn.Linear(2, 2, device="meta"), tmp_path)


def test_damage_anywhere_in_a_header_ends_in_an_error(files: Files, tmp_path: Path) -> None:
    """Whatever a byte becomes, reading ends, and in nothing but ValueError if it fails."""
    data = files.gguf.read_bytes()
    end = min(tensor.offset_bytes for tensor in read_header(files.gguf).tensors)
    chance = random.Random(5)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        damaged = bytearray(data[: end + 64])
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(end)] = chance.choice((0, 1, 9, 127, 255))
        path.write_bytes(damaged)
        try:
            read_header(path)
        except ValueError:
            continue


def test_boxes_cover_a_range_of_memory_in_order() -> None:
    """Against an array that holds its own positions in memory."""
    chance = random.Random(3)
    for _ in range(500):
        shape = [chance.randint(1, 5) for _ in range(chance.randint(0, 4))]
        order = list(range(len(shape)))
        chance.shuffle(order)
        physical = torch.arange(math.prod(shape)).reshape([shape[dim] for dim in order])
        logical = physical.permute([order.index(dim) for dim in range(len(shape))])
        begin = chance.randint(0, logical.numel())
        end = chance.randint(begin, logical.numel())
        chunk = chance.randint(1, 9)
        got: list[int] = []
        for box in boxes_in_memory(logical.shape, logical.stride(), begin, end, chunk):
            part = logical[box]
            assert part.numel() <= chunk
            by_memory = part.permute(memory_order(logical.shape, logical.stride()))
            got += by_memory.reshape(-1).tolist()
        assert got == list(range(begin, end))
