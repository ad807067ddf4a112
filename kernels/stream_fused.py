"""An all-gather or a sum in one launch, for ranks that have a GPU each, and how it is cut.

Ranks that share a device must not use these: a kernel that waits keeps the other from running. How
blocks meet, and why nothing is overwritten too early: see ``tpspan.kernels.device_fused``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpspan.kernels.compile import BOUND_THREADS, kernel

# A call of one round, and one of more. All blocks must run at the same time, so there are no more
# than a GPU has multiprocessors. These more than saturate the link: they also stage and add.
FUSED_BLOCKS = 64
ROUNDS_BLOCKS = 64
# A block moves so much at once; of more it moves so much in a round. While one chunk crosses the
# link the next is staged, but a round costs two to three microseconds beside that.
ONE_ROUND_NBYTES = 64 << 10
ROUND_NBYTES = 64 << 10
_MOST_BLOCKS = max(FUSED_BLOCKS, ROUNDS_BLOCKS)
_SLOT_NBYTES = max(ONE_ROUND_NBYTES, ROUND_NBYTES)
_NUM_SLOTS = 4  # of a block, as the kernels count them
_NUM_THREADS = BOUND_THREADS
_SMALLEST_CHUNK_NBYTES = 1024
_VECTOR_NBYTES = 16
_SUMS = {"float32": "fused_sum_f32", "bfloat16": "fused_sum_bf16", "float16": "fused_sum_f16"}
FUSED_SUM_DTYPES = tuple(_SUMS)
FUSED_KERNELS = ("fused_gather", *_SUMS.values())
FUSED_COUNTS = 2 * _MOST_BLOCKS


@dataclass(frozen=True)
class FusedPlace:
    """Where ranks stage and meet, and who this one is.

    Attributes:
        staging, region_nbytes: rank p stages in the region at ``staging + p * region_nbytes``. It
            is at least ``fused_region_nbytes()``, whatever the size of a call.
        base, page_nbytes: a board of counters (tpspan.kernels.board) whose first slots, one for
            each block, belong to these kernels alone.
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
    """How a call is cut: every block takes a chunk in every round."""

    num_blocks: int
    num_rounds: int
    chunk_nbytes: int

    @classmethod
    def of(cls, nbytes: int) -> FusedShape:
        """The shape of a call of so many bytes of each rank, in whole vectors."""
        is_one = nbytes <= FUSED_BLOCKS * ONE_ROUND_NBYTES
        num_blocks = FUSED_BLOCKS if is_one else ROUNDS_BLOCKS
        num_rounds = 1 if is_one else -(-nbytes // (num_blocks * ROUND_NBYTES))
        even = -(-nbytes // (num_blocks * num_rounds))
        chunk = -(-even // _VECTOR_NBYTES) * _VECTOR_NBYTES
        return cls(num_blocks, num_rounds, max(chunk, _SMALLEST_CHUNK_NBYTES))


def fused_region_nbytes() -> int:
    """How much memory of each rank is staged in."""
    return _NUM_SLOTS * _MOST_BLOCKS * _SLOT_NBYTES


def fused_gather(place: FusedPlace, target: int, source: int, nbytes: int, stream: int) -> None:
    """Gather ``nbytes`` of every rank, one after another; the input may lie at its place."""
    num_blocks, *arguments = _arguments(place, target, source, nbytes)
    kernel("fused_gather", place.device)(stream, num_blocks, _NUM_THREADS, *arguments)


def plan_fused_gather(
    place: FusedPlace, target: int, source: int, nbytes: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    num_blocks, *arguments = _arguments(place, target, source, nbytes)
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
    num_blocks, *arguments = _arguments(place, target, source, nbytes, divisor)
    kernel(_SUMS[dtype], place.device)(stream, num_blocks, _NUM_THREADS, *arguments)


def plan_fused_sum(
    place: FusedPlace, dtype: str, target: int, source: int, nbytes: int, divisor: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    num_blocks, *arguments = _arguments(place, target, source, nbytes, divisor)
    return kernel(_SUMS[dtype], place.device).bind(num_blocks, _NUM_THREADS, *arguments)


def _arguments(
    place: FusedPlace, target: int, source: int, nbytes: int, *more: int
) -> tuple[int, ...]:
    """The number of blocks, and what the kernel takes; a sum takes one argument more."""
    shape = _shape(place, nbytes)
    return (
        shape.num_blocks,
        target,
        source,
        nbytes,
        shape.chunk_nbytes,
        shape.num_rounds,
        place.staging,
        place.region_nbytes,
        _SLOT_NBYTES,
        place.base,
        place.page_nbytes,
        place.rank,
        place.world_size,
        *more,
        place.epochs,
        place.status,
        place.timeout_ns,
    )


def _shape(place: FusedPlace, nbytes: int) -> FusedShape:
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes a rank")
    if place.region_nbytes < fused_region_nbytes():
        raise ValueError(f"{place.region_nbytes} bytes to stage in; {fused_region_nbytes()} needed")
    return FusedShape.of(nbytes)
