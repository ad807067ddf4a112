"""The kernels against their references: on the host between real processes, on a GPU in one."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpspan import kernels
from tpspan.errors import DriverError
from tpspan.kernels import reference
from tpspan.kernels.board import COUNT_MASK

PAGE_NBYTES = 1 << 16
TEAM_SIZE = 4
SLOT = 5
NEAR_WRAP = COUNT_MASK - 50
GUARD = 64
SECOND_NS = 10**9

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
counts = st.one_of(st.integers(0, COUNT_MASK), st.sampled_from([0, 1, COUNT_MASK, 1 << 31]))
sizes = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.sampled_from([4096, 16384, 16400]))
Piece = tuple[int, int, int]


def words(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, dtype=np.uint32)


def lay_out(draws: Sequence[tuple[int, int, int]]) -> list[Piece]:
    """Pieces that read anywhere and write one after another, with gaps."""
    pieces, target = [], 0
    for source, gap, nbytes in draws:
        pieces.append((source, target + gap, nbytes))
        target += gap + nbytes
    return pieces


drawn_pieces = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20), sizes), max_size=8)


# ---------------------------------------------------------------- arithmetic


@settings(deadline=None)
@given(counts, st.integers(0, 1 << 31))
def test_arrival_is_cyclic(count: int, ahead: int) -> None:
    difference = np.subtract(*np.array([count + ahead, count]).astype(np.uint32), dtype=np.uint32)
    arrived = kernels.has_arrived((count + ahead) & COUNT_MASK, count)
    assert arrived == (difference.view(np.int32) >= 0) == (ahead < 1 << 31)


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_every_counter_has_a_line_of_its_own(world_size: int) -> None:
    num_slots = kernels.num_slots(PAGE_NBYTES, world_size)
    ranks = range(world_size)
    addresses = {
        kernels.counter_address(1 << 40, PAGE_NBYTES, world_size, slot, receiver, sender)
        for slot in range(num_slots)
        for receiver in ranks
        for sender in ranks
    }
    assert len(addresses) == num_slots * world_size**2
    assert min(addresses) == 1 << 40
    assert max(addresses) + kernels.LINE_NBYTES <= (1 << 40) + world_size * PAGE_NBYTES
    assert all(address % kernels.LINE_NBYTES == 0 for address in addresses)


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


# ---------------------------------------------------------------- copies on the host


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


@pytest.mark.slow
def test_host_copies_beyond_32_bits() -> None:
    nbytes = (1 << 32) + 5
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, nbytes, private) as source, mmap.mmap(-1, nbytes, private) as target:
        for memory in (source, target):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for place in (0, 1 << 31, nbytes - 1):
            source[place] = 7
        target_view, source_view = map(ctypes.c_char.from_buffer, (target, source))
        target_address, source_address = map(ctypes.addressof, (target_view, source_view))
        table = kernels.CopyTable.of([(0, 0, nbytes)])
        rows_address = table.rows.ctypes.data
        kernels.host_gather_copy(target_address, source_address, rows_address, 1)
        del target_view, source_view
        assert [target[place] for place in (0, 1, 1 << 31, nbytes - 1)] == [7, 0, 7, 7]


# ---------------------------------------------------------------- signals on the host, alone


@settings(deadline=None)
@given(counts, counts)
def test_host_post_and_wait_equal_the_reference(own: int, there: int) -> None:
    ours, theirs = words(own, there), words(own, there)
    kernels.host_post(ours[1:].ctypes.data, ours.ctypes.data)
    reference.reference_post(theirs[1:].ctypes.data, theirs.ctypes.data)
    assert ours.tolist() == theirs.tolist() == [(own + 1) & COUNT_MASK] * 2

    line = np.zeros(16, np.uint32)
    line[0] = there
    ours, theirs = words(own), words(own)
    missing = kernels.host_wait(line.ctypes.data, ours.ctypes.data, 0.0, peer=3)
    expected = reference.reference_wait(line.ctypes.data, theirs.ctypes.data, peer=3)
    assert missing == expected
    assert ours.tolist() == theirs.tolist()
    assert line.tolist() == [there] + [0] * 15, "no sleeper is left behind"


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), counts, st.data())
def test_host_barrier_equals_the_reference(
    world_size: int, slot: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    page_nbytes = 4096
    before = np.zeros(world_size * page_nbytes // 4, np.uint32)
    for peer in range(world_size):
        place = kernels.counter_address(0, page_nbytes, world_size, slot, rank, peer)
        before[place // 4] = (epoch + data.draw(st.sampled_from([0, 1, 2]))) & COUNT_MASK
    ours, theirs = before.copy(), before.copy()
    our_epoch, their_epoch = words(epoch), words(epoch)
    shape = (page_nbytes, slot, rank, world_size)
    missing = kernels.host_barrier(ours.ctypes.data, *shape, our_epoch.ctypes.data, 0.0)
    expected = reference.reference_barrier(theirs.ctypes.data, *shape, their_epoch.ctypes.data)
    assert missing == expected
    assert our_epoch.tolist() == their_epoch.tolist()
    assert np.array_equal(ours, theirs), "the same words were written, and no sleeper is left"


def test_a_waiting_thread_lets_python_run_and_is_woken() -> None:
    line, sent, expected = np.zeros(16, np.uint32), words(0), words(0)
    results: list[tuple[tuple[int, ...], float]] = []

    def wait() -> None:
        start = time.monotonic()
        missing = kernels.host_wait(line.ctypes.data, expected.ctypes.data, 20.0)
        results.append((missing, time.monotonic() - start))

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 10
    while line[1] == 0 and time.monotonic() < deadline:  # until it sleeps
        time.sleep(0.001)
    kernels.host_post(line.ctypes.data, sent.ctypes.data)
    thread.join(10)
    assert results and results[0][0] == () and results[0][1] < 10
    assert line.tolist() == [1, 0] + [0] * 14


def test_a_waiting_host_can_be_interrupted() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    line, expected = np.zeros(16, np.uint32), words(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(Interrupted):
            kernels.host_wait(line.ctypes.data, expected.ctypes.data, 30.0)
        assert time.monotonic() - start < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert line.tolist() == [0] * 16


# ---------------------------------------------------------------- signals between processes


class Member:
    """One rank of a team; its methods run in a process of its own."""

    def __init__(self, rank: int, memory: mmap.mmap) -> None:
        self.rank = rank
        self.view = np.frombuffer(memory, np.uint32)
        self.base = self.view.ctypes.data
        self.data = self.view[-64:]  # free for the tests' own data

    def barriers(self, world_size: int, num_rounds: int, delay_s: float, seed: int) -> list[int]:
        """Rounds in which every rank writes a word and reads everybody's after the barrier."""
        epoch = words(NEAR_WRAP)
        chance = random.Random(seed + self.rank)
        wrong = []
        place = (self.base, PAGE_NBYTES, SLOT, self.rank, world_size, epoch.ctypes.data)
        for number in range(num_rounds):
            half = self.data[TEAM_SIZE * (number % 2) :][:world_size]
            half[self.rank] = number
            if delay_s and chance.random() < 0.1:
                time.sleep(chance.random() * delay_s)
            missing = kernels.host_barrier(*place, 30.0)
            if missing or (half != number).any():
                wrong.append(number)
        assert epoch[0] == (NEAR_WRAP + num_rounds) & COUNT_MASK
        return wrong

    def late_barrier(self, world_size: int, timeout_s: float) -> tuple[tuple[int, ...], float]:
        epoch = words(NEAR_WRAP)
        place = (self.base, PAGE_NBYTES, SLOT, self.rank, world_size, epoch.ctypes.data)
        start = time.monotonic()
        return kernels.host_barrier(*place, timeout_s), time.monotonic() - start

    def ring(self, world_size: int, num_rounds: int, delay_s: float) -> list[int]:
        """Hand a number on around the ring: wait for the left neighbour, post to the right one."""
        sent, expected = words(NEAR_WRAP), words(NEAR_WRAP)
        left, right = (self.rank - 1) % world_size, (self.rank + 1) % world_size
        counter = [
            kernels.counter_address(self.base, PAGE_NBYTES, world_size, SLOT, *pair)
            for pair in ((self.rank, left), (right, self.rank))
        ]
        wrong = []
        for number in range(num_rounds):
            if self.rank == 0:
                self.data[0] = number
                kernels.host_post(counter[1], sent.ctypes.data)
            missing = kernels.host_wait(counter[0], expected.ctypes.data, 30.0, peer=left)
            total = number + (self.rank if self.rank else world_size - 1)
            if missing or self.data[0] != total - (self.rank > 0):
                wrong.append(number)
            if self.rank:
                self.data[0] += 1
                time.sleep(delay_s * (number % 10 == 0))
                kernels.host_post(counter[1], sent.ctypes.data)
        return wrong


def serve(rank: int, path: str, connection: Connection) -> None:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    member = Member(rank, memory)
    while (call := connection.recv()) is not None:
        name, arguments = call
        try:
            connection.send((True, getattr(member, name)(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Team:
    """Four processes that share a board."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.descriptor = os.memfd_create("kernels-test", os.MFD_CLOEXEC)
        nbytes = TEAM_SIZE * PAGE_NBYTES
        os.truncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.connections, self.processes = [], []
        for rank in range(TEAM_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, path, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def start(self, members: Sequence[int], name: str, *arguments: Any) -> None:
        for rank in members:
            self.connections[rank].send((name, arguments))

    def finish(self, members: Sequence[int]) -> list[Any]:
        answers = []
        for rank in members:
            assert self.connections[rank].poll(60), f"rank {rank} hangs"
            is_right, value = self.connections[rank].recv()
            assert is_right, value
            answers.append(value)
        return answers

    def run(self, members: Sequence[int], name: str, *arguments: Any) -> list[Any]:
        board = np.frombuffer(self.memory, np.uint32)
        board[:] = 0
        board[:: kernels.LINE_NBYTES // 4] = NEAR_WRAP  # every counter; other words of a line are 0
        del board
        self.start(members, name, *arguments)
        return self.finish(members)

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.send(None)
            process.join(20)
            process.close()
            connection.close()
        self.memory.close()
        os.close(self.descriptor)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team()
    yield team
    team.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_rounds", "delay_s"), [(4000, 0.0), (400, 0.002)])
def test_barriers_between_processes(
    team: Team, world_size: int, num_rounds: int, delay_s: float
) -> None:
    members = range(world_size)
    wrong = team.run(members, "barriers", world_size, num_rounds, delay_s, num_rounds)
    assert wrong == [[]] * world_size
    board = np.frombuffer(team.memory, np.uint32).reshape(TEAM_SIZE, -1, 16)
    sleepers = board[:world_size, : (SLOT + 1) * world_size, [1, 3]]
    assert not sleepers.any()


@pytest.mark.parametrize(("world_size", "absent"), [(2, {1}), (3, {0}), (4, {1, 3})])
def test_invariant_9_a_barrier_ends_at_its_deadline_and_names_who_did_not_come(
    team: Team, world_size: int, absent: set[int]
) -> None:
    members = [rank for rank in range(world_size) if rank not in absent]
    for missing, seconds in team.run(members, "late_barrier", world_size, 0.3):
        assert missing == tuple(sorted(absent))
        assert 0.3 <= seconds < 3


def test_a_rank_that_comes_late_wakes_all_that_sleep(team: Team) -> None:
    board = np.frombuffer(team.memory, np.uint32)
    board[:] = 0
    board[:: kernels.LINE_NBYTES // 4] = NEAR_WRAP
    team.start([0, 2, 3], "late_barrier", 4, 30.0)
    bell_sleepers = SLOT * 4 * kernels.LINE_NBYTES // 4 + 3
    deadline = time.monotonic() + 10
    while board[bell_sleepers] < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert board[bell_sleepers] == 3
    team.start([1], "late_barrier", 4, 30.0)
    assert all(missing == () and seconds < 15 for missing, seconds in team.finish(range(4)))
    assert board[bell_sleepers] == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("num_rounds", "delay_s"), [(2000, 0.0), (100, 0.002)])
def test_post_and_wait_around_a_ring(
    team: Team, world_size: int, num_rounds: int, delay_s: float
) -> None:
    wrong = team.run(range(world_size), "ring", world_size, num_rounds, delay_s)
    assert wrong == [[]] * world_size


# ---------------------------------------------------------------- device code run by Python


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


# ---------------------------------------------------------------- compiling


@pytest.fixture(scope="module")
def compilers() -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-python is not installed")
    for library in ("nvvm", "nvrtc"):
        try:
            pathfinder.load_nvidia_dynamic_lib(library)
        except pathfinder.DynamicLibNotFoundError:
            pytest.skip(f"numba needs lib{library} to compile for CUDA, and it is not installed")


@pytest.mark.parametrize("name", kernels.kernel_names())
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_compile_to_ptx_without_a_gpu(
    compilers: None, name: str, capability: tuple[int, int]
) -> None:
    ptx, symbol = kernels.compile_ptx(name, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert f".entry {symbol}(" in ptx
    assert ".local" not in ptx, "nothing spills to memory"
    instructions = {
        "post": ["fence.acq_rel.sys", "st.release.sys"],
        "wait": ["ld.acquire.sys", "%globaltimer"],
        "barrier": ["st.release.sys", "ld.acquire.sys", "%globaltimer", "bar.sync"],
    }
    for instruction in instructions.get(name, ["ld.global.L1::no_allocate.v2", "st.global.v2"]):
        assert instruction in ptx


# ---------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def gpu() -> int:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch sees none")
    kernels.prepare(0)
    return 0


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def device_words(*values: int) -> torch.Tensor:
    return torch.from_numpy(words(*values).view(np.int32)).cuda()


def host_words(tensor: torch.Tensor) -> list[int]:
    return tensor.cpu().numpy().view(np.uint32).tolist()


def pinned_words(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.int32).pin_memory()


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


@pytest.mark.cuda
@pytest.mark.parametrize("start", [0, COUNT_MASK - 2, (1 << 31) - 2])
def test_device_post_and_wait_equal_the_reference(gpu: int, start: int) -> None:
    ours, theirs = device_words(start, start, start), words(start, start, start)
    status = pinned_words(1)
    counter, sent, expected = (ours.data_ptr() + 4 * index for index in range(3))
    host_counter, host_sent, host_expected = (theirs.ctypes.data + 4 * i for i in range(3))
    for _ in range(5):
        kernels.post(counter, sent, device=gpu, stream=stream())
        kernels.wait(counter, expected, status.data_ptr(), SECOND_NS, device=gpu, stream=stream())
        reference.reference_post(host_counter, host_sent)
        assert reference.reference_wait(host_counter, host_expected) == ()
    assert host_words(ours) == theirs.tolist()
    assert host_words(status) == [0]


@pytest.mark.cuda
def test_invariant_9_a_device_wait_ends_at_its_deadline(gpu: int) -> None:
    counter, expected, status = device_words(0), device_words(0), pinned_words(1)
    torch.cuda.synchronize()
    start = time.monotonic()
    place = (counter.data_ptr(), expected.data_ptr(), status.data_ptr())
    kernels.wait(*place, SECOND_NS // 10, device=gpu, stream=stream())
    torch.cuda.synchronize()
    assert 0.09 < time.monotonic() - start < 5
    assert host_words(status) == [1] and host_words(expected) == [1]


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2, 3, 32, 33, 1024])
def test_device_barrier_equals_the_reference(gpu: int, world_size: int) -> None:
    """Peers play no part: what they would have stored stands in the board, or does not."""
    chance = random.Random(world_size)
    slot, epoch = 2, COUNT_MASK - 1
    page_nbytes = kernels.LINE_NBYTES * world_size * (slot + 1)
    for rank in {0, world_size // 2, world_size - 1}:
        for chance_missing in (0.0, 0.3):
            board = np.zeros(world_size * page_nbytes // 4, np.uint32)
            for peer in range(world_size):
                place = kernels.counter_address(0, page_nbytes, world_size, slot, rank, peer)
                ahead = 0 if chance.random() < chance_missing else chance.choice((1, 2))
                board[place // 4] = (epoch + ahead) & COUNT_MASK
            there = torch.from_numpy(board.view(np.int32)).cuda()
            our_epoch, their_epoch = device_words(epoch), words(epoch)
            status = pinned_words(world_size)
            shape = (page_nbytes, slot, rank, world_size)
            kernels.barrier(
                there.data_ptr(),
                *shape,
                our_epoch.data_ptr(),
                status.data_ptr(),
                SECOND_NS // 100,
                device=gpu,
                stream=stream(),
            )
            epoch_address = their_epoch.ctypes.data
            missing = reference.reference_barrier(board.ctypes.data, *shape, epoch_address)
            assert host_words(our_epoch) == their_epoch.tolist()
            assert host_words(there) == board.tolist()
            assert tuple(np.flatnonzero(host_words(status))) == missing


@pytest.mark.cuda
def test_a_captured_graph_advances_its_counts_at_every_replay(gpu: int) -> None:
    board, own = torch.zeros(1024, dtype=torch.int32, device="cuda"), device_words(0, 0, 0)
    status = pinned_words(2)
    epoch, sent, expected = (own.data_ptr() + 4 * index for index in range(3))
    source = torch.arange(100_000, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        base, flags = board.data_ptr(), status.data_ptr()
        shape = (base, 4096, 1, 0, 1, epoch, flags, SECOND_NS)
        kernels.barrier(*shape, device=gpu, stream=stream())
        kernels.post(base, sent, device=gpu, stream=stream())
        side.wait_stream(torch.cuda.current_stream())
        here = {"device": gpu, "stream": side.cuda_stream}
        kernels.wait(base, expected, flags + 4, SECOND_NS, **here)
        kernels.rotated_copy(target.data_ptr(), source.data_ptr(), 400_000, 1234, **here)
        torch.cuda.current_stream().wait_stream(side)
    assert host_words(own) == [0, 0, 0], "capture runs nothing"
    for replays in (1, 50):
        target.zero_()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(source, target)
    assert host_words(own) == [51, 51, 51] and host_words(board)[0] == 51
    assert host_words(status) == [0, 0]


@pytest.mark.cuda
def test_threads_without_a_context_may_launch(gpu: int) -> None:
    counter, sent = device_words(0), device_words(0)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            for _ in range(200):
                kernels.post(counter.data_ptr(), sent.data_ptr(), device=gpu, stream=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert host_words(sent) == host_words(counter) == [800]


@pytest.mark.cuda
def test_a_refused_launch_says_which_kernel(gpu: int) -> None:
    with pytest.raises(DriverError, match=r"cuLaunchKernel.*kernel='post'.*num_blocks=0"):
        kernels.kernel("post", gpu)(0, 0, 1, 0, 0)


@pytest.mark.cuda
def test_host_time_of_a_launch(gpu: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: the figure belongs to the machine."""
    counter, sent = device_words(0), device_words(0)
    addresses, queue = (counter.data_ptr(), sent.data_ptr()), stream()
    times = []
    for _ in range(2000):
        start = time.perf_counter_ns()
        kernels.post(*addresses, device=gpu, stream=queue)
        times.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\na launch takes {statistics.median(times) / 1e3:.2f} us of host time")
