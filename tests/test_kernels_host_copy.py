"""Tables of copies, and copies on the host against their reference."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import GUARD, Piece, drawn_pieces, lay_out, sizes
from kernel_team import PAGE_NBYTES
from tpspan import kernels
from tpspan.kernels import reference


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 44), max_size=12), st.integers(1, 600))
def test_the_chunks_of_a_table_cover_every_piece_once(sizes: list[int], num_blocks: int) -> None:
    table = kernels.CopyTable.of([(1, 2, nbytes) for nbytes in sizes], num_blocks=num_blocks)
    firsts = table.rows[:, 3].tolist()
    assert firsts[0] == 0 and firsts[-1] == table.num_chunks
    filled = [nbytes for nbytes in sizes if nbytes]
    assert table.rows[:-1, :3].tolist() == [[1, 2, nbytes] for nbytes in filled]
    for nbytes, first, next_first in zip(filled, firsts, firsts[1:], strict=False):
        chunks = next_first - first
        assert (chunks - 1) * table.chunk_nbytes < nbytes <= chunks * table.chunk_nbytes


def test_bad_arguments_of_copies_are_answered_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="negative size: -1 bytes"):
        kernels.CopyTable.of([(0, 0, 8), (0, 0, -1)])
    with pytest.raises(ValueError, match="chunk_nbytes must be positive, not 0"):
        kernels.CopyTable.of([], chunk_nbytes=0)
    for start, nbytes in ((9, 8), (-1, 8), (0, -1)):
        with pytest.raises(ValueError, match="start must be from 0 to nbytes"):
            kernels.host_rotated_copy(0, 0, nbytes, start)
        with pytest.raises(ValueError, match="start must be from 0 to nbytes"):
            kernels.rotated_copy(0, 0, nbytes, start, device=0, stream=0)
    with pytest.raises(ValueError, match="1 to 1024 ranks, not 1025"):
        kernels.barrier(0, PAGE_NBYTES, 0, 0, 1025, 0, 0, 1, device=0, stream=0)


@settings(deadline=None)
@given(drawn_pieces, st.integers(0, 15), st.integers(0, 15), st.booleans())
def test_host_gather_copy(
    draws: list[Piece], source_shift: int, target_shift: int, is_absolute: bool
) -> None:
    pieces = lay_out(draws)
    source = np.random.default_rng(0).integers(0, 255, 30_000, dtype=np.uint8)
    source_address = source.ctypes.data + source_shift
    results = []
    for copy in ("reference", "kernel"):
        target = np.full(140_000, 255, np.uint8)
        target_address = target.ctypes.data + GUARD + target_shift
        if copy == "reference":
            reference.reference_gather_copy(target_address, source_address, pieces)
        elif is_absolute:
            absolute = [(source_address + s, target_address + t, n) for s, t, n in pieces]
            table = kernels.CopyTable.of(absolute)
            kernels.host_gather_copy(0, 0, table.rows.ctypes.data, table.num_pieces)
        else:
            table = kernels.CopyTable.of(pieces)
            rows_address = table.rows.ctypes.data
            kernels.host_gather_copy(target_address, source_address, rows_address, table.num_pieces)
        results.append(target)
    assert np.array_equal(results[0], results[1])


@settings(deadline=None)
@given(sizes, st.data())
def test_host_rotated_copy(nbytes: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, nbytes))
    source = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8)
    target = np.full(nbytes + 2 * GUARD, 255, np.uint8)
    kernels.host_rotated_copy(target.ctypes.data + GUARD, source.ctypes.data, nbytes, start)
    assert np.array_equal(target[GUARD : GUARD + nbytes], source)
    assert (target[:GUARD] == 255).all() and (target[GUARD + nbytes :] == 255).all()


def test_host_copies_at_offsets_beyond_32_bits() -> None:
    nbytes = (1 << 32) + 5
    copy_in_sparse_memory(nbytes, [(0, 0, 1), (1 << 31, 1 << 31, 1), (1 << 32, 1 << 32, 5)])


@pytest.mark.slow
def test_host_copies_of_more_bytes_than_32_bits_count() -> None:
    nbytes = (1 << 32) + 5
    copy_in_sparse_memory(nbytes, [(0, 0, nbytes)])


def copy_in_sparse_memory(nbytes: int, pieces: list[Piece]) -> None:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, nbytes, private) as source, mmap.mmap(-1, nbytes, private) as target:
        for memory in (source, target):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for place in (0, 1 << 31, nbytes - 1):
            source[place] = 7
        target_view, source_view = map(ctypes.c_char.from_buffer, (target, source))
        target_address, source_address = map(ctypes.addressof, (target_view, source_view))
        table = kernels.CopyTable.of(pieces)
        rows_address = table.rows.ctypes.data
        kernels.host_gather_copy(target_address, source_address, rows_address, table.num_pieces)
        del target_view, source_view
        assert [target[place] for place in (0, 1, 1 << 31, nbytes - 1)] == [7, 0, 7, 7]
