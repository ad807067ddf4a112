"""The host's twins of gather_copy and rotated_copy: numba njit over memcpy, without the GIL."""

from __future__ import annotations

from tpspan.kernels import atomics
from tpspan.kernels.chunks import COLUMNS

_ROW_NBYTES = 8 * COLUMNS


@atomics.compiled("void(int64, int64, int64, int64)")
def _gather_copy(target: int, source: int, table: int, num_pieces: int) -> None:
    for piece in range(num_pieces):
        row = table + piece * _ROW_NBYTES
        atomics.copy_bytes(
            target + atomics.load_int64(row + 8),
            source + atomics.load_int64(row),
            atomics.load_int64(row + 16),
        )


@atomics.compiled("void(int64, int64, int64, int64)")
def _rotated_copy(target: int, source: int, nbytes: int, start: int) -> None:
    atomics.copy_bytes(target + start, source + start, nbytes - start)
    atomics.copy_bytes(target, source, start)


def host_gather_copy(
    target_address: int, source_address: int, table_address: int, num_pieces: int
) -> None:
    """Copy the pieces of a table, in its order; sources and targets must not overlap.

    Args:
        target_address, source_address: added to the offsets of the table.
        table_address: the rows of a CopyTable; its chunks do not matter here.
    """
    _gather_copy(target_address, source_address, table_address, num_pieces)


def host_rotated_copy(
    target_address: int, source_address: int, nbytes: int, start: int = 0
) -> None:
    """Copy one range from byte ``start`` to its end, then from 0 to ``start``.

    Raises:
        ValueError: the size is negative, or the start does not lie in the range.
    """
    if not 0 <= start <= nbytes:
        raise ValueError(f"start must be from 0 to nbytes = {nbytes}, not {start}")
    _rotated_copy(target_address, source_address, nbytes, start)
