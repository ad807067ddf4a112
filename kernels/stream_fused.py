"""An all-gather, a sum or a reduce-scatter in one launch, for ranks that have a GPU each.

Ranks that share a device must not use these: a kernel that waits keeps the other from running. How
blocks meet, and why nothing is overwritten too early: see ``tpspan.kernels.device_fused``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpspan.kernels.compile import BOUND_THREADS, kernel

# A pair has a block that stages and one that reads, and all blocks must run at the same time, so
# there are no more than a GPU has multiprocessors.
FUSED_PAIRS = 64
# A pair moves so much in a round.
ROUND_NBYTES = 64 << 10
_NUM_SLOTS = 8  # of a pair, as the kernels count them
_NUM_THREADS = BOUND_THREADS
_SMALLEST_CHUNK_NBYTES = 1024
_VECTOR_NBYTES = 16
_SUFFIXES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
FUSED_SUM_DTYPES = tuple(_SUFFIXES)
FUSED_KERNELS = (
    "fused_gather",
    *(f"fused_{what}_{each}" for what in ("sum", "scatter") for each in _SUFFIXES.values()),
)
FUSED_COUNTS = 4 * FUSED_PAIRS


@dataclass(frozen=True)
class FusedPlace:
    """Where ranks stage and meet, and who this one is.

    Attributes:
        staging, region_nbytes: rank p stages in the region at ``staging + p * region_nbytes``. It
            is at least ``fused_region_nbytes()``, whatever the size of a call.
        base, page_nbytes: a board of counters (tpspan.kernels.board) whose first slots, one for
            each block, belong to these kernels alone, a rank's line of itself, too.
        rank, world_size: this rank.
        epochs: ``FUSED_COUNTS`` 32-bit words in this rank's device memory, zeros at first: of each
            block a count, and a mark if it has given up.
        status: ``world_size`` 32-bit words of pinned host memory; word p is set if rank p is late.
        timeout_ns: how long a kernel waits.
        device: index of the device.
    """

    staging: int
    region_nbytes: int
    base: int
    page_nbytes: int
    rank: int
    world_size: int
    epochs: int
    status: int
    timeout_ns: int
    device: int


@dataclass(frozen=True)
class FusedShape:
    """How a call is cut: every pair takes a chunk in every round."""

    num_pairs: int
    num_rounds: int
    chunk_nbytes: int

    @classmethod
    def of(cls, nbytes: int, num_parts: int = 1) -> FusedShape:
        """The shape of a call of so many bytes of each rank, in whole vectors.

        Args:
            num_parts: how many such chunks a pair stages in a round.
        """
        most = ROUND_NBYTES // num_parts // _VECTOR_NBYTES * _VECTOR_NBYTES
        num_rounds = max(-(-nbytes // (FUSED_PAIRS * most)), 1)
        even = -(-nbytes // (FUSED_PAIRS * num_rounds))
        chunk = -(-even // _VECTOR_NBYTES) * _VECTOR_NBYTES
        return cls(FUSED_PAIRS, num_rounds, max(chunk, _SMALLEST_CHUNK_NBYTES))


def fused_region_nbytes() -> int:
    """How much memory of each rank is staged in."""
    return _NUM_SLOTS * FUSED_PAIRS * ROUND_NBYTES


def fused_gather(place: FusedPlace, target: int, source: int, nbytes: int, stream: int) -> None:
    """Gather ``nbytes`` of every rank, one after another; the input may lie at its place."""
    num_blocks, *arguments = _arguments(place, FusedShape.of(nbytes), target, source, nbytes)
    kernel("fused_gather", place.device)(stream, num_blocks, _NUM_THREADS, *arguments)


def plan_fused_gather(
    place: FusedPlace, target: int, source: int, nbytes: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    num_blocks, *arguments = _arguments(place, FusedShape.of(nbytes), target, source, nbytes)
    return kernel("fused_gather", place.device).bind(num_blocks, _NUM_THREADS, *arguments)


def fused_sum(
    place: FusedPlace,
    dtype: str,
    target: int,
    source: int,
    nbytes: int,
    divisor: int,
    stream: int,
) -> None:
    """Add the ranks' vectors in the order of the ranks, in fp32; the target may be the source.

    Args:
        dtype: one of ``FUSED_SUM_DTYPES``.
        target, source: of any alignment.
        nbytes: a multiple of 16.
        divisor: 1 for a sum, ``world_size`` for the mean.
    """
    shape = FusedShape.of(nbytes)
    num_blocks, *arguments = _arguments(place, shape, target, source, nbytes, divisor)
    name = f"fused_sum_{_SUFFIXES[dtype]}"
    kernel(name, place.device)(stream, num_blocks, _NUM_THREADS, *arguments)


def plan_fused_sum(
    place: FusedPlace, dtype: str, target: int, source: int, nbytes: int, divisor: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    shape = FusedShape.of(nbytes)
    num_blocks, *arguments = _arguments(place, shape, target, source, nbytes, divisor)
    name = f"fused_sum_{_SUFFIXES[dtype]}"
    return kernel(name, place.device).bind(num_blocks, _NUM_THREADS, *arguments)


def fused_scatter(
    place: FusedPlace,
    dtype: str,
    target: int,
    source: int,
    nbytes: int,
    divisor: int,
    stream: int,
) -> None:
    """Add the ranks' parts for this one, which their inputs have side by side, as ``fused_sum``.

    Args:
        target: this rank's part of the result; it may be its own part of the input.
        source: ``world_size`` parts of ``nbytes``, a multiple of 16.
    """
    shape = FusedShape.of(nbytes, place.world_size)
    num_blocks, *arguments = _arguments(place, shape, target, source, nbytes, divisor)
    name = f"fused_scatter_{_SUFFIXES[dtype]}"
    kernel(name, place.device)(stream, num_blocks, _NUM_THREADS, *arguments)


def _arguments(
    place: FusedPlace, shape: FusedShape, target: int, source: int, nbytes: int, *more: int
) -> tuple[int, ...]:
    """The number of blocks, and what the kernel takes; a reduction takes one argument more."""
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes a rank")
    if place.region_nbytes < fused_region_nbytes():
        raise ValueError(f"{place.region_nbytes} bytes to stage in; {fused_region_nbytes()} needed")
    return (
        2 * shape.num_pairs,
        target,
        source,
        nbytes,
        shape.chunk_nbytes,
        shape.num_rounds,
        place.staging,
        place.region_nbytes,
        ROUND_NBYTES,
        place.base,
        place.page_nbytes,
        place.rank,
        place.world_size,
        *more,
        place.epochs,
        place.status,
        place.timeout_ns,
    )
