"""The example and the bench of pipelines, as they are run; and the least time of a step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import missing_launcher, rank_environment
from harness.launchers import ROOT, run_script
from tpspan.tools.bench.command import parser
from tpspan.tools.bench.pipeline_floor import least_s
from tpspan.tools.bench.pipeline_schedules import models
from tpspan.tools.bench.pipeline_timeline import Stretch

MPIRUN = pytest.mark.skipif(
    missing_launcher("mpirun") is not None, reason=str(missing_launcher("mpirun"))
)


@MPIRUN
def test_the_example_generates_and_trains(tmp_path: Path) -> None:
    for name in ("transformers", "tokenizers", "jinja2"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["</s>", "what", "is", "this", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="?",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words_of = ["--model", str(tmp_path), "--prompt", "what is this ?", "--train", "--steps", "2"]
    example = ROOT / "examples" / "pipeline.py"
    done = run_script("mpirun", 2, example, *words_of, "--max-new-tokens", "5")
    assert done.returncode == 0, done.stdout
    assert "the same as in one process: True" in done.stdout
    assert len(re.findall(r"hand-overs: written in place", done.stdout)) == 2
    losses = re.search(r"losses: ([\d., ]+)", done.stdout)
    assert losses is not None and len(losses[1].split(",")) == 2


@MPIRUN
def test_the_bench_trains_under_schedules(tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    sizes = {"models": "64x8", "layers": 2, "microbatches": 4, "steps": 2}
    command = [sys.executable, "-m", "tpspan.tools.cli", "bench", "pipeline", "--backend", "host"]
    command += ["--ranks", "2", "--schedules", "1f1b", "--json", str(path)]
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    done = subprocess.run(
        command, env=rank_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["schema"] == "tpspan-bench-pipeline-schedules/2"
    (row,) = found["rows"]
    assert (row["schedule"], row["hidden"], row["seq"]) == ("1f1b", 64, 8)
    assert row["activation_nbytes"] == 64 * 8 * 4
    assert min(row["theirs_ms"], row["ours_ms"], row["ratio"], row["computing"]) > 0
    shown = [(figure["group"], figure["name"]) for figure in found["figures"]]
    for group in ("a step of 1f1b", "bubble of 1f1b", "peak memory of 1f1b"):
        for whose in ("torch's stage, gloo", "hand-overs"):
            assert any(other.startswith(group) and name == whose for other, name in shown), shown
    assert "losses equal" in done.stdout and "64 x 8" in done.stdout


def test_the_models_that_the_bench_trains() -> None:
    def of(*words: str) -> object:
        return models(parser().parse_args(["pipeline", *words]), "host")

    assert of("--models", "64x8, 128x32") == ((64, 8), (128, 32))
    several: Any = of()
    assert len(set(several)) > 3
    for wrong in ("64", "64x", "0x8", "64x8x2", ""):
        with pytest.raises(SystemExit):
            of("--models", wrong)
    with pytest.raises(SystemExit):
        of("--models", "64x8", "--hidden", "64")  # there is one way to say it


def test_the_least_time_of_a_step() -> None:
    """Two stages, two microbatches of 1 s forward and 2 s backward; the recorded times are late."""

    def did(stage: int, *whats: str) -> list[Stretch]:
        lengths = {"forward": 1.0, "backward": 2.0, "weights": 1.0, "hands over": 9.0}
        late = [10.0 * number for number in range(len(whats))]
        return [
            Stretch(stage, what, begin, begin + lengths[what])
            for what, begin in zip(whats, late, strict=True)
        ]

    first = did(0, "forward", "hands over", "forward", "backward", "backward")
    last = did(1, "forward", "backward", "forward", "backward")
    assert least_s([first, last]) == 1 + 2 * (1 + 2) + 2
    assert least_s([first + did(0, *["weights"] * 6), last]) > 9  # they need nobody
    assert least_s([did(0, "forward", "weights")]) == 2
    assert least_s([]) == 0
    with pytest.raises(ValueError, match="its neighbour has not"):
        least_s([did(0, "forward"), did(1, "forward", "forward")])
