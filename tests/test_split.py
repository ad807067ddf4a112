"""Language models cut into stages, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tpspan.parallel.pipeline_cut import LayerCosts
from tpspan.parallel.split import split, tied_parameters
from tpspan.tools.bench.transformer import Transformer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 5,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES, "tie_word_embeddings": True},
    "Mistral": SIZES,
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 8},
    "GPT2": GPT2,
}
EVEN = LayerCosts((1.0,) * 5)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def through(stages: Any, x: torch.Tensor, **more: Any) -> torch.Tensor:
    for stage in stages:
        x = stage(x, **more)
    return x


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_what_the_model_gives(family: str, num_stages: int) -> None:
    model = model_of(family)
    tokens = torch.randint(64, (2, 9))
    with torch.inference_mode():
        expected = model(tokens).logits
        stages = split(model, num_stages, costs=EVEN)
        assert through(stages, tokens).equal(expected)
        for stage in stages:
            stage.cache = None
        parts = [through(stages, part, use_cache=True) for part in tokens.split([4, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
    assert [number for stage in stages for number in stage.layers] == list(range(5))
    assert [stage.is_first for stage in stages] == [n == 0 for n in range(num_stages)]


def test_no_parameter_is_lost_or_held_twice() -> None:
    for family in FAMILIES:
        model = model_of(family)
        whole = {id(each) for each in model.parameters()}
        stages = split(model, 3, costs=EVEN)
        held = [id(each) for stage in stages for each in stage.parameters()]
        tied = tied_parameters(stages)
        assert set(held) == whole and len(held) == len(whole) + len(tied)
        assert bool(tied) == (family in ("Llama", "GPT2"))
        for first, last in tied:
            assert stages[0].get_parameter(first) is stages[-1].get_parameter(last)
        assert tied_parameters(stages[:1]) == []


def test_a_model_of_ones_own_by_measured_time() -> None:
    model = Transformer(6, 32, 2, 64)
    tokens = torch.randint(64, (2, 9))
    expected = model(tokens)
    stages = split(model, 3)
    assert through(stages, tokens).equal(expected)
    assert all(len(stage.layers) for stage in stages)
    assert stages[1].training


def test_without_memory_parameters_are_counted() -> None:
    with torch.device("meta"):
        model = Transformer(6, 32, 2, 2048)  # the head weighs five layers
    assert [len(stage.layers) for stage in split(model, 2)] == [5, 1]


def test_given_starts() -> None:
    stages = split(Transformer(6, 32, 2, 64), 3, starts=(0, 1, 5))
    assert [len(stage.layers) for stage in stages] == [1, 4, 1]


class Skipping(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) + first
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Extra(Transformer):
    def __init__(self) -> None:
        super().__init__(2, 32, 2, 64)
        self.gate = nn.Linear(4, 4, bias=False)


def test_models_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="do not give what the model gives"):
        split(Skipping(3, 32, 2, 64), 2)
    with pytest.raises(ValueError, match="more than one head"):
        split(Extra(), 2)
    with pytest.raises(ValueError, match="no embedding"):
        split(nn.Sequential(nn.Linear(2, 2)), 1)
    config = transformers.GemmaConfig(**SIZES, head_dim=8)
    with pytest.raises(ValueError, match="family 'gemma'"):
        split(transformers.GemmaForCausalLM(config), 2)
    with pytest.raises(ValueError, match="cannot be cut"):
        split(Transformer(2, 32, 2, 64), 3)
    with pytest.raises(ValueError, match="cannot start"):
        split(Transformer(2, 32, 2, 64), 2, starts=(0,))
    with pytest.raises(ValueError, match="costs of 5 layers"):
        split(Transformer(2, 32, 2, 64), 2, costs=EVEN)
