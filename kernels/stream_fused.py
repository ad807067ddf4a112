"""An all-gather or a sum of few bytes in one launch, for ranks that have a GPU each.

Ranks that share a device must not use these: a kernel that waits keeps the other from running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpspan.kernels.compile import kernel

# More than saturate the link: they also stage and add. One on each multiprocessor costs nothing
# when few bytes are to be moved, for blocks meet at the same time.
FUSED_BLOCKS = 64
_NUM_THREADS = 512
_SMALLEST_CHUNK_NBYTES = 1024
_VECTOR_NBYTES = 16
_SUMS = {"float32": "fused_sum_f32", "bfloat16": "fused_sum_bf16", "float16": "fused_sum_f16"}
FUSED_SUM_DTYPES = tuple(_SUMS)
FUSED_KERNELS = ("fused_gather", *_SUMS.values())


@dataclass(frozen=True)
class FusedPlace:
    """Where ranks stage and meet, and who this one is.

    Attributes:
        staging, region_nbytes: rank p's two buffers fill the region at
            ``staging + p * region_nbytes``.
        base, page_nbytes: a board of counters (tpspan.kernels.board), of which the first
            ``FUSED_BLOCKS`` slots belong to these kernels alone.
        rank, world_size: this rank.
        epochs: ``FUSED_BLOCKS`` 32-bit counts in this rank's device memory.
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


def fused_gather(place: FusedPlace, target: int, source: int, nbytes: int, stream: int) -> None:
    """Gather ``nbytes`` of every rank, one after another; the input may lie at its place."""
    arguments = _gather_arguments(place, target, source, nbytes)
    kernel("fused_gather", place.device)(stream, FUSED_BLOCKS, _NUM_THREADS, *arguments)


def plan_fused_gather(
    place: FusedPlace, target: int, source: int, nbytes: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    arguments = _gather_arguments(place, target, source, nbytes)
    return kernel("fused_gather", place.device).bind(FUSED_BLOCKS, _NUM_THREADS, *arguments)


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
        target, source, nbytes: multiples of 16, but for a source that is not the target.
        divisor: 1 for a sum, ``world_size`` for the mean.
    """
    arguments = _sum_arguments(place, target, source, nbytes, divisor)
    kernel(_SUMS[dtype], place.device)(stream, FUSED_BLOCKS, _NUM_THREADS, *arguments)


def plan_fused_sum(
    place: FusedPlace, dtype: str, target: int, source: int, nbytes: int, divisor: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    arguments = _sum_arguments(place, target, source, nbytes, divisor)
    return kernel(_SUMS[dtype], place.device).bind(FUSED_BLOCKS, _NUM_THREADS, *arguments)


def fused_chunk_nbytes(nbytes: int) -> int:
    """One chunk a block, in whole vectors."""
    even = -(-nbytes // FUSED_BLOCKS)
    return max(-(-even // _VECTOR_NBYTES) * _VECTOR_NBYTES, _SMALLEST_CHUNK_NBYTES)


def _gather_arguments(place: FusedPlace, target: int, source: int, nbytes: int) -> tuple[int, ...]:
    return (
        target,
        source,
        nbytes,
        _checked_chunk(place, nbytes),
        place.staging,
        place.region_nbytes,
        place.base,
        place.page_nbytes,
        place.rank,
        place.world_size,
        place.epochs,
        place.status,
        place.timeout_ns,
    )


def _sum_arguments(
    place: FusedPlace, target: int, source: int, nbytes: int, divisor: int
) -> tuple[int, ...]:
    return (
        target,
        source,
        nbytes,
        _checked_chunk(place, nbytes),
        place.staging,
        place.region_nbytes,
        place.base,
        place.page_nbytes,
        place.rank,
        place.world_size,
        divisor,
        place.epochs,
        place.status,
        place.timeout_ns,
    )


def _checked_chunk(place: FusedPlace, nbytes: int) -> int:
    if not 0 <= nbytes <= place.region_nbytes // 2:
        raise ValueError(f"{nbytes} bytes a rank; there is room for {place.region_nbytes // 2}")
    return fused_chunk_nbytes(nbytes)
