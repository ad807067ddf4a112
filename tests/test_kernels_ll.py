"""Kernels that meet: how their calls are cut, and their protocol played on the host."""

from __future__ import annotations

import ctypes
import gc
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_play import KERNELS, Fault, Launch, Play, Thread
from tpspan.kernels import stream_fused, stream_ll
from tpspan.kernels.board import LINE_NBYTES
from tpspan.kernels.compile import DeviceKernel
from tpspan.kernels.stream_fused import (
    FUSED_PAIRS,
    ROUND_NBYTES,
    FusedPlace,
    FusedShape,
    fused_region_nbytes,
)
from tpspan.kernels.stream_ll import (
    LL_BLOCKS,
    LL_CAPACITY_NBYTES,
    LL_MOST_RANKS,
    LL_SLOT_NBYTES,
    LLPlace,
    ll_chunk,
    ll_region_nbytes,
)

LONG_NS = 10**15
NUM_BLOCKS, NUM_PAIRS, NUM_THREADS = 2, 2, 3
SLOT_NBYTES = 64
CAPACITY_NBYTES = NUM_BLOCKS * SLOT_NBYTES // 2
STAGED_NBYTES = 64  # of a pair in a round
MOST_ROUNDS = 8
REFRESH = 1 << 30
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@given(st.integers(0, LL_CAPACITY_NBYTES))
def test_chunks_of_words_cover_a_call_and_fit_their_slots(nbytes: int) -> None:
    chunk = ll_chunk(nbytes)
    assert chunk * 8 * LL_BLOCKS >= nbytes
    assert chunk * 16 <= LL_SLOT_NBYTES
    assert chunk % 32 == 0, "whole warps"


def test_slots_fill_a_region() -> None:
    assert LL_SLOT_NBYTES % 16 == 0
    assert LL_SLOT_NBYTES * LL_BLOCKS == 2 * LL_CAPACITY_NBYTES
    for size in range(2, LL_MOST_RANKS + 1):
        last = ((2 * size - 1) * LL_BLOCKS + LL_BLOCKS - 1) * LL_SLOT_NBYTES
        assert last + LL_SLOT_NBYTES == ll_region_nbytes(size)
    for name in ("device_ll", "device_fused"):
        assert f"_MOST_RANKS = {LL_MOST_RANKS}\n" in (KERNELS / f"{name}.py").read_text()
    text, num = (KERNELS / "device_fused.py").read_text(), stream_fused._NUM_SLOTS
    assert f"_NUM_SLOTS = types.uint32({num})\n" in text
    assert f"_SLOT_MASK = types.uint32({num - 1})\n" in text
    assert f"_SLOT_BITS = {num.bit_length() - 1}\n" in text


@given(st.one_of(st.integers(0, 9 << 20), st.integers(0, 1 << 40)), st.integers(1, LL_MOST_RANKS))
def test_rounds_of_chunks_cover_a_call_and_fit_their_slots(nbytes: int, num_parts: int) -> None:
    shape = FusedShape.of(nbytes, num_parts)
    chunk, num_chunks = shape.chunk_nbytes, shape.num_pairs * shape.num_rounds
    assert chunk * num_chunks >= nbytes and chunk % 16 == 0
    assert chunk * num_parts <= ROUND_NBYTES
    assert (chunk - 16) * num_chunks < nbytes or chunk == 1024, "no larger than it must be"
    assert shape.num_pairs * chunk * num_parts <= fused_region_nbytes() // stream_fused._NUM_SLOTS
    fewer = (shape.num_rounds - 1) * FUSED_PAIRS * (ROUND_NBYTES // num_parts // 16 * 16)
    assert nbytes > fewer or shape.num_rounds == 1, "no more rounds than it must have"


def test_every_block_can_run_at_the_same_time() -> None:
    assert 2 * FUSED_PAIRS <= 132, "the multiprocessors of an H100"


def test_a_bound_launch_keeps_its_arguments() -> None:
    """Without a driver: what it would be called with."""
    asked: list[tuple[object, ...]] = []

    def launch(*call: object) -> tuple[int]:
        asked.append(call)
        return (0,)

    made: DeviceKernel = object.__new__(DeviceKernel)
    made.name, made.device_index = "post", 0
    vars(made).update(
        _driver=SimpleNamespace(CUstream=lambda handle: ("stream", handle)),
        _launch=launch,
        _function="post",
        _current_device=lambda: 0,
    )
    launches = [made.bind(3, 64, number, -number) for number in (5, 1 << 40)]
    gc.collect()
    for stream in (7, 0, 7):
        launches[stream == 0](stream)
    assert [call[:9] for call in asked] == [
        ("post", 3, 1, 1, 64, 1, 1, 0, ("stream", stream)) for stream in (7, 0, 7)
    ]
    for call, number in zip(asked, (5, 1 << 40, 5), strict=True):
        pointers = (ctypes.c_void_p * 2).from_address(int(str(call[9])))
        assert [ctypes.c_int64.from_address(int(each or 0)).value for each in pointers] == [
            number,
            -number,
        ]


class Recorder:
    """In place of a kernel: what it is launched with, by the names of its source."""

    def __init__(self, name: str, module: str) -> None:
        self.signature = inspect.signature(Play(2, 0).module(module)[name])

    def __call__(self, stream: int, num_blocks: int, num_threads: int, *arguments: int) -> None:
        assert stream == 99
        self.bind(num_blocks, num_threads, *arguments)

    def bind(self, num_blocks: int, num_threads: int, *arguments: int) -> Callable[[int], None]:
        shape = {"num_blocks": num_blocks, "num_threads": num_threads}
        RECORDED.append({**self.signature.bind(*arguments).arguments, **shape})
        return lambda stream: None


RECORDED: list[dict[str, int]] = []


def test_kernels_get_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((stream_ll, "device_ll"), (stream_fused, "device_fused")):
        monkeypatch.setattr(module, "kernel", lambda kind, device, name=name: Recorder(kind, name))
    words = LLPlace(*range(30, 38))
    staged = FusedPlace(30, fused_region_nbytes(), *range(32, 40))
    call = (10, 11, 3200)
    RECORDED.clear()
    stream_ll.ll_gather(words, *call, 99)
    stream_ll.plan_ll_gather(words, *call)
    stream_fused.fused_gather(staged, *call, 99)
    stream_fused.plan_fused_gather(staged, *call)
    for dtype in DTYPES.values():
        name = str(dtype).removeprefix("torch.")
        stream_ll.ll_sum(words, name, *call, 2, 99)
        stream_ll.plan_ll_sum(words, name, *call, 2)
        stream_fused.fused_sum(staged, name, *call, 2, 99)
        stream_fused.plan_fused_sum(staged, name, *call, 2)
        stream_fused.fused_scatter(staged, name, *call, 2, 99)
    assert len(RECORDED) == 19
    for got in RECORDED:
        is_words = "chunk" in got
        place = vars(words) if is_words else vars(staged)
        expected = {**place, "target": 10, "source": 11, "nbytes": 3200}
        if "divisor" in got:
            expected["divisor"] = 2
        if is_words:
            expected |= {"chunk": 32, "slot_nbytes": LL_SLOT_NBYTES, "num_blocks": LL_BLOCKS}
        else:
            expected |= {"chunk_nbytes": 1024, "num_rounds": 1, "num_blocks": 2 * FUSED_PAIRS}
            expected["slot_nbytes"] = ROUND_NBYTES
        threads = got.pop("num_threads")
        assert threads % 32 == 0 and threads >= LL_MOST_RANKS
        del expected["device"]
        assert got == expected


@pytest.mark.parametrize("nbytes", [-1, LL_CAPACITY_NBYTES + 1])
def test_calls_that_do_not_fit_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="there is room for"):
        stream_ll.ll_gather(LLPlace(0, 0, 0, 2, 0, 0, 0, 0), 0, 0, nbytes, 0)
    with pytest.raises(ValueError, match="-1 bytes|bytes to stage in"):
        stream_fused.fused_gather(FusedPlace(0, 256, *[0] * 8), 0, 0, nbytes, 0)


@dataclass(frozen=True)
class Call:
    """A call that all ranks make; where a rank's tensors lie is its own affair."""

    kind: str
    nbytes: int
    divisor: int = 1

    @property
    def is_sum(self) -> bool:
        """Whether numbers are added."""
        return "gather" not in self.kind

    @property
    def is_scatter(self) -> bool:
        return "scatter" in self.kind


class Stage:
    """Ranks in a play, and calls of theirs with the results they must have."""

    def __init__(
        self,
        world_size: int,
        seed: int,
        *,
        start: int = 0,
        edit: Sequence[tuple[str, str]] = (),
        timeout_ns: int = LONG_NS,
        is_slow: Callable[[Thread], bool] = lambda thread: False,
        seldom: int = 20,
    ) -> None:
        self.size, self.timeout_ns = world_size, timeout_ns
        self.play = play = Play(world_size, seed, edit, is_slow=is_slow, seldom=seldom)
        self.chance = random.Random(seed)

        def regions(nbytes: int) -> int:
            places = [play.allocate(rank, nbytes, is_shared=True) for rank in range(world_size)]
            self.region_nbytes.append(places[1] - places[0])
            return places[0]

        self.region_nbytes: list[int] = []
        self.words = regions(2 * world_size * NUM_BLOCKS * SLOT_NBYTES)
        self.board = regions(2 * NUM_PAIRS * world_size * LINE_NBYTES)
        self.staging = regions(8 * NUM_PAIRS * STAGED_NBYTES - 64)  # with what is left around it
        assert self.region_nbytes[2] == 8 * NUM_PAIRS * STAGED_NBYTES
        for one in play.ranges[-world_size:]:
            one.end += 64
        self.status = [play.allocate(rank, 4 * world_size) for rank in range(world_size)]
        # Counts of words, then counts of rounds, each beside the mark of who has given up.
        nbytes = 4 * NUM_BLOCKS + 16 * NUM_PAIRS
        self.epochs = [play.allocate(rank, nbytes) for rank in range(world_size)]
        for rank in range(world_size):
            counts = play.view(self.epochs[rank], nbytes).view(np.uint32)
            counts[:NUM_BLOCKS] = counts[NUM_BLOCKS::2] = start & 0xFFFF_FFFF
            begin = self.board + rank * self.region_nbytes[1]
            lines = play.view(begin, 2 * NUM_PAIRS * world_size * LINE_NBYTES)
            lines.view(np.uint32)[:: LINE_NBYTES // 4] = start & 0xFFFF_FFFF

    def random_call(self) -> Call:
        kinds = ["ll_gather", "ll_sum", "ll_sum", "fused_gather", "fused_sum", "fused_scatter"]
        return self.random_call_of(self.chance.choice(kinds))

    def random_call_of(self, kind: str) -> Call:
        is_words = kind.startswith("ll")
        limit = CAPACITY_NBYTES if is_words else MOST_ROUNDS * NUM_PAIRS * STAGED_NBYTES
        if kind == "fused_scatter":
            limit = limit // self.size // 16 * 16
        border = limit if is_words else self.chance.randint(1, MOST_ROUNDS) * limit // MOST_ROUNDS
        nbytes = self.chance.choice(
            [0, 1, 7, 8, 9, border - 1, border, self.chance.randint(0, limit)]
        )
        if kind.endswith("gather"):
            return Call(kind, nbytes)
        name = self.chance.choice(list(DTYPES))
        unit = DTYPES[name].itemsize if kind.startswith("ll") else 16
        divisor = self.chance.choice([1, self.size])
        return Call(f"{kind}_{name}", nbytes // unit * unit, divisor)

    def add(self, call: Call, ranks: Sequence[int] | None = None) -> None:
        """Put a call at the end of the queues."""
        sources = [self._source(call) for _ in range(self.size)]
        most = STAGED_NBYTES // 16 // (self.size if call.is_scatter else 1)
        shape = self.chance.randint(1, NUM_PAIRS), 16 * self.chance.randint(1, most)
        for rank in range(self.size) if ranks is None else ranks:
            self._add(call, rank, sources, *shape)

    def late(self, rank: int) -> list[int]:
        return self.play.view(self.status[rank], 4 * self.size).view(np.uint32).tolist()

    def _source(self, call: Call) -> bytes:
        if not call.is_sum:
            return self.chance.randbytes(call.nbytes)
        dtype = DTYPES[call.kind.rpartition("_")[2]]
        numel = call.nbytes // dtype.itemsize * (self.size if call.is_scatter else 1)
        values = [self.chance.uniform(-2, 2) for _ in range(numel)]
        return raw(torch.tensor(values).to(dtype))

    def _add(
        self, call: Call, rank: int, sources: list[bytes], num_pairs: int, staged: int
    ) -> None:
        nbytes, play = call.nbytes, self.play
        is_words = call.kind.startswith("ll")
        unit = DTYPES[call.kind.rpartition("_")[2]].itemsize if call.is_sum else 1
        shift = self.chance.choice([0, self.chance.randrange(0, 16, unit)])
        length = nbytes if call.is_sum else self.size * nbytes
        given = len(sources[rank])
        target_shift = self.chance.choice([0, shift])
        is_in_place = self.chance.random() < 0.5
        if call.is_scatter and is_in_place:  # the target is a part of the source
            source = play.allocate(rank, given + 16, shift=target_shift)
            target = source + rank * nbytes
        else:
            target = play.allocate(rank, length + 16, shift=target_shift)
            own = target if call.is_sum else target + rank * nbytes
            source = own if is_in_place else play.allocate(rank, given + 16, shift=shift)
        first, last = min(source, target), max(source + given, target + length)
        if not is_in_place:
            first, last = target, target + length
        whole = first - target_shift, last - first + 16
        play.view(*whole)[:] = 0xA5
        play.view(source, given)[:] = np.frombuffer(sources[rank], np.uint8)
        expected = b"".join(sources)
        if call.is_sum:
            expected = added(call, sources, rank)

        def check() -> None:
            assert play.view(target, length).tobytes() == expected, (call, rank)
            around = play.view(*whole)
            assert (around[:target_shift] == 0xA5).all(), "nothing before the target"
            assert (around[target_shift + last - first :] == 0xA5).all(), "nothing behind it"
            if call.is_scatter and is_in_place:
                kept = bytearray(sources[rank])
                kept[rank * nbytes : (rank + 1) * nbytes] = expected
                assert play.view(source, given).tobytes() == bytes(kept), "only its own part"

        sizes = (self.size, call.divisor) if call.is_sum else (self.size,)
        ends = (self.status[rank], self.timeout_ns)
        arguments: tuple[int, ...]
        place: tuple[int, ...]
        num_blocks = NUM_BLOCKS if is_words else 2 * num_pairs
        if is_words:
            chunk = max(-(-nbytes // (8 * NUM_BLOCKS)), 1)
            place = (self.words, self.region_nbytes[0], SLOT_NBYTES, rank, *sizes)
            arguments = (target, source, nbytes, chunk, *place, self.epochs[rank], *ends)
        else:
            num_rounds = max(-(-nbytes // (num_pairs * staged)), 1)
            place = (self.staging, self.region_nbytes[2], STAGED_NBYTES, self.board)
            place = (*place, self.region_nbytes[1], rank)
            epochs = self.epochs[rank] + 4 * NUM_BLOCKS
            arguments = (target, source, nbytes, staged, num_rounds, *place, *sizes, epochs, *ends)

        def expecting() -> None:
            if not any(self.late(rank)):
                check()

        num_threads = max(NUM_THREADS, self.size)
        play.queues[rank].append(Launch(call.kind, num_blocks, num_threads, arguments, expecting))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def added(call: Call, sources: list[bytes], rank: int) -> bytes:
    dtype = DTYPES[call.kind.rpartition("_")[2]]
    if not call.nbytes:
        return b""
    if call.is_scatter:
        sources = [each[rank * call.nbytes : (rank + 1) * call.nbytes] for each in sources]
    tensors = [torch.frombuffer(bytearray(one), dtype=dtype).float() for one in sources]
    total = tensors[0]
    for more in tensors[1:]:
        total = total + more
    return raw((total / call.divisor).to(dtype))


STARTS = (0, REFRESH - 6, 3 * REFRESH - 5, 4 * REFRESH - 7)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("start", STARTS)
def test_invariant_6_any_calls_in_any_interleaving(world_size: int, start: int) -> None:
    """Right results, no byte beside them, no word overwritten unread, every barrier reached."""
    for seed in range(3):
        stage = Stage(world_size, seed + start, start=start)
        for _ in range(14):
            stage.add(stage.random_call())
        stage.play.run()
        assert all(not any(stage.late(rank)) for rank in range(world_size))


BREAKS = {
    "one slot": ("device_ll", "types.int64(count & _ONE) * world_size", "0 * world_size"),
    "empty blocks are silent": ("device_ll", "first, chunk), 1)", "first, chunk), 0)"),
    "one word's flag is enough": (
        "device_ll",
        "(pair[0] >> _HALF) == (tag >> _HALF) and (pair[1] >> _HALF)",
        "(pair[0] >> _HALF)",
    ),
    "one slot of bytes": ("device_fused", "types.int64(count & _SLOT_MASK)", "0"),
    "no fence": ("device_fused", "        ptx.fence_system()\n", "        pass\n"),
    "no barrier": ("device_fused", "    cuda.syncthreads()  # it is", "    0  # it is"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_play_finds_what_is_broken(name: str) -> None:
    module, old, new = BREAKS[name]
    assert old in (KERNELS / f"{module}.py").read_text()
    kind = "ll_gather" if module == "device_ll" else "fused_gather"
    with pytest.raises((Fault, AssertionError)):
        for seed in range(40):
            stage = Stage(2, seed, edit=[(old, new)])
            for turn in range(12):
                stage.add(Call(kind, 0 if "empty" in name and turn % 2 else 60))
            stage.play.run()


def slow(world_size: int, seed: int) -> dict[str, Any]:
    """Who is slow: all of a rank, then one thread of it, then the next, then nobody."""
    rank, which = seed % world_size, seed // world_size % (NUM_THREADS + 2)
    if which == 0:
        return {"is_slow": lambda thread: thread.rank == rank}
    return {"is_slow": lambda thread: thread.rank == rank and thread.index == which - 1}


@pytest.mark.parametrize("kind", ["fused_gather", "fused_sum", "fused_scatter"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_invariant_6_rounds_of_slow_readers_and_writers(world_size: int, kind: str) -> None:
    """Calls of many rounds right behind each other; slots are taken in turn through all of them."""
    for seed in range(5 * world_size):
        stage = Stage(world_size, seed, start=(0, -9)[seed // 2 % 2], **slow(world_size, seed))
        for _ in range(3):
            stage.add(stage.random_call_of(kind))
        stage.play.run()
        assert all(not any(stage.late(rank)) for rank in range(world_size))
        for rank in range(world_size):
            counts = stage.play.view(stage.epochs[rank] + 4 * NUM_BLOCKS, 16 * NUM_PAIRS)
            assert not counts.view(np.uint32)[1::2].any(), "nobody gave up"


ROUND_BREAKS = {
    "three slots": ("types.int64(count & _SLOT_MASK)", "types.int64(int(count) % 3)"),
    "two slots": ("_SLOT_MASK = types.uint32(7)", "_SLOT_MASK = types.uint32(1)"),
    "no wait": ("came = _await_count(own, count,", "came = 0 or (lambda *_: _CAME)(own, count,"),
    "a wait for the round before": ("_await_count(own, count,", "_await_count(own, count - _ONE,"),
    "a slot is free a round early": ("count - _NUM_SLOTS", "count - _NUM_SLOTS - _ONE"),
    "no barrier before a post": ("    cuda.syncthreads()  # it is", "    0  # it is"),
    "a reader has seen too much": ("seen[0] = before\n", "seen[0] = before + _ONE\n"),
    "a round was read before what it loaded came": (
        "was_read = types.uint32(count - _ONE)",
        "was_read = count",
    ),
    "no barrier before the last post": ("cuda.syncthreads()\n", "pass\n"),
    "a stager has seen too much": (
        "seen[0] = types.uint32(before - _NUM_SLOTS)",
        "seen[0] = before",
    ),
}


@pytest.mark.parametrize("name", ROUND_BREAKS)
@pytest.mark.parametrize("kind", ["fused_gather", "fused_sum_f32", "fused_scatter_f32"])
def test_the_play_finds_broken_rounds(name: str, kind: str) -> None:
    """The same calls are right in a play of the kernels as they are."""
    old, new = ROUND_BREAKS[name]
    assert old in (KERNELS / "device_fused.py").read_text()

    def play(seed: int, edit: list[tuple[str, str]]) -> None:
        stage = Stage(2, seed, edit=edit, **slow(2, seed))
        for _ in range(3):
            stage.add(Call(kind, MOST_ROUNDS * NUM_PAIRS * 32))
        stage.play.run()

    play(0, [])
    with pytest.raises((Fault, AssertionError)):
        for seed in range(30):
            play(seed, [(old, new)])


def num_late(kind: str, edit: Sequence[tuple[str, str]] = ()) -> int:
    """Plays in which a rank may come too late: who gave up. Who did not must have right results."""
    found = 0
    for seed in range(12):
        patience = random.Random(seed).choice([8000, 14_000, 20_000, 26_000])
        stage = Stage(2, seed, edit=edit, timeout_ns=patience, **slow(2, seed % 2), seldom=40)
        for _ in range(3):
            stage.add(Call(kind, 192))
        stage.play.run()
        found += sum(any(stage.late(rank)) for rank in range(2))
    return found


@pytest.mark.parametrize("kind", ["fused_gather", "fused_sum_bf16", "fused_scatter_f16"])
def test_invariant_9_who_comes_too_late_reads_what_it_should_or_finds_out(kind: str) -> None:
    assert 4 < num_late(kind) < 24


def test_the_play_finds_who_goes_on_without_others() -> None:
    edit = "return cuda.syncthreads_or(is_late) == 0", "return not cuda.syncthreads()"
    assert edit[0] in (KERNELS / "device_fused.py").read_text()
    with pytest.raises(AssertionError):
        num_late("fused_gather", [edit])


@pytest.mark.parametrize("kind", ["fused_gather", "fused_sum_f32", "fused_scatter_bf16"])
@pytest.mark.parametrize("block", range(2))
def test_invariant_9_a_pair_that_has_given_up_stays_away(kind: str, block: int) -> None:
    """The other ranks find out; were its rounds to go on, they would miss those in between."""
    stage = Stage(2, 1, timeout_ns=3000)
    marks = stage.play.view(stage.epochs[0] + 4 * NUM_BLOCKS, 16 * NUM_PAIRS).view(np.uint32)
    marks[2 * block + 1] = 1
    stage.play.view(stage.status[0], 8).view(np.uint32)[1] = 1  # why it did
    stage.add(Call(kind, 192))
    stage.play.run()
    assert stage.late(1) == [1, 0]
    lines = stage.play.view(stage.board + stage.region_nbytes[1], 4 * LINE_NBYTES).view(np.uint32)
    assert not lines[:: 2 * LINE_NBYTES // 4].any(), "its first pair has posted nothing"


def test_a_flag_from_one_round_ago_is_not_mistaken() -> None:
    """The far end of a slot keeps the flags of long ago, until the last launches of a quarter."""
    for seed in range(4):
        stage = Stage(2, seed, start=REFRESH - 4)
        stage.add(Call("ll_gather", CAPACITY_NBYTES))
        for _ in range(3):
            stage.add(Call("ll_gather", 1))
        stage.play.run()
        end = SLOT_NBYTES // 8
        for rank in range(2):
            begin = stage.words + rank * stage.region_nbytes[0]
            words = stage.play.view(begin, 2 * 2 * NUM_BLOCKS * SLOT_NBYTES).view(np.uint64)
            slots = words.reshape(2, 2, NUM_BLOCKS, end)[:, 1 - rank]
            flags = slots >> np.uint64(32)
            assert (flags[0, :, 2:] == REFRESH - 2).all() and (flags[1, :, 2:] == REFRESH - 1).all()


@pytest.mark.parametrize(
    "kind", ["ll_gather", "ll_sum_bf16", "fused_gather", "fused_sum_f32", "fused_scatter_f32"]
)
def test_invariant_9_a_rank_that_does_not_come_is_named(kind: str) -> None:
    stage = Stage(3, 1, timeout_ns=3000)
    for _ in range(2):
        stage.add(Call(kind, 48), ranks=[0, 2])
    stage.play.run()
    assert [stage.late(rank) for rank in (0, 2)] == [[0, 1, 0]] * 2
