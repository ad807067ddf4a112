"""The bodies of the device kernels gather_copy and rotated_copy, in numba over plain addresses.

A copy is cut into chunks; blocks take them in turn, so all blocks work on the same piece, then on
the next: a rank reads from one peer at a time, in the order of the table, and the work is even
whatever the sizes of the pieces.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.chunks import COLUMNS

_ROW_NBYTES = 8 * COLUMNS
_FIRST_CHUNK = 24  # the bytes of a row before this column


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_bytes(target: int, source: int, nbytes: int) -> None:
    for offset in range(types.int64(cuda.threadIdx.x), nbytes, types.int64(cuda.blockDim.x)):
        ptx.store_byte(target + offset, ptx.load_byte(source + offset))


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_vectors(target: int, source: int, nbytes: int) -> None:
    """Both addresses are multiples of 16. Four loads are under way before the first store."""
    offset = 16 * types.int64(cuda.threadIdx.x)
    step = 16 * types.int64(cuda.blockDim.x)
    while offset + 3 * step < nbytes:
        first = ptx.load_vector(source + offset)
        second = ptx.load_vector(source + offset + step)
        third = ptx.load_vector(source + offset + 2 * step)
        fourth = ptx.load_vector(source + offset + 3 * step)
        ptx.store_vector(target + offset, first[0], first[1])
        ptx.store_vector(target + offset + step, second[0], second[1])
        ptx.store_vector(target + offset + 2 * step, third[0], third[1])
        ptx.store_vector(target + offset + 3 * step, fourth[0], fourth[1])
        offset += 4 * step
    while offset < nbytes:
        vector = ptx.load_vector(source + offset)
        ptx.store_vector(target + offset, vector[0], vector[1])
        offset += step


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_shifted(target: int, source: int, nbytes: int) -> None:
    """Only the target is a multiple of 16: it is put together from aligned words of the source.

    The first and the last word read hold a wanted byte each, so no other page is touched.
    """
    shift = source & 7
    low = types.uint64(8 * shift)
    high = types.uint64(64 - 8 * shift)
    aligned = source - shift
    offset = 16 * types.int64(cuda.threadIdx.x)
    step = 16 * types.int64(cuda.blockDim.x)
    while shift != 0 and offset + step < nbytes:
        first = ptx.load_word(aligned + offset)
        second = ptx.load_word(aligned + offset + 8)
        third = ptx.load_word(aligned + offset + 16)
        offset_2 = offset + step
        first_2 = ptx.load_word(aligned + offset_2)
        second_2 = ptx.load_word(aligned + offset_2 + 8)
        third_2 = ptx.load_word(aligned + offset_2 + 16)
        low_half = (first >> low) | (second << high)
        ptx.store_vector(target + offset, low_half, (second >> low) | (third << high))
        low_half = (first_2 >> low) | (second_2 << high)
        ptx.store_vector(target + offset_2, low_half, (second_2 >> low) | (third_2 << high))
        offset += 2 * step
    while offset < nbytes:
        first = ptx.load_word(aligned + offset)
        second = ptx.load_word(aligned + offset + 8)
        if shift != 0:
            third = ptx.load_word(aligned + offset + 16)
            first = (first >> low) | (second << high)
            second = (second >> low) | (third << high)
        ptx.store_vector(target + offset, first, second)
        offset += step


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_chunk(target: int, source: int, nbytes: int) -> None:
    head = min((-target) & 15, nbytes)
    body = (nbytes - head) & ~15
    tail = head + body
    _copy_bytes(target, source, head)
    if ((target ^ source) & 15) == 0:
        _copy_vectors(target + head, source + head, body)
    else:
        _copy_shifted(target + head, source + head, body)
    _copy_bytes(target + tail, source + tail, nbytes - tail)


def gather_copy(
    target: int, source: int, table: int, num_pieces: int, num_chunks: int, chunk_nbytes: int
) -> None:
    piece = types.int64(0)
    previous = types.int64(0)
    chunk = types.int64(cuda.blockIdx.x)
    while chunk < num_chunks:
        # Every piece has a chunk at least, so no more pieces than chunks have gone by since the
        # last look. That many have if pieces are small, and none if they are large: two loads that
        # do not wait for each other find both cases.
        above = min(piece + chunk - previous, num_pieces - 1)
        next_first = ptx.load_int64(table + (piece + 1) * _ROW_NBYTES + _FIRST_CHUNK)
        above_first = ptx.load_int64(table + above * _ROW_NBYTES + _FIRST_CHUNK)
        if chunk >= above_first:
            piece = above
        elif chunk >= next_first:
            piece += 1
            while above - piece > 1:
                middle = (piece + above) >> 1
                if chunk >= ptx.load_int64(table + middle * _ROW_NBYTES + _FIRST_CHUNK):
                    piece = middle
                else:
                    above = middle
        previous = chunk
        row = table + piece * _ROW_NBYTES
        offset = (chunk - ptx.load_int64(row + _FIRST_CHUNK)) * chunk_nbytes
        nbytes = min(ptx.load_int64(row + 16) - offset, chunk_nbytes)
        from_address = source + ptx.load_int64(row) + offset
        _copy_chunk(target + ptx.load_int64(row + 8) + offset, from_address, nbytes)
        chunk += cuda.gridDim.x


def rotated_copy(
    target: int, source: int, nbytes: int, start: int, num_chunks: int, chunk_nbytes: int
) -> None:
    num_before_wrap = (nbytes - start + chunk_nbytes - 1) // chunk_nbytes
    chunk = types.int64(cuda.blockIdx.x)
    while chunk < num_chunks:
        if chunk < num_before_wrap:
            offset = start + chunk * chunk_nbytes
            end = nbytes
        else:
            offset = (chunk - num_before_wrap) * chunk_nbytes
            end = start
        _copy_chunk(target + offset, source + offset, min(end - offset, chunk_nbytes))
        chunk += cuda.gridDim.x
