"""How a product ``x @ W.T`` should read a weight that lies with several ranks: arithmetic alone.

In place, every byte crosses the link once while x has few rows; once the multiplication reads its
tiles again, the link is read again too. Staged, a copy engine crosses the link once at its best
rate while another piece is multiplied, and what is left over is the start and the last piece. The
figures behind the defaults are of H200 GPUs, bf16, K = 8192: in place 1 row of x takes 391 µs and
1024 rows take 1501, with 2 GPUs; 1184 and 4469 with 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpspan.spans.reads import Read

How = Literal["in_place", "staged"]

SMALLEST_NBYTES = 1 << 20
"""A weight below this is always read in place: a copy takes 10 µs whatever its size."""


@dataclass(frozen=True)
class Rates:
    """What decides between the policies.

    Attributes:
        copy_bytes_per_s: of copies from other ranks' memory.
        read_bytes_per_s: of a product that reads other ranks' memory in place, once.
        rows_per_reading: rows of x that one reading of the weight serves.
        local_bytes_per_s: of a product of few rows over memory of this rank.
        flops_per_s: of a product of many rows over memory of this rank.
        overlaps: whether copies go on while something is multiplied.
        start_s: what a staged product takes beyond copies and multiplication.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    rows_per_reading: float
    local_bytes_per_s: float
    flops_per_s: float
    overlaps: bool
    start_s: float

    def __post_init__(self) -> None:
        wrong = [
            name
            for name in ("copy_bytes_per_s", "read_bytes_per_s", "local_bytes_per_s", "flops_per_s")
            if not 0 < getattr(self, name) < float("inf")
        ]
        if wrong or not self.rows_per_reading >= 1 or not 0 <= self.start_s < float("inf"):
            raise ValueError(f"{self} are no rates: {', '.join(wrong) or 'rows or start'}")


LINKED = Rates(300e9, 300e9, 256, 4e12, 600e12, overlaps=True, start_s=40e-6)
"""Before anything is measured: GPUs with NVLink between them."""

LOCAL = Rates(10e9, 10e9, 1e9, 10e9, 1e11, overlaps=False, start_s=0.0)
"""All ranks' memory is this machine's own, as on the host backend: a copy can only add to it."""


@dataclass(frozen=True)
class Product:
    """``x @ W.T`` in numbers.

    Attributes:
        rows: rows of x.
        out_features, in_features: of W.
        itemsize: bytes of an element of W.
        remote_nbytes: bytes of W that lie with other ranks.
    """

    rows: int
    out_features: int
    in_features: int
    itemsize: int
    remote_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of W."""
        return self.out_features * self.in_features * self.itemsize

    def multiply_s(self, rates: Rates) -> float:
        """Seconds if all of W were in this rank's memory."""
        flops = 2.0 * self.rows * self.out_features * self.in_features
        return max(self.nbytes / rates.local_bytes_per_s, flops / rates.flops_per_s)

    def in_place_s(self, rates: Rates) -> float:
        """Seconds if the multiplication reads W where it lies."""
        readings = max(1.0, self.rows / rates.rows_per_reading)
        wire = self.remote_nbytes / rates.read_bytes_per_s
        return max(readings * wire, self.multiply_s(rates))

    def staged_s(self, rates: Rates, *, is_prefetched: bool = False) -> float:
        """Seconds if W is copied in pieces meanwhile, or before, with ``is_prefetched``."""
        wire, multiply = self.remote_nbytes / rates.copy_bytes_per_s, self.multiply_s(rates)
        if not rates.overlaps:
            return wire + multiply + rates.start_s
        return max(wire, multiply) + (0.0 if is_prefetched else rates.start_s)


def choose(
    read: Read, product: Product, rates: Rates | None, *, is_prefetched: bool = False
) -> How:
    """Decide how one product reads its weight; every rank may decide for itself.

    Args:
        rates: needed for ``"auto"`` only.
        is_prefetched: the copy began with the product before, as for layers of a model.
    """
    if product.rows == 0 or product.remote_nbytes == 0:
        return "in_place"
    if read != "auto":
        return read
    if rates is None or product.nbytes < SMALLEST_NBYTES:
        return "in_place"
    staged = product.staged_s(rates, is_prefetched=is_prefetched)
    return "staged" if staged < product.in_place_s(rates) else "in_place"
