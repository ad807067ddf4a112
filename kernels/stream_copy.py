"""Copies on a CUDA stream that read from several owners, each rank starting at its neighbour.

All of them are right for any alignment and size: 16-byte loads and stores where source and target
are aligned alike, 16-byte stores put together from 8-byte loads where they are not.
"""

from __future__ import annotations

from tpspan.kernels.chunks import NUM_BLOCKS, chunk_nbytes_for
from tpspan.kernels.compile import kernel

_NUM_THREADS = 512


def gather_copy(
    target_address: int,
    source_address: int,
    table_address: int,
    num_pieces: int,
    num_chunks: int,
    chunk_nbytes: int,
    *,
    device: int,
    stream: int,
    num_blocks: int = NUM_BLOCKS,
) -> None:
    """Copy the pieces of a table, in its order.

    Args:
        target_address, source_address: added to the offsets of the table.
        table_address: the rows of a CopyTable, in memory that the device reads; they must stay
            there until the copy has run.
        num_pieces, num_chunks, chunk_nbytes: as the CopyTable says.
        num_blocks: how much of the GPU to use; 32 nearly fill a link.
    """
    if num_chunks:
        kernel("gather_copy", device)(
            stream,
            min(num_blocks, num_chunks),
            _NUM_THREADS,
            target_address,
            source_address,
            table_address,
            num_pieces,
            num_chunks,
            chunk_nbytes,
        )


def rotated_copy(
    target_address: int,
    source_address: int,
    nbytes: int,
    start: int = 0,
    *,
    device: int,
    stream: int,
    num_blocks: int = NUM_BLOCKS,
) -> None:
    """Copy one range from byte ``start`` to its end, then from 0 to ``start``; needs no table.

    With the start at the right neighbour's shard all ranks read a gathered range without meeting.

    Raises:
        ValueError: the size is negative, or the start does not lie in the range.
    """
    if not 0 <= start <= nbytes:
        raise ValueError(f"start must be from 0 to nbytes = {nbytes}, not {start}")
    chunk_nbytes = chunk_nbytes_for(nbytes, num_blocks)
    num_chunks = -(-(nbytes - start) // chunk_nbytes) - (-start // chunk_nbytes)
    if num_chunks:
        kernel("rotated_copy", device)(
            stream,
            min(num_blocks, num_chunks),
            _NUM_THREADS,
            target_address,
            source_address,
            nbytes,
            start,
            num_chunks,
            chunk_nbytes,
        )
