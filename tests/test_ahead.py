"""Calls in parts that are staged ahead: what may be overwritten when, on played streams."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bodies import cuda_logic
from stream_play import MEETING_US, SWITCH_US, Event, Operation, Play, Stream
from tpspan.distributed import ahead, buffers, cuda_group, cuda_reduce
from tpspan.distributed.ahead import StagedAhead, cut
from tpspan.distributed.buffers import Buffers
from tpspan.distributed.cuda_group import CudaGroup
from tpspan.distributed.requests import Reduction

FIRST, BUFFER = 1 << 10, 16 << 10
SIZES = [16, 608, 2 * FIRST, 4 * FIRST, 5008, 10_000, 25_008, 70_000]  # of one rank, in bytes
CALLS = ("all_gather", "all_gather in place", "reduce_scatter", "all_reduce", "list", "broadcast")


class Stage:
    """Ranks of one process whose GPUs are played."""

    def __init__(self, num_ranks: int, patch: pytest.MonkeyPatch) -> None:
        self.play = Play(num_ranks)
        self.rank = 0
        self.num_parts: set[int] = set()
        self.wrong: list[str] = []
        self._kept: list[torch.Tensor] = []
        self._programs = [[Stream(self.play, r) for _ in range(2)] for r in range(num_ranks)]
        self.current = self._programs[0][0]
        region_nbytes = 3 * BUFFER
        memory = self.tensor(num_ranks * region_nbytes, torch.uint8, in_areas_of=region_nbytes)
        self._patch(patch)
        self._groups = [self._group(r, num_ranks, memory.data_ptr()) for r in range(num_ranks)]

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        asked = SimpleNamespace(
            _cuda_getDevice=lambda: 0,
            _cuda_isCurrentStreamCapturing=lambda: False,
            _cuda_getCurrentRawStream=lambda index: self.current.cuda_stream,
        )

        def noted_cut(*arguments: int) -> list[tuple[int, int]]:
            parts = whole_cut(*arguments)
            self.num_parts.add(len(parts))
            return parts

        whole_cut = ahead.cut
        patch.setattr(ahead, "cut", noted_cut)
        patch.setattr(ahead, "_FIRST_NBYTES", FIRST * (self.play.num_ranks - 1))
        patch.setattr(ahead, "LARGE_NBYTES", 2 * FIRST)
        patch.setattr(buffers, "_LARGEST_NBYTES", BUFFER)
        patch.setattr(cuda_group, "LARGE_NBYTES", 2 * FIRST)
        patch.setattr(cuda_group, "ONE_SHOT_NBYTES", 64)
        patch.setattr(cuda_group, "_C", asked)
        patch.setattr(cuda_group, "pull", self._pull)
        patch.setattr(cuda_reduce, "pull", self._pull)
        patch.setattr(cuda_reduce, "device_sum", self._sum)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self.play, self.rank))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)

    def _group(self, rank: int, num_ranks: int, address: int) -> CudaGroup:
        self.rank = rank
        group: CudaGroup = object.__new__(CudaGroup)
        staging = staging_of(rank, num_ranks, address, BUFFER, self._copy, self.meet)
        vars(group).update(
            rank=rank,
            world_size=num_ranks,
            world=SimpleNamespace(shares_device=False),
            _index=0,
            _buffers=staging,
            _journal=SimpleNamespace(note=lambda *words: None, check=lambda: None),
            _host_buffers=None,
            _fused=None,
            _ahead=StagedAhead(staging, torch.device("cpu")),
            _lock=threading.RLock(),
            _last=None,
            _last_handle=-1,
            _others=[(rank + k) % num_ranks for k in range(1, num_ranks)],
        )
        return group

    def tensor(self, numel: int, dtype: torch.dtype, in_areas_of: int = 0) -> torch.Tensor:
        made = torch.zeros(numel, dtype=dtype)
        self._kept.append(made)
        each = in_areas_of or made.nbytes
        for at in range(0, made.nbytes, each):
            self.play.area(made.data_ptr() + at, each)
        return made

    def put(self, stream: int, name: str, **what: Any) -> None:
        self.play.streams[stream].put(Operation(f"{name} of rank {self.rank}", **what))

    def meet(self, stream: int) -> None:
        self.put(stream, "meeting", meets=True)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.put(
            stream,
            "copy",
            reads=[(source, nbytes)],
            writes=[(target, nbytes)],
            action=lambda: ctypes.memmove(target, source, nbytes),
        )

    def _pull(self, *args: int, device: int, stream: int) -> None:
        target, target_stride, source, source_stride, piece, total, rank, size, num = args
        reads, writes = [], []
        for peer in ((rank + k) % size for k in range(1, num + 1)):
            part = min(piece, max(total - peer * piece, 0))
            reads.append((source + peer * source_stride, part))
            writes.append((target + peer * target_stride, part))
        action = lambda: cuda_logic.pull(*args)  # noqa: E731
        self.put(stream, "pull", reads=reads, writes=writes, action=action)

    def _sum(self, dtype: str, *args: int, device: int, stream: int) -> None:
        target, second, source, stride, own, numel, rank, size, _ = args
        places = [source + peer * stride if peer != rank else own for peer in range(size)]
        nbytes = numel * getattr(torch, dtype).itemsize
        self.put(
            stream,
            "sum",
            reads=[(place, nbytes) for place in places],
            writes=[(place, nbytes) for place in (target, second) if place],
            action=lambda: cuda_logic.device_sum(dtype, *args),
        )

    def perform(self, program: list[tuple[str, int, int]], seed: int) -> None:
        """Let every rank make the calls (name, bytes, which stream), then carry them out."""
        for rank, group in enumerate(self._groups):
            self.rank = rank
            for turn, (name, nbytes, stream) in enumerate(program):
                before, self.current = self.current, self._programs[rank][stream]
                if before.rank == rank:
                    self.current.wait_stream(before)
                self._call(group, name, nbytes // 4, turn)
        self.play.run(seed)

    def _call(self, group: CudaGroup, name: str, numel: int, turn: int) -> None:
        """One call, its tensors written right before it, read and overwritten right behind it."""
        rank, size = group.rank, group.world_size

        def given(rank: int, numel: int) -> torch.Tensor:
            return (torch.arange(numel) % 97 + 100 * rank + 7 * turn).float()

        each = [given(r, numel) for r in range(size)]
        total, whole = torch.stack(each).sum(0), given(rank, size * numel)
        slices = [given(r, size * numel)[rank * numel :][:numel] for r in range(size)]
        own = slice(rank * numel, (rank + 1) * numel)
        piece, single = self.tensor(numel, torch.float32), self.tensor(numel, torch.float32)
        out, lengths = self.tensor(size * numel, torch.float32), [numel + r for r in range(size)]
        call: Callable[[], None]
        if name == "all_gather":
            source, result, value, expected = piece, out, each[rank], torch.cat(each)
            call = lambda: group.all_gather(out, piece)  # noqa: E731
        elif name == "all_gather in place":
            source, result, value, expected = out[own], out, each[rank], torch.cat(each)
            call = lambda: group.all_gather(out, out[own])  # noqa: E731
        elif name == "reduce_scatter":
            source, result, value, expected = out, piece, whole, torch.stack(slices).sum(0)
            call = lambda: group.reduce_scatter(piece, out, Reduction.SUM)  # noqa: E731
        elif name == "all_reduce":
            source, result, value, expected = piece, piece, each[rank], total
            call = lambda: group.all_reduce(piece, Reduction.SUM)  # noqa: E731
        elif name == "list":
            source = self.tensor(lengths[rank], torch.float32)
            result = self.tensor(sum(lengths), torch.float32)
            value = given(rank, lengths[rank])
            expected = torch.cat([given(r, n) for r, n in enumerate(lengths)])
            call = lambda: group.all_gather_list(result.split(lengths), source)  # noqa: E731
        else:
            source, result, value, expected = single, single, each[rank], each[-1]
            call = lambda: group.broadcast(single, size - 1)  # noqa: E731

        def compare() -> None:
            if not result.equal(expected):
                self.wrong.append(f"{name} of {numel} in turn {turn} at rank {rank}")

        here = self.current.cuda_stream
        inputs, outputs = ([(t.data_ptr(), t.nbytes)] for t in (source, result))
        self.put(here, "input", writes=inputs, action=lambda: source.copy_(value))
        group.run(call, [], False)
        self.put(here, "output", reads=outputs, action=compare)
        for tensor, place in ((source, inputs), (result, outputs)):
            self.put(here, "end", writes=place, action=tensor.zero_)


def staging_of(
    rank: int,
    num_ranks: int,
    address: int,
    nbytes: int,
    copy: Callable[[int, int, int, int], None],
    meet: Callable[[int], None],
) -> Buffers:
    """Buffers of a rank whose copies and meetings go where the caller says."""
    made: Buffers = object.__new__(Buffers)
    vars(made).update(
        rank=rank,
        world_size=num_ranks,
        device_index=0,
        on_host=False,
        capturing=False,
        nbytes=nbytes,
        region_nbytes=3 * nbytes,
        _turn=0,
        _slots=(0, 1),
        _range=SimpleNamespace(address=address, nbytes=num_ranks * 3 * nbytes),
        _driver=SimpleNamespace(copy=copy),
        _signals=SimpleNamespace(barrier=lambda slot, stream, capturing: meet(stream)),
    )
    return made


def program_of(num_calls: int, seed: int) -> list[tuple[str, int, int]]:
    """Calls of all kinds and sizes in any order, some right behind one of their kind."""
    chance = random.Random(seed)
    return [
        (chance.choice(CALLS), chance.choice(SIZES), int(chance.random() < 0.3))
        for _ in range(num_calls)
    ]


@pytest.fixture
def stage_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Stage]]:
    yield lambda num_ranks: Stage(num_ranks, monkeypatch)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_invariant_6_every_read_is_ordered(
    stage_of: Callable[[int], Stage], num_ranks: int
) -> None:
    """No place is written while a peer may read it, or read before it is written."""
    stage = stage_of(num_ranks)
    stage.perform(program_of(30, seed=num_ranks), seed=num_ranks)
    assert stage.play.races == []
    assert stage.wrong == []
    assert {2, 4, 6} < stage.num_parts
    assert all(num % 2 == 0 for num in stage.num_parts)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("guard", ["used", "met", "behind", "even", "turn"])
def test_without_a_guard_reads_are_not_ordered(
    stage_of: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch, guard: str, num_ranks: int
) -> None:
    """Each of what invariant 6 rests on is needed, and this would be noticed."""
    stage = stage_of(num_ranks)
    sides = [group._ahead._side for group in stage._groups if group._ahead is not None]
    whole_cut, wait_stream, take = ahead.cut, Stream.wait_stream, Buffers.take
    if guard == "used":
        for side in sides:
            monkeypatch.setattr(side, "wait_event", lambda event: None)
    elif guard in ("met", "behind"):

        def wait_for_some(stream: Stream, other: Stream) -> None:
            if (other if guard == "met" else stream) not in sides:
                wait_stream(stream, other)

        monkeypatch.setattr(Stream, "wait_stream", wait_for_some)
    elif guard == "even":

        def odd_cut(*arguments: int) -> list[tuple[int, int]]:
            (at, nbytes), *others = whole_cut(*arguments)
            return [(at, 256), (at + 256, nbytes - 256), *others]

        monkeypatch.setattr(ahead, "cut", odd_cut)
    else:

        def take_the_last(staging: Buffers, half: int = 0) -> int:
            """Begin in the buffer that may still be read."""
            if not half:
                staging._turn = 0
            return take(staging, half)

        monkeypatch.setattr(Buffers, "take", take_the_last)
    stage.perform(program_of(10, seed=num_ranks), seed=num_ranks)
    assert stage.play.races


LINK, LOCAL = 390e3, 2100e3  # bytes a µs of two H200


def gather_on(current: Stream, nbytes: int, patch: pytest.MonkeyPatch) -> None:
    """One of two ranks puts a gather of so many bytes of each on its streams."""
    play = current.play
    patch.setattr(torch.cuda, "Stream", lambda device: Stream(play, current.rank))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", lambda: current)

    def taking(name: str, rate: float) -> Callable[[int, int, int, int], None]:
        def put(_: int, offset: int, nbytes: int, stream: int) -> None:
            play.streams[stream].put(Operation(name, takes_us=nbytes / rate))

        return put

    def meet(stream: int) -> None:
        play.streams[stream].put(Operation("meeting", meets=True))

    stage, read, own = taking("stage", LOCAL), taking("read", LINK), taking("own", LOCAL)
    staging = staging_of(current.rank, 2, 0, 64 << 20, stage, meet)
    ahead_of_use = StagedAhead(staging, torch.device("cpu"))
    ahead_of_use.run(nbytes, stage, read, lambda *part: own(0, *part))


@pytest.mark.parametrize("mib", [16, 64, 100, 512, 1000])
def test_parts_cross_the_link_without_a_gap(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Besides its bytes a gather takes the first part's staging and a meeting."""
    play, nbytes = Play(2), mib << 20
    current = [Stream(play, rank) for rank in range(2)]
    for stream in current:
        gather_on(stream, nbytes, monkeypatch)
    play.run(seed=0)
    for stream in current:
        (_, _, staged_us), *reads = stream.busy_us
        assert [read[1] for read in reads[1:]] == [read[2] for read in reads[:-1]]
        assert reads[0][1] == staged_us + MEETING_US
        assert stream.time_us < reads[-1][2] + SWITCH_US, "nothing is waited for at the end"


def test_parts_are_even_in_number_and_fit() -> None:
    chance = random.Random(7)
    first, most = 8 << 20, 32 << 20
    assert [size >> 20 for _, size in cut(128 << 20, most, first)] == [8, 8, 16, 16, 20, 20, 20, 20]
    for _ in range(2000):
        most = chance.choice([256, 1024, 5 << 20, 32 << 20])
        first = chance.choice([1, 256, 1000, 8 << 20])
        nbytes = chance.choice([1, 255, 256, 257, most, 2 * most, chance.randrange(1, 40 * most)])
        parts = cut(nbytes, most, first)
        assert len(parts) % 2 == 0
        assert [at for at, _ in parts] == [0, *(at + size for at, size in parts)][:-1]
        assert sum(parts[-1]) == nbytes
        assert all(at % 256 == 0 or at == nbytes for at, _ in parts)
        assert all(0 <= size <= most for _, size in parts)
