"""LoRA adapters over one base: processes that each train their own, and share the base's memory.

    python examples/adapters.py --adapters 8

Needs peft (pip install peft). The base is a small Llama with random weights unless --model names a
directory of transformers. It is published once; every process attaches it read-only and puts its
own adapter over it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import tpspan

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: everything needed is on this machine

from accelerate import init_empty_weights  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig  # noqa: E402
from transformers.utils import logging  # noqa: E402

NAME = "example-adapters"
SMALL = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def work(folder: str, number: int, device: str) -> None:
    """One adapter: attach the base, train the adapter on its own task, and tell what it costs."""
    import peft  # only these processes need it

    torch.set_num_threads(1)
    with init_empty_weights(include_buffers=False):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    base.tie_weights()
    attached = tpspan.attach_module(base, NAME)
    torch.manual_seed(number)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, config).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    tokens = torch.randint(0, 1024, (2, 32), device=device)  # its task: these by heart
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    own = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    print(json.dumps({"losses": losses, "own": own}), flush=True)
    input()
    print(attached.held_nbytes(), flush=True)
    input()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--model", type=Path, help="a directory of transformers with safetensors"
    )
    arguments.add_argument("--adapters", type=int, default=8)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--as-adapter", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.model and not options.model.exists():
        arguments.error(f"there is no {options.model}")
    if options.adapters < 1:
        arguments.error(f"{options.adapters} adapters share nothing")
    if importlib.util.find_spec("peft") is None:
        arguments.error("adapters are peft's: pip install peft")
    logging.set_verbosity_error()
    if options.as_adapter:
        folder, number = options.as_adapter
        work(folder, int(number), options.device)
        return

    model: Any
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(SMALL, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        publication = tpspan.publish(model.to(options.device), NAME, read_only=True)
        nbytes = publication.nbytes
        del model
        publication.close()
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--device", options.device),
                    *("--as-adapter", folder, str(number)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(options.adapters)
        ]

        def lines() -> list[Any]:
            found = [json.loads(p.stdout.readline()) for p in processes]  # type: ignore[union-attr]
            for process in processes:
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            return found

        found, held = lines(), lines()
        for process in processes:
            process.communicate()
    tpspan.remove(NAME)
    for number, one in enumerate(found):
        first, last = one["losses"][0], one["losses"][-1]
        print(f"[adapter {number}] loss {first:.3f} -> {last:.3f}, {one['own']:,} bytes of its own")
    print(f"bytes of the base: {nbytes:,}; held by {len(held)} processes: {sum(held):,}, ", end="")
    print(f"{sum(held) / nbytes:.4f} of it")


if __name__ == "__main__":
    main()
