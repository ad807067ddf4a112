"""A training job that is killed again and again, and goes on from its last commit without a file.

    python examples/restart.py

The job publishes its whole state (parameters, optimizer, random numbers, step) and commits it after
every step. Killed at any moment, the next process attaches what the last one has committed: the
losses are, to the last bit, those of a run that was never killed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from typing import Any

import torch
from torch import nn

import tpspan

NAME = "example-restart"
STEPS = 60


class Job:
    """A model, its optimizer, and the step it is at."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def run_step(self) -> float:
        """One step on random data, with dropout."""
        x = torch.randn(32, 64)
        loss = (self.model(nn.functional.dropout(x, 0.1)) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        self.step = state["step"]


def work() -> None:
    """The job as one of its processes: it does not know whether it is the first one."""
    job = Job()
    try:
        with tpspan.attach(NAME) as last:
            job.restore(last.state(clone=True))
        print(json.dumps({"restored": job.step}), flush=True)
    except tpspan.UnknownNameError:
        pass
    publication = None
    while job.step < STEPS:
        loss = job.run_step()
        if publication is None:  # the optimizer has its tensors only after a step
            publication = tpspan.publish(job.state(), NAME, read_only=True)
        else:
            publication.commit(job.state())
        print(json.dumps({"step": job.step, "loss": loss}), flush=True)
    if publication is not None:
        publication.close(remove=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--as-job", action="store_true", help=argparse.SUPPRESS)
    if arguments.parse_args().as_job:
        work()
        return
    losses: dict[int, float] = {}
    dice, num_kills = random.Random(1), 0
    while len(losses) < STEPS:
        process = subprocess.Popen(
            [sys.executable, __file__, "--as-job"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        patience = dice.randrange(10, 30)
        for line in process.stdout:
            said = json.loads(line)
            if "restored" in said:
                print(f"a new process goes on from step {said['restored']}")
                continue
            losses[said["step"]] = said["loss"]
            patience -= 1
            if patience == 0 and said["step"] < STEPS:
                process.kill()
                num_kills += 1
        if process.wait() > 0:
            sys.exit("the job has failed by itself")
    reference = Job()
    expected = {step: reference.run_step() for step in range(1, STEPS + 1)}
    print(f"{STEPS} steps with {num_kills} kills; last loss {losses[STEPS]:.6f}")
    print(f"all losses are those of a run without a kill: {losses == expected}")


if __name__ == "__main__":
    main()
