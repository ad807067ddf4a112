"""One process trains a model and commits it, another generates with it and flips between two steps.

    python examples/trainer_and_generator.py --seconds 10 --device cuda

As in reinforcement learning, where what is generated depends on the newest weights. The generator
never waits for the trainer, never copies weights, and never sees half of a version: the trainer
commits a checksum with each, and the generator verifies it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from torch import nn

import tpspan

NAME = "example-policy"
VOCABULARY, WIDTH = 256, 128


class Policy(nn.Module):
    """A small language model without attention: it predicts a token from the last one."""

    checksum: torch.Tensor
    committed_at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("checksum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("committed_at", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers(self.embed(tokens))))  # type: ignore[no-any-return]

    def weigh(self) -> torch.Tensor:
        """What all parameters are worth together."""
        return sum(p.detach().double().sum() for p in self.parameters())  # type: ignore[return-value]


def train(seconds: float, device: str) -> None:
    """Learn to count, and commit after every step."""
    policy = Policy().to(device)
    publication = tpspan.publish(policy, NAME)
    generator = subprocess.Popen(
        [sys.executable, __file__, "--as-generator", "--device", device], stdout=subprocess.PIPE
    )
    assert generator.stdout is not None
    generator.stdout.readline()  # it has attached
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    end = time.monotonic() + seconds
    tokens = torch.arange(VOCABULARY, device=device)
    while time.monotonic() < end:
        loss = nn.functional.cross_entropy(policy(tokens), (tokens + 1) % VOCABULARY)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        policy.checksum.copy_(policy.weigh())
        policy.committed_at.fill_(time.time())
        publication.commit()
    print(f"trainer: {publication.version} versions, loss {loss.item():.4f}")
    policy.committed_at.zero_()  # the end
    publication.commit()
    sys.stdout.flush()
    sys.stdout.buffer.write(generator.communicate()[0])
    publication.close(remove=True)


def generate(device: str) -> None:
    """Generate, and flip to the newest weights between two sequences."""
    policy = Policy().to("meta")
    attached = tpspan.attach_module(policy, NAME)
    delays: list[float] = []
    good = num_sequences = 0
    print("ready", flush=True)
    with torch.inference_mode():
        while True:
            if attached.update():
                now, then = time.time(), float(policy.committed_at)
                if then == 0:
                    break
                delays.append(now - then)
                assert float(policy.weigh()) == float(policy.checksum), "a torn version"
            token = torch.zeros(1, dtype=torch.long, device=device)
            for step in range(8):
                token = policy(token).argmax(-1)
                good += int(token) == step + 1
            num_sequences += 1
    delays.sort()
    print(
        f"generator: {num_sequences} sequences, {good / num_sequences / 8:.0%} of tokens right, "
        f"{len(delays)} flips; from commit to flip {delays[len(delays) // 2] * 1e3:.1f} ms in the "
        f"median, {delays[int(len(delays) * 0.99)] * 1e3:.1f} ms in 99 of 100"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--as-generator", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.as_generator:
        generate(options.device)
    else:
        train(options.seconds, options.device)


if __name__ == "__main__":
    main()
