"""Reading one shared weight as a policy wants it, call by call, and counting how it was read."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.nn import functional

from tpspan.parallel.policy import How, choose
from tpspan.parallel.rates import KnownRates
from tpspan.parallel.staging import SharedWeight, staged_product
from tpspan.spans.reads import Read, check_read


@dataclass(frozen=True)
class ReadStats:
    """How weights were read so far.

    Attributes:
        num_in_place, num_staged: products of either kind, those of backward passes included.
        scratch_nbytes: the most local memory that was taken for weights at a time; at most twice
            the (largest) weight.
    """

    num_in_place: int
    num_staged: int
    scratch_nbytes: int


class Reader:
    """Multiplies with one weight, in place or staged.

    Args:
        weight: the weight.
        read: the policy.
    """

    def __init__(self, weight: SharedWeight, read: Read) -> None:
        self.weight = weight
        self.read = check_read(read)
        self._rates = KnownRates.of(weight.span.world)
        self._counts: dict[How, int] = {"in_place": 0, "staged": 0}
        self._scratch_nbytes = 0

    def decide(self, rows: int) -> How:
        """How a product with so many rows of x reads the weight; counted."""
        rates = self._rates.get(self.weight) if self.read == "auto" else None
        how = choose(self.read, self.weight.product(rows), rates)
        self._counts[how] += 1
        return how

    def product(self, x_MK: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W.T + bias`` without gradient; if W has another dtype, it is converted to x's."""
        num_rows = x_MK.shape[0]
        if self.decide(num_rows) == "in_place":
            return functional.linear(x_MK, self.weight.in_place().to(x_MK.dtype), bias)
        out_MN = x_MK.new_empty(num_rows, self.weight.shape[0])
        staged_product(self.weight, x_MK, bias, out_MN)
        self._took(self.weight.scratch_nbytes(num_rows))
        return out_MN

    def fetching(self) -> AbstractContextManager[torch.Tensor]:
        """``SharedWeight.fetching``, counted."""
        self._took(self.weight.nbytes)
        return self.weight.fetching()

    def stats(self) -> ReadStats:
        """How the weight was read so far."""
        return ReadStats(self._counts["in_place"], self._counts["staged"], self._scratch_nbytes)

    def _took(self, nbytes: int) -> None:
        self._scratch_nbytes = max(self._scratch_nbytes, nbytes)
