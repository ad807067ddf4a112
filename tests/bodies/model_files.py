"""Small models and their checkpoints, written with the packages that define the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HIDDEN, HEADS, KV_HEADS, MIDDLE, VOCAB, LAYERS = 768, 12, 3, 256, 256, 2
HEAD_DIM = HIDDEN // HEADS


class Everything(nn.Module):
    """Every kind of parameter that a module can have, and two modules that look after their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 1500)
        self.head = nn.Linear(1500, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(32, 64, 3)
        last = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(last)
        self.lstm = nn.LSTM(8, 16)
        self.norm = nn.BatchNorm1d(8)
        self.scalar = nn.Parameter(torch.rand(()))
        self.alias = nn.Parameter(self.scalar.data)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.flags = nn.Parameter(torch.rand(7) > 0.5, requires_grad=False)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.sixteen = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.eight = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.count = nn.Parameter(torch.arange(9), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(1100, 700).T)
        fused = torch.randn(10, 8)
        self.left = nn.Parameter(fused[:, :4])
        self.right = nn.Parameter(fused[:, 4:])
        self.table: torch.Tensor
        self.register_buffer("table", torch.randn(6), persistent=False)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embedding(ids)).sum() * self.scalar * self.alias
        sequence = torch.ones(4, 2, 8, device=ids.device)
        y = self.lstm(sequence)[0].sum() + self.conv(image).sum()
        z = self.transposed.sum() + (self.left - self.right).sum() + self.sixteen.float().sum()
        return x + y + z + self.norm(sequence[0]).sum() + self.complex.abs().sum()


class Attention(nn.Module):
    """The projections of one layer, under the names that transformers gives them.

    The bias of k has 192 elements: what follows it does not begin at a multiple of 256.
    """

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.down_proj = nn.Linear(MIDDLE, HIDDEN, bias=False)


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.self_attn = Attention(bias)
        self.mlp = Feedforward()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)


class Body(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(bias) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)


class TinyLlama(nn.Module):
    """The parameters of a LlamaForCausalLM, tied head included, without transformers."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.model = Body(bias)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


def tiny_llama_on_meta(dtype: torch.dtype = torch.float32) -> TinyLlama:
    with torch.device("meta"):
        return TinyLlama().to(dtype=dtype)


# How each kind of tensor is stored. Q6_K has blocks of 256, longer than the alignment of the
# span: pages then end inside a block.
_STORED_AS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "F16",
    "attn_output": "Q6_K",
    "ffn_gate": "F32",
    "ffn_up": "BF16",
    "ffn_down": "Q4_1",
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path, architecture: str = "llama", bias: bool = True
) -> dict[str, torch.Tensor]:
    """Write random weights as llama.cpp would; returns what they must be once loaded."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(VOCAB)])
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))
    random = np.random.default_rng(7)
    expected = {}
    with torch.device("meta"):
        state = TinyLlama(bias).state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        name_of_module, _, suffix = name.rpartition(".")
        stem = _gguf_stem(name_of_module)
        values = random.standard_normal(tuple(tensor.shape), dtype=np.float32)
        stored = _STORED_AS.get(stem.rpartition(".")[2], "F32") if suffix == "weight" else "F32"
        kind = gguf.GGMLQuantizationType[stored]
        if stored == "Q6_K":
            data = _random_q6_k(random, values.shape)
        else:
            data = gguf.quantize(values, kind)
        writer.add_tensor(f"{stem}.{suffix}", data, raw_dtype=kind)
        loaded = torch.from_numpy(np.array(gguf.dequantize(data, kind))).reshape(tensor.shape)
        if architecture == "llama" and ".q_" in name:
            loaded = _halves_from_neighbours(loaded, HEADS)
        if architecture == "llama" and ".k_" in name:
            loaded = _halves_from_neighbours(loaded, KV_HEADS)
        expected[name] = loaded
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _gguf_stem(name: str) -> str:
    if name == "model.embed_tokens":
        return "token_embd"
    if name == "model.norm":
        return "output_norm"
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_NAMES[rest]}"


def _halves_from_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp rotates as neighbours, transformers rotates as halves of a head."""
    by_pair = weight.reshape(heads, HEAD_DIM // 2, 2, -1)
    return by_pair.transpose(1, 2).reshape(weight.shape).contiguous()


def _random_q6_k(random: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    blocks = random.integers(0, 256, (shape[0], shape[1] // 256, 210), dtype=np.uint8)
    blocks[..., -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)
