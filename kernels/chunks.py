"""How a copy is cut into chunks and laid out as a table: pure arithmetic.

A table has a row of four 64-bit words for each piece, and one row more that ends it: offset in the
source, offset in the target, bytes, and how many chunks the pieces before it have. Offsets are
added to base addresses that are arguments of the copy, so one table serves any target, and a table
of absolute addresses works with bases of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

COLUMNS = 4
NUM_BLOCKS = 64
_SMALLEST_NBYTES = 16 << 10
_LARGEST_NBYTES = 256 << 10


def chunk_nbytes_for(nbytes: int, num_blocks: int) -> int:
    """A multiple of 16 KiB that gives every block about four chunks, within limits.

    Smaller chunks cost a search in the table more often; larger ones leave blocks idle at the end.
    """
    even = nbytes // (4 * max(num_blocks, 1))
    return min(max(even - even % _SMALLEST_NBYTES, _SMALLEST_NBYTES), _LARGEST_NBYTES)


@dataclass(frozen=True)
class CopyTable:
    """A list of pieces ready for gather_copy.

    Attributes:
        rows: int64 of shape (num_pieces + 1, 4), without the empty pieces; the caller brings it to
            where the kernel runs.
        num_pieces, num_chunks, chunk_nbytes: further arguments of gather_copy.
    """

    rows: numpy.typing.NDArray[numpy.int64]
    num_pieces: int
    num_chunks: int
    chunk_nbytes: int

    @classmethod
    def of(
        cls,
        pieces: Sequence[tuple[int, int, int]],
        *,
        chunk_nbytes: int | None = None,
        num_blocks: int = NUM_BLOCKS,
    ) -> CopyTable:
        """A table of (source, target, nbytes) in the order in which they are to be copied.

        Raises:
            ValueError: a size is negative, or chunk_nbytes is not positive.
        """
        given = numpy.asarray(pieces, dtype=numpy.int64).reshape(len(pieces), 3)
        if (given[:, 2] < 0).any():
            raise ValueError(f"a piece has a negative size: {int(given[:, 2].min())} bytes")
        given = given[given[:, 2] > 0]
        rows = numpy.zeros((len(given) + 1, COLUMNS), dtype=numpy.int64)
        rows[:-1, :3] = given
        sizes = given[:, 2]
        if chunk_nbytes is None:
            chunk_nbytes = chunk_nbytes_for(int(sizes.sum()), num_blocks)
        if chunk_nbytes <= 0:
            raise ValueError(f"chunk_nbytes must be positive, not {chunk_nbytes}")
        numpy.cumsum(-(-sizes // chunk_nbytes), out=rows[1:, 3])
        return cls(rows, len(given), int(rows[-1, 3]), chunk_nbytes)
