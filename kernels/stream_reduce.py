"""Pulling pieces and adding them up on a CUDA stream: one launch each, right under graph replay.

None of these kernels waits for another rank, so ranks that share a device may use them.
"""

from __future__ import annotations

from tpspan.kernels.chunks import NUM_BLOCKS, chunk_nbytes_for
from tpspan.kernels.compile import kernel

_NUM_THREADS = 512
# A thread of a sum has one load of each rank under way, which takes a microsecond or two over the
# link: two blocks on every multiprocessor of a large GPU keep 2 MiB under way.
SUM_BLOCKS = 256
_VECTOR_NBYTES = 16
_KERNELS = {"float32": ("sum_f32", 4), "bfloat16": ("sum_bf16", 2), "float16": ("sum_f16", 2)}
DEVICE_SUM_DTYPES = tuple(_KERNELS)
REDUCE_KERNELS = ("pull", *(name for name, _ in _KERNELS.values()))


def pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
    num_pieces: int,
    *,
    device: int,
    stream: int,
    num_blocks: int = NUM_BLOCKS,
) -> None:
    """Copy pieces of the ranks, the right neighbour's first; see ``host_pull``.

    Args:
        num_pieces: ``world_size - 1``, or ``world_size`` to copy this rank's own, too, at the end.
    """
    chunk_nbytes = chunk_nbytes_for(piece_nbytes * num_pieces, num_blocks)
    num_chunks = num_pieces * -(-piece_nbytes // chunk_nbytes)
    if num_chunks:
        kernel("pull", device)(
            stream,
            min(num_blocks, num_chunks),
            _NUM_THREADS,
            target,
            target_stride,
            source,
            source_stride,
            piece_nbytes,
            nbytes,
            rank,
            world_size,
            num_pieces,
            chunk_nbytes,
        )


def device_sum(
    dtype: str,
    target: int,
    second: int,
    source: int,
    stride: int,
    own: int,
    numel: int,
    rank: int,
    world_size: int,
    divisor: int = 1,
    *,
    device: int,
    stream: int,
    num_blocks: int = SUM_BLOCKS,
) -> None:
    """Add a source of every rank, in the order of the ranks, in fp32, and divide the sum.

    Args:
        dtype: one of ``DEVICE_SUM_DTYPES``.
        target, second: where the result goes, twice; ``second`` may be 0. Both may be sources.
        source, stride: rank p's source begins at ``source + p * stride``,
        own: but this rank's begins here. All addresses are multiples of 16.
        divisor: 1 for a sum, ``world_size`` for the mean.
    """
    name, itemsize = _KERNELS[dtype]
    num_vectors = -(-numel * itemsize // _VECTOR_NBYTES)
    if num_vectors:
        kernel(name, device)(
            stream,
            min(num_blocks, -(-num_vectors // _NUM_THREADS)),
            _NUM_THREADS,
            target,
            second,
            source,
            stride,
            own,
            numel,
            rank,
            world_size,
            divisor,
        )
