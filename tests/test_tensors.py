"""Tensors over a range of addresses: any dtype, explicit device, counted while a view lives."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from harness import rank_environment
from tpspan.memory import PAGE_NBYTES, Block, Reservation, Right
from tpspan.memory.host import HostDriver
from tpspan.spans import tensors
from tpspan.spans.tensors import Part, TensorRange

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Keeper:
    """Something that a tensor keeps alive."""


@pytest.fixture
def memory() -> Iterator[TensorRange]:
    driver = HostDriver()
    with Block.create(driver, PAGE_NBYTES) as block, Reservation(driver, PAGE_NBYTES) as reserved:
        reserved.map(0, block).protect(Right.READ_WRITE)
        yield TensorRange(reserved.address, PAGE_NBYTES, driver.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_is_the_same_memory(memory: TensorRange, dtype: torch.dtype) -> None:
    raw = memory.tensor((256,), torch.uint8, keep=None)
    raw.copy_(torch.arange(256) % 2)
    made = memory.tensor((2, 4), dtype, 16, keep=None)
    assert (made.dtype, made.device, tuple(made.shape)) == (dtype, torch.device("cpu"), (2, 4))
    assert made.is_contiguous()
    assert made.data_ptr() == memory.address + 16
    ordinary = raw[16 : 16 + 8 * dtype.itemsize].clone().view(dtype).view(2, 4)
    assert made.view(torch.uint8).equal(ordinary.view(torch.uint8))
    made.zero_()
    assert raw.sum() == 128 - 4 * dtype.itemsize


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_exception_while_tensors_are_made_leaves_none(
    memory: TensorRange, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Whether torch had taken over the one that was being made, or not."""
    num_made = 0

    def broken(capsule: object) -> torch.Tensor:
        nonlocal num_made
        num_made += 1
        if num_made > 1 and not is_taken:
            raise KeyboardInterrupt
        made = from_dlpack(capsule)
        if num_made > 1:
            del made
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(tensors, "_from_dlpack", broken)
    parts: list[Part] = [((2,), torch.int32, 8 * number, (1,)) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        memory.tensors(parts, keep=None)
    assert memory.num_live == 0


def test_strides_and_memory_formats(memory: TensorRange) -> None:
    memory.tensor((24,), torch.int32, keep=None).copy_(torch.arange(24))
    transposed = memory.tensor((4, 6), torch.int32, 0, (1, 4), keep=None)
    assert transposed.equal(torch.arange(24, dtype=torch.int32).view(6, 4).T)
    last = memory.tensor((1, 2, 3, 4), torch.int32, 0, (24, 1, 8, 2), keep=None)
    assert last.is_contiguous(memory_format=torch.channels_last)
    repeated = memory.tensor((5, 3), torch.int32, 4, (0, 1), keep=None)
    assert repeated.tolist() == [[1, 2, 3]] * 5
    scalar = memory.tensor((), torch.int32, 8, keep=None)
    assert scalar.item() == 2
    assert scalar.dim() == 0
    assert memory.tensor((), torch.int32, 8, (), keep=None).item() == 2
    del transposed, last, repeated, scalar
    assert memory.num_live == 0


@pytest.mark.parametrize(
    ("shape", "offset", "stride", "said"),
    [
        ((PAGE_NBYTES // 4 + 1,), 0, None, "do not lie inside"),
        ((1,), PAGE_NBYTES, None, "do not lie inside"),
        ((1,), -4, None, "do not lie inside"),
        ((2,), 2, None, "not a multiple of the 4 bytes"),
        ((2, -1), 0, None, "negative size"),
        ((2, 3), 0, (3,), "does not fit shape"),
        ((2,), 0, (-1,), "does not fit shape"),
        ((2,), 0, (PAGE_NBYTES,), "do not lie inside"),
        ((2, 2), PAGE_NBYTES - 8, (1, 1), "do not lie inside"),
        ((1,), 0, (1 << 70,), "does not fit shape"),
        ((0, 10**30), 0, None, "too large"),
    ],
)
def test_what_makes_no_tensor(
    memory: TensorRange,
    shape: tuple[int, ...],
    offset: int,
    stride: tuple[int, ...] | None,
    said: str,
) -> None:
    with pytest.raises(ValueError, match=said):
        memory.tensor(shape, torch.int32, offset, stride, keep=None)
    assert memory.num_live == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "stride"),
    [
        ((2.7,), torch.int32, 0, None),
        ((2,), torch.int32, 4.0, None),
        ((2,), torch.int32, 0, (1.0,)),
        ((2,), None, 0, None),
        ((2,), "int32", 0, None),
    ],
)
def test_what_is_no_description_of_a_tensor(
    memory: TensorRange, shape: Any, dtype: Any, offset: Any, stride: Any
) -> None:
    with pytest.raises(TypeError, match="integer|torch.dtype"):
        memory.tensor(shape, dtype, offset, stride, keep=None)
    assert memory.num_live == 0


def test_many_tensors_are_those_made_one_by_one(memory: TensorRange) -> None:
    memory.tensor((2048,), torch.uint8, keep=None).copy_(torch.arange(2048) % 2)
    parts: list[Part] = [((2, 3), dtype, 16 * i, (1, 2)) for i, dtype in enumerate(DTYPES)]
    parts += [
        ((), torch.int32, 8, ()),
        ((0, 3), torch.int32, 0, (3, 1)),
        ((5,), torch.int8, 3, (0,)),
    ]
    keeper = Keeper()
    known = weakref.ref(keeper)
    made = memory.tensors(parts, keep=keeper)
    del keeper
    assert memory.num_live == len(parts) - 1, "one stands on nothing"
    for each, (shape, dtype, offset, stride) in zip(made, parts, strict=True):
        single = memory.tensor(shape, dtype, offset, stride, keep=None)
        assert (each.dtype, each.device, each.shape) == (dtype, single.device, single.shape)
        if each.numel():
            assert (each.data_ptr(), each.stride()) == (single.data_ptr(), single.stride())
            assert each.untyped_storage().nbytes() == single.untyped_storage().nbytes()
    del each, single
    last = made[0][1:]
    made.clear()
    assert known() is not None
    assert memory.num_live == 1
    del last
    assert known() is None
    assert memory.num_live == 0
    assert memory.tensors([], keep=None) == []


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (((2,), torch.int32, 2, (1,)), "not a multiple of the 4 bytes"),
        (((2, 2), torch.int32, PAGE_NBYTES - 8, (1, 1)), "do not lie inside"),
        (((1,), torch.int32, -4, (1,)), "do not lie inside"),
        (((2, -1), torch.int32, 0, (1, 1)), "negative size"),
        (((2,), torch.int32, 0, (-1,)), "does not fit shape"),
    ],
)
def test_many_tensors_are_made_all_or_none(memory: TensorRange, part: Part, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memory.tensors([((2,), torch.int8, 0, (1,)), part], keep=None)
    assert memory.num_live == 0


def test_a_tensor_that_cannot_be_made_is_not_counted(
    memory: TensorRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def fail(capsule: object) -> torch.Tensor:
        if next(calls) == 2:
            raise MemoryError
        return from_dlpack(capsule)

    from_dlpack = torch.utils.dlpack.from_dlpack
    monkeypatch.setattr(tensors, "_from_dlpack", fail)
    with pytest.raises(MemoryError):
        memory.tensors([((2,), torch.int8, 0, (1,))] * 4, keep=None)
    assert memory.num_live == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_empty_tensors_stand_on_nothing(memory: TensorRange, shape: tuple[int, ...]) -> None:
    made = memory.tensor(shape, torch.float32, PAGE_NBYTES, keep=None)
    assert tuple(made.shape) == shape
    assert memory.num_live == 0


def test_a_tensor_lives_until_its_last_view(memory: TensorRange) -> None:
    keeper = Keeper()
    known = weakref.ref(keeper)
    made = memory.tensor((4, 4), torch.float32, keep=keeper)
    del keeper
    other = memory.tensor((4,), torch.int64, keep=None)
    assert memory.num_live == 2
    view = made[1:].T.reshape(-1)[:0]  # holds the storage unless it was copied
    view = made[1:].view(torch.int32)[0, 1:3]
    del made
    gc.collect()
    assert known() is not None
    assert memory.num_live == 2
    del view
    gc.collect()
    assert known() is None
    assert memory.num_live == 1
    del other
    assert memory.num_live == 0


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda make: make()[99], IndexError),
        (lambda make: make() @ torch.ones(3), RuntimeError),
        (lambda make: (make(), 1 / 0), ZeroDivisionError),
        (lambda make: [make(), int("x")], ValueError),
        (lambda make: torch.ones(5).copy_(make()), RuntimeError),
    ],
)
def test_an_error_beside_a_temporary_comes_through(
    memory: TensorRange, use: Callable[[Callable[[], torch.Tensor]], object], error: type[Exception]
) -> None:
    """The tensor dies while the exception is on its way."""
    kept: list[weakref.ref[Keeper]] = []

    def make() -> torch.Tensor:
        keeper = Keeper()
        kept.append(weakref.ref(keeper))
        return memory.tensor((4, 8), torch.float32, keep=keeper)

    with pytest.raises(error):
        use(make)
    gc.collect()
    assert memory.num_live == 0
    assert [known() for known in kept] == [None]


def test_what_a_tensor_needs_is_used_again(memory: TensorRange) -> None:
    before = memory.tensor((4,), torch.int8, keep=None)
    num_known = len(structs(memory))
    for _ in range(10):
        made = memory.tensors([((4,), torch.int8, 4 * n, (1,)) for n in range(50)], keep=None)
        del made
    assert len(structs(memory)) <= num_known + tensors._NUM_STRUCTS
    assert memory.num_live == 1
    del before


def structs(*ranges: TensorRange) -> list[int]:
    """Where the structs lie, of the tensors of some ranges, and those to be used."""
    tensors._take_back()
    free = [at for at, _ in tensors._free]
    return [*free, *(at for each in ranges for at in each._refs)]


def test_tensors_die_in_the_middle_of_making_others(memory: TensorRange) -> None:
    """In cycles, which the collector finds where it likes: here at whatever a profiler is told."""
    before = structs(memory)
    seen: list[object] = []

    def profile(frame: object, event: str, argument: object) -> None:
        seen.append([event])
        if len(seen) > 5000:
            seen.clear()

    sys.setprofile(profile)
    try:
        for _ in range(1500):
            cycle: list[object] = [memory.tensor((4,), torch.float32, keep=None)]
            cycle.append(cycle)
            pair = [memory.tensor((2,), torch.float32, keep=None) for _ in range(2)]
    finally:
        sys.setprofile(None)
    del cycle, pair
    gc.collect()
    assert memory.num_live == 0
    after = structs(memory)
    assert len(set(after)) == len(after), "one struct is had twice"
    assert set(before) <= set(after), "one is lost"


def test_threads_make_tensors_and_drop_those_of_others(memory: TensorRange) -> None:
    known = structs(memory)
    moved: queue.SimpleQueue[object] = queue.SimpleQueue()
    errors: list[BaseException] = []
    end = time.monotonic() + 3

    def work(seed: int) -> None:
        dice, kept = random.Random(seed), []
        try:
            while time.monotonic() < end:
                starts = [16 * dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
                parts: list[Part] = [((4,), torch.float32, start, (1,)) for start in starts]
                for start, made in zip(starts, memory.tensors(parts, keep=None), strict=True):
                    assert made.data_ptr() == memory.address + start
                    way = dice.random()
                    if way < 0.3:
                        moved.put(made.view(2, 2))
                    elif way < 0.5:
                        kept.append(made.numpy())
                    elif way < 0.7:
                        cycle: list[object] = [made]
                        cycle.append(cycle)
                if len(kept) > 300:
                    del kept[150:]
                while moved.qsize() > 500:
                    moved.get()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            gc.collect()
            time.sleep(0.01)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    while not moved.empty():
        moved.get()
    gc.collect()
    assert memory.num_live == 0
    after = structs(memory)
    assert len(set(after)) == len(after), "one struct is had twice"
    assert set(known) <= set(after), "one is lost"
    assert (len(after) - len(known)) % tensors._NUM_STRUCTS == 0, "one is lost"


@pytest.mark.parametrize("num_at_once", [1, 20])
def test_a_signal_leaves_the_count_right(
    memory: TensorRange, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what a signal interrupts elsewhere, in a callback of Python, is no matter of this test
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Interrupt(KeyboardInterrupt):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    parts: list[Part] = [((4,), torch.float32, 16 * n, (1,)) for n in range(num_at_once)]
    dice, num_interrupts, end = random.Random(1), 0, time.monotonic() + 2
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 4e-4))
                for _ in range(40):
                    memory.tensors(parts, keep=None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                num_interrupts += 1
            assert memory.num_live == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts > 100
    after = structs(memory)
    assert len(set(after)) == len(after), "one struct is had twice"


def test_a_tensor_dies_at_the_recursion_limit(memory: TensorRange) -> None:
    keeper = Keeper()
    known = weakref.ref(keeper)

    def deep(held: list[object]) -> None:
        with contextlib.suppress(RecursionError):
            deep(held)
        held.clear()

    deep([memory.tensor((4,), torch.float32, keep=keeper)])
    del keeper
    assert memory.num_live == 0
    assert known() is None


def test_a_fork_finds_nothing_locked(memory: TensorRange) -> None:
    made, stop = memory.tensor((4,), torch.float32, keep=None), threading.Event()

    def work() -> None:
        while not stop.is_set():
            memory.tensor((4,), torch.float32, keep=None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(30):
            child = os.fork()
            if not child:
                mine = memory.tensor((4,), torch.float32, keep=None)
                del mine
                os._exit(not 1 <= memory.num_live <= 3)  # ``made``, and one of each thread
            end = time.monotonic() + 20
            while (ended := os.waitpid(child, os.WNOHANG)) != (child, 0):
                assert ended == (0, 0), "a child counts wrongly, or has died"
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    raise AssertionError("a child hangs")
                time.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    del made
    assert memory.num_live == 0


def test_a_clone_is_ordinary_memory(memory: TensorRange) -> None:
    clone = memory.tensor((4,), torch.float32, keep=None).clone()
    gc.collect()
    assert memory.num_live == 0
    assert not memory.address <= clone.data_ptr() < memory.address + memory.nbytes


def test_autograd_keeps_what_it_saved(memory: TensorRange) -> None:
    weight = memory.tensor((4,), torch.float32, keep=None).requires_grad_()
    loss = (weight.detach().fill_(2.0) * weight).sum()
    del weight
    assert memory.num_live > 0
    loss.backward()
    del loss
    gc.collect()
    assert memory.num_live == 0


def test_tensors_may_outlive_the_interpreter() -> None:
    script = """
import torch
from tpspan.memory import PAGE_NBYTES, Block, Reservation, Right
from tpspan.memory.host import HostDriver
from tpspan.spans.tensors import TensorRange
driver = HostDriver()
block, reserved = Block.create(driver, PAGE_NBYTES), Reservation(driver, PAGE_NBYTES)
reserved.map(0, block).protect(Right.READ_WRITE)
torch.kept = TensorRange(reserved.address, PAGE_NBYTES, driver.device).tensor(
    (4,), torch.float32, keep=None
)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=rank_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
