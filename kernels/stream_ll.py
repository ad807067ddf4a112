"""An all-gather or a sum of very few bytes in one launch that needs no barrier, and how it is cut.

Ranks that share a device must not use these: a kernel that waits keeps the other from running. How
the words travel, and why none is overwritten too early: see ``tpspan.kernels.device_ll``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpspan.kernels.compile import kernel

LL_BLOCKS = 32
LL_MOST_RANKS = 8
# What there is room for. A word for every four bytes: what crosses the link is twice the data.
LL_CAPACITY_NBYTES = 256 << 10
_PIECE_NBYTES = 8
_PAIR_NBYTES = 16
_WARP = 32
_FEWEST_THREADS, _MOST_THREADS = 64, 512
_SUMS = {"float32": "ll_sum_f32", "bfloat16": "ll_sum_bf16", "float16": "ll_sum_f16"}
LL_SUM_DTYPES = tuple(_SUMS)
LL_KERNELS = ("ll_gather", *_SUMS.values())
# Of one block's words from one rank, of one parity.
LL_SLOT_NBYTES = LL_CAPACITY_NBYTES // LL_BLOCKS // _PIECE_NBYTES * _PAIR_NBYTES


@dataclass(frozen=True)
class LLPlace:
    """Where the ranks' words go, and who this rank is.

    Attributes:
        base, region_nbytes: rank p's memory begins at ``base + p * region_nbytes``. It is at least
            ``ll_region_nbytes(world_size)``, all zeros before the first call, and belongs to these
            kernels alone.
        rank, world_size: this rank; 2 to 8 of them.
        epochs: ``LL_BLOCKS`` 32-bit counts in this rank's device memory, zeros at first.
        status: ``world_size`` 32-bit words of pinned host memory; word p is set if rank p is late.
        timeout_ns: how long a kernel waits.
        device: index of the device.
    """

    base: int
    region_nbytes: int
    rank: int
    world_size: int
    epochs: int
    status: int
    timeout_ns: int
    device: int


def ll_region_nbytes(world_size: int) -> int:
    """How much memory of each rank the words take: two slots for every block of every rank."""
    return 2 * world_size * LL_BLOCKS * LL_SLOT_NBYTES


def ll_chunk(nbytes: int) -> int:
    """How many pieces of eight bytes a block takes: whole warps of them."""
    per_block = -(-nbytes // (_PIECE_NBYTES * LL_BLOCKS))
    return max(-(-per_block // _WARP) * _WARP, _WARP)


def ll_gather(place: LLPlace, target: int, source: int, nbytes: int, stream: int) -> None:
    """Gather ``nbytes`` of every rank, one after another; the input may lie at its place.

    Args:
        target, source: of any alignment.
        nbytes: up to ``LL_CAPACITY_NBYTES``.
    """
    arguments = _gather_arguments(place, target, source, nbytes)
    kernel("ll_gather", place.device)(stream, LL_BLOCKS, *arguments)


def plan_ll_gather(place: LLPlace, target: int, source: int, nbytes: int) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    arguments = _gather_arguments(place, target, source, nbytes)
    return kernel("ll_gather", place.device).bind(LL_BLOCKS, *arguments)


def ll_sum(
    place: LLPlace, dtype: str, target: int, source: int, nbytes: int, divisor: int, stream: int
) -> None:
    """Add the ranks' vectors in the order of the ranks, in fp32; the target may be the source.

    Args:
        dtype: one of ``LL_SUM_DTYPES``.
        target, source: of any alignment.
        nbytes: whole elements, up to ``LL_CAPACITY_NBYTES``.
        divisor: 1 for a sum, ``world_size`` for the mean.
    """
    arguments = _sum_arguments(place, target, source, nbytes, divisor)
    kernel(_SUMS[dtype], place.device)(stream, LL_BLOCKS, *arguments)


def plan_ll_sum(
    place: LLPlace, dtype: str, target: int, source: int, nbytes: int, divisor: int
) -> Callable[[int], None]:
    """The same call, to be made many times on a stream."""
    arguments = _sum_arguments(place, target, source, nbytes, divisor)
    return kernel(_SUMS[dtype], place.device).bind(LL_BLOCKS, *arguments)


def _gather_arguments(place: LLPlace, target: int, source: int, nbytes: int) -> tuple[int, ...]:
    """The number of threads and what the kernel takes."""
    chunk = _checked_chunk(nbytes)
    return (
        _num_threads(chunk * (place.world_size - 1)),
        target,
        source,
        nbytes,
        chunk,
        place.base,
        place.region_nbytes,
        LL_SLOT_NBYTES,
        place.rank,
        place.world_size,
        place.epochs,
        place.status,
        place.timeout_ns,
    )


def _sum_arguments(
    place: LLPlace, target: int, source: int, nbytes: int, divisor: int
) -> tuple[int, ...]:
    """The number of threads and what the kernel takes."""
    chunk = _checked_chunk(nbytes)
    return (
        _num_threads(chunk),
        target,
        source,
        nbytes,
        chunk,
        place.base,
        place.region_nbytes,
        LL_SLOT_NBYTES,
        place.rank,
        place.world_size,
        divisor,
        place.epochs,
        place.status,
        place.timeout_ns,
    )


def _checked_chunk(nbytes: int) -> int:
    if not 0 <= nbytes <= LL_CAPACITY_NBYTES:
        raise ValueError(f"{nbytes} bytes a rank; there is room for {LL_CAPACITY_NBYTES}")
    return ll_chunk(nbytes)


def _num_threads(num_items: int) -> int:
    """One for each item of a block, within bounds: the protocol does not depend on it."""
    return min(max(num_items, _FEWEST_THREADS), _MOST_THREADS)
