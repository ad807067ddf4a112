"""Copies on the device: their code run by Python, and on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import GUARD, Piece, drawn_pieces, lay_out, prepared_gpu, sizes, stream
from tpspan import kernels
from tpspan.kernels import reference


class Interpreter:
    """Runs the bodies of the device copies, thread by thread, without a GPU or a compiler."""

    def __init__(self) -> None:
        from tpspan.kernels import device_copy  # imports numba's CUDA compiler

        self.module = device_copy
        self.threadIdx, self.blockIdx, self.blockDim, self.gridDim = (
            SimpleNamespace(x=0) for _ in range(4)
        )
        self.int64, self.uint64 = int, int

    def run(self, name: str, num_blocks: int, num_threads: int, *arguments: int) -> None:
        self.blockDim.x, self.gridDim.x = num_threads, num_blocks
        with pytest.MonkeyPatch.context() as monkeypatch:
            for library in ("cuda", "ptx", "types"):
                monkeypatch.setattr(self.module, library, self)
            for part in ("_copy_bytes", "_copy_vectors", "_copy_shifted", "_copy_chunk"):
                monkeypatch.setattr(self.module, part, getattr(self.module, part).py_func)
            for self.blockIdx.x in range(num_blocks):
                for self.threadIdx.x in range(num_threads):
                    getattr(self.module, name)(*arguments)

    @staticmethod
    def load_byte(address: int) -> int:
        return ctypes.c_uint8.from_address(address).value

    @staticmethod
    def store_byte(address: int, value: int) -> None:
        ctypes.c_uint8.from_address(address).value = value

    @staticmethod
    def load_int64(address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    @staticmethod
    def load_word(address: int) -> int:
        assert address % 8 == 0
        return ctypes.c_uint64.from_address(address).value

    def load_vector(self, address: int) -> tuple[int, int]:
        assert address % 16 == 0
        return self.load_word(address), self.load_word(address + 8)

    @staticmethod
    def store_vector(address: int, *values: int) -> None:
        assert address % 16 == 0
        for offset, value in zip((0, 8), values, strict=True):
            ctypes.c_uint64.from_address(address + offset).value = value & ((1 << 64) - 1)


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


small_pieces = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 300)), max_size=30
)
shifts = st.integers(0, 15)


@settings(deadline=None, max_examples=200)
@given(small_pieces, shifts, shifts, st.sampled_from([16, 48, 100, 4096]), st.integers(1, 9))
def test_device_gather_copy_by_hand(
    interpreter: Interpreter,
    draws: list[Piece],
    source_shift: int,
    target_shift: int,
    chunk_nbytes: int,
    num_blocks: int,
) -> None:
    pieces = lay_out(draws)
    source = np.random.default_rng(0).integers(0, 255, 1000, dtype=np.uint8)
    ours, theirs = (np.full(12_000, 255, np.uint8) for _ in range(2))
    table = kernels.CopyTable.of(pieces, chunk_nbytes=chunk_nbytes)
    shape = (table.rows.ctypes.data, table.num_pieces, table.num_chunks, table.chunk_nbytes)
    source_address = source.ctypes.data + source_shift
    target_address = ours.ctypes.data + GUARD + target_shift
    interpreter.run("gather_copy", num_blocks, 2, target_address, source_address, *shape)
    expected_address = theirs.ctypes.data + GUARD + target_shift
    reference.reference_gather_copy(expected_address, source_address, pieces)
    assert np.array_equal(ours, theirs)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 900), shifts, shifts, st.sampled_from([16, 64, 1000]), st.data())
def test_device_rotated_copy_by_hand(
    interpreter: Interpreter,
    nbytes: int,
    source_shift: int,
    target_shift: int,
    chunk_nbytes: int,
    data: st.DataObject,
) -> None:
    start = data.draw(st.integers(0, nbytes))
    source = np.random.default_rng(0).integers(0, 255, 1000, dtype=np.uint8)
    target = np.full(1100, 255, np.uint8)
    num_chunks = -(-(nbytes - start) // chunk_nbytes) - (-start // chunk_nbytes)
    interpreter.run(
        "rotated_copy",
        3,
        4,
        target.ctypes.data + GUARD + target_shift,
        source.ctypes.data + source_shift,
        nbytes,
        start,
        num_chunks,
        chunk_nbytes,
    )
    expected = np.full(1100, 255, np.uint8)
    begin = GUARD + target_shift
    expected[begin : begin + nbytes] = source[source_shift : source_shift + nbytes]
    assert np.array_equal(target, expected)


# ---------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def gpu() -> int:
    return prepared_gpu()


@pytest.mark.cuda
def test_device_gather_copy(gpu: int) -> None:
    source = np.random.default_rng(0).integers(0, 255, 30_000, dtype=np.uint8)
    there = torch.from_numpy(source).cuda()

    @settings(deadline=None, max_examples=200)
    @given(
        drawn_pieces,
        st.integers(0, 15),
        st.integers(0, 15),
        st.sampled_from([None, 16, 100, 4096]),
        st.sampled_from([1, 3, 64, 300]),
    )
    def check(
        draws: list[Piece],
        source_shift: int,
        target_shift: int,
        chunk_nbytes: int | None,
        num_blocks: int,
    ) -> None:
        pieces = lay_out(draws)
        expected = np.full(140_000, 255, np.uint8)
        reference.reference_gather_copy(
            expected.ctypes.data + GUARD + target_shift, source.ctypes.data + source_shift, pieces
        )
        table = kernels.CopyTable.of(pieces, chunk_nbytes=chunk_nbytes, num_blocks=num_blocks)
        rows = torch.from_numpy(table.rows).cuda()
        target = torch.full((140_000,), 255, dtype=torch.uint8, device="cuda")
        kernels.gather_copy(
            target.data_ptr() + GUARD + target_shift,
            there.data_ptr() + source_shift,
            rows.data_ptr(),
            table.num_pieces,
            table.num_chunks,
            table.chunk_nbytes,
            device=gpu,
            stream=stream(),
            num_blocks=num_blocks,
        )
        assert np.array_equal(target.cpu().numpy(), expected)

    check()


@pytest.mark.cuda
def test_device_rotated_copy(gpu: int) -> None:
    source = np.random.default_rng(0).integers(0, 255, 1 << 20, dtype=np.uint8)
    there = torch.from_numpy(source).cuda()

    @settings(deadline=None, max_examples=200)
    @given(
        st.one_of(sizes, st.integers(0, (1 << 20) - 16)),
        st.integers(0, 15),
        st.integers(0, 15),
        st.data(),
    )
    def check(nbytes: int, source_shift: int, target_shift: int, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, nbytes))
        target = torch.full((nbytes + 2 * GUARD,), 255, dtype=torch.uint8, device="cuda")
        kernels.rotated_copy(
            target.data_ptr() + GUARD + target_shift,
            there.data_ptr() + source_shift,
            nbytes,
            start,
            device=gpu,
            stream=stream(),
        )
        expected = np.full(nbytes + 2 * GUARD, 255, np.uint8)
        begin = GUARD + target_shift
        expected[begin : begin + nbytes] = source[source_shift : source_shift + nbytes]
        assert np.array_equal(target.cpu().numpy(), expected)

    check()


@pytest.mark.cuda
def test_device_copies_beyond_32_bits(gpu: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 11 << 30:
        pytest.skip(f"needs 11 GiB of GPU memory, {free >> 20} MiB are free")
    source = torch.arange((5 << 28) + 1, dtype=torch.int32, device="cuda")
    nbytes = 4 * source.numel()
    target = torch.zeros_like(source)
    addresses = (target.data_ptr(), source.data_ptr())
    kernels.rotated_copy(*addresses, nbytes, (1 << 32) + 20, device=gpu, stream=stream())
    assert torch.equal(source, target)
    target.zero_()
    table = kernels.CopyTable.of([(1 << 32, 1 << 32, nbytes - (1 << 32)), (0, 0, 1 << 32)])
    rows = torch.from_numpy(table.rows).cuda()
    shape = (table.num_pieces, table.num_chunks, table.chunk_nbytes)
    kernels.gather_copy(*addresses, rows.data_ptr(), *shape, device=gpu, stream=stream())
    assert torch.equal(source, target)
