"""A loaded model against transformers' own loading: every bit, and the logits."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

import torch
from torch import nn

from tpspan.tools.chat_model import ChatModel, import_transformers

LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """The outcome on one rank.

    Attributes:
        num_parameters: names compared.
        different: names of parameters that differ in a bit, or are on one side only.
        logits_difference: the largest, over all tokens of the prompt.
    """

    num_parameters: int
    different: tuple[str, ...]
    logits_difference: float

    @property
    def passed(self) -> bool:
        """All bits are equal, and the logits within the tolerance."""
        return not self.different and self.logits_difference <= LOGITS_TOLERANCE

    def __str__(self) -> str:
        equal = self.num_parameters - len(self.different)
        wrong = f"; these differ: {', '.join(self.different[:5])}" if self.different else ""
        return (
            f"{equal} of {self.num_parameters} parameters equal transformers' own loading bit for "
            f"bit{wrong}; largest difference of logits {self.logits_difference:.1e} (at most "
            f"{LOGITS_TOLERANCE:.0e} is allowed): {'passed' if self.passed else 'FAILED'}"
        )


def compare_with_transformers(model: ChatModel, prompt: str) -> Comparison:
    """Load the model once more, privately, with transformers alone, and compare."""
    transformers = import_transformers()
    folder, arguments = model.files.place()
    mine = dict(model.module.named_parameters(remove_duplicate=False))
    device, dtype = next((tensor.device, tensor.dtype) for tensor in mine.values())
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **arguments
        )
    reference.eval()
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    different = sorted(set(mine) ^ set(theirs)) + [
        name for name in mine if name in theirs and not _same_bits(mine[name], theirs[name])
    ]
    inputs = model.inputs(prompt)
    reference.to(device)
    with torch.inference_mode():
        distance = (_logits(model.module, inputs) - _logits(reference, inputs)).abs().max()
    return Comparison(len(set(mine) | set(theirs)), tuple(different), float(distance))


def _logits(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**inputs).logits.float()


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, two = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (first, second))
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))
