"""Device kernels that meet, played on the host: their own sources, with numba and PTX replaced.

Every thread of every rank's kernels is a thread here, and one at a time runs until it touches
memory that ranks share; who is next is drawn by lot. What a kernel stores there for others arrives
later, in any order but that of one address; a fence, and nothing else, makes a block's earlier
stores arrive. So an interleaving that a GPU shows once a year is tried here in seconds.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF
_MOST_STEPS = 400_000


class Fault(Exception):
    """What a kernel must never do."""


def _signed(value: Any, bits: int) -> int:
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


TYPES = SimpleNamespace(
    int32=lambda value: _signed(value, 32),
    int64=lambda value: _signed(value, 64),
    uint32=lambda value: np.uint32(int(value) & _WORD),
    uint64=lambda value: np.uint64(int(value) & _LONG),
    float32=np.float32,
)


def _float(bits: int) -> Any:
    return np.uint32(int(bits) & _WORD).view(np.float32)


def _bits(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def _bf16(value: Any) -> int:
    bits = _bits(value)
    return 0x7FFF if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _f16(value: Any) -> int:
    return int(np.float16(value).view(np.uint16))


@contextlib.contextmanager
def _one_processor() -> Iterator[None]:
    """Threads that take turns wake each other in half the time there."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel of one rank, and what is looked at when it has ended."""

    name: str
    num_blocks: int
    num_threads: int
    arguments: tuple[int, ...]
    done: Callable[[], None] = lambda: None


@dataclass
class Range:
    """Memory: of one rank alone, or one that others store into and load from."""

    begin: int
    end: int
    rank: int
    is_shared: bool


class Turn:
    """A lock that is held until somebody gives it: quicker than a semaphore."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.take = self._lock.acquire

    def give(self) -> None:
        """Let the thread go on; threads that all end may be told so twice."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


@dataclass(eq=False)
class Thread:
    """One thread of a kernel."""

    rank: int
    block: int
    index: int
    launch: Launch
    turn: Turn = field(default_factory=Turn)
    num_barriers: int = 0
    is_slow: bool = False
    is_waiting: bool = False


@dataclass(eq=False)
class Store:
    """Bytes that are on their way."""

    address: int
    data: bytes
    rank: int
    block: int
    outlives_kernel: bool


class Later:
    """A word that was asked for, and is what the memory holds when it is first used.

    A load returns at once, but what it loads may come at any time until then.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._word: Any = None

    def _come(self) -> Any:
        if self._word is None:
            self._word = self._load()
        return self._word

    def __int__(self) -> int:
        return int(self._come())

    def __rshift__(self, bits: Any) -> Any:
        return self._come() >> bits

    def __and__(self, mask: Any) -> Any:
        return self._come() & mask


class Play:
    """Ranks, their memory and their queues of kernels.

    Args:
        edit: replaces text of the kernels' sources: a test of the test.
        is_slow: threads whose turn comes once in ``seldom`` times, as long as others have something
            to do.
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        edit: Sequence[tuple[str, str]] = (),
        nbytes: int = 1 << 20,
        is_slow: Callable[[Thread], bool] = lambda thread: False,
        seldom: int = 20,
    ) -> None:
        self._is_slow, self._seldom = is_slow, seldom
        self.chance = random.Random(seed)
        self.memory = np.zeros(nbytes, np.uint8)
        self.base = 1 << 32
        self.ranges: list[Range] = []
        self.queues: list[list[Launch]] = [[] for _ in range(world_size)]
        self.unread: set[int] = set()
        self._edit = edit
        self._modules: dict[str, dict[str, Any]] = {}
        self._here = threading.local()
        self._free = 0
        self._running: list[Thread] = []
        self._left: dict[int, int] = {}
        self._passed: dict[tuple[int, int], set[int]] = {}
        self._waiting: dict[tuple[int, int], list[Thread]] = {}
        self._votes: dict[tuple[Launch, int, int, int], int] = {}
        self._pending: list[Store] = []
        self._steps = 0
        self._clock = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def allocate(self, rank: int, nbytes: int, *, is_shared: bool = False, shift: int = 0) -> int:
        """Memory of a rank, with room around it."""
        begin = (self._free + 63) // 64 * 64
        self._free = begin + (nbytes + shift + 15) // 16 * 16 + 64
        assert self._free <= len(self.memory), "no memory left to play with"
        address = self.base + begin
        self.ranges.append(Range(address, self.base + self._free - 64, rank, is_shared))
        return address + shift

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes of the memory."""
        return self.memory[address - self.base :][:nbytes]

    def run(self) -> None:
        """Run all queues to their ends."""
        self._threads: list[threading.Thread] = []
        with _one_processor():
            self._start_next(range(len(self.queues)))
            if not self._running:
                return
            self.chance.choice(self._running).turn.give()
            assert self._finished.wait(120), "the play does not end"
            for thread in self._threads:
                thread.join(10)
        if self._error is not None:
            raise self._error
        while self._pending:
            self._deliver()

    # what a thread of a kernel does

    def _start_next(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if not self.queues[rank]:
                continue
            launch = self.queues[rank].pop(0)
            body = self.module(_MODULE_OF[launch.name])[launch.name]
            self._left[rank] = launch.num_blocks * launch.num_threads
            for block in range(launch.num_blocks):
                self._passed[rank, block] = set()
                self._waiting[rank, block] = []
                for index in range(launch.num_threads):
                    thread = Thread(rank, block, index, launch)
                    thread.is_slow = self._is_slow(thread)
                    self._running.append(thread)
                    runner = threading.Thread(target=self._main, args=(thread, body), daemon=True)
                    self._threads.append(runner)
                    runner.start()

    def _main(self, thread: Thread, body: Any) -> None:
        thread.turn.take()
        self._here.thread = thread
        if self._error is None:
            try:
                with np.errstate(all="ignore"):
                    body(*thread.launch.arguments)
                self._end(thread)
            except BaseException as error:
                self._error = self._error or error
        self._running.remove(thread)
        if self._error is not None:
            for other in self._running:
                other.turn.give()
            self._finished.set()
        elif not self._hand_over():
            self._finished.set()

    def _end(self, thread: Thread) -> None:
        rank = thread.rank
        self._passed[rank, thread.block].add(thread.num_barriers)
        self._left[rank] -= 1
        if self._left[rank]:
            return
        for block in range(thread.launch.num_blocks):
            if len(self._passed[rank, block]) != 1:
                raise Fault("not every thread came to every barrier of its block")
        for store in [one for one in self._pending if one.rank == rank]:
            if not store.outlives_kernel and store in self._pending:
                self._arrive(store)
        self._steps = 0
        thread.launch.done()
        self._start_next([rank])

    def _hand_over(self) -> bool:
        ready = [one for one in self._running if not one.is_waiting]
        if not ready:
            if self._running:
                self._error = self._error or Fault("threads wait at a barrier for ever")
                for other in self._running:
                    other.turn.give()
            return False
        quick = [one for one in ready if not one.is_slow]
        if len(quick) < len(ready) and self.chance.randrange(self._seldom):
            ready = quick or ready
        self.chance.choice(ready).turn.give()
        return True

    def _step(self) -> None:
        """Somebody else's turn, perhaps; and a store may arrive."""
        thread: Thread = self._here.thread
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise Fault("the kernels make no progress")
        while self._pending and self.chance.random() < 0.4:
            self._deliver()
        self._hand_over()
        thread.turn.take()
        if self._error is not None:
            raise Fault("another thread failed")

    def _barrier(self) -> None:
        thread: Thread = self._here.thread
        thread.num_barriers += 1
        waiting = self._waiting[thread.rank, thread.block]
        waiting.append(thread)
        thread.is_waiting = True
        if len(waiting) == thread.launch.num_threads:
            for one in waiting:
                one.is_waiting = False
            waiting.clear()
        self._step()

    def _barrier_or(self, predicate: Any) -> int:
        """A barrier whose threads all learn whether the predicate holds for one of them."""
        thread: Thread = self._here.thread
        ballot = (thread.launch, thread.rank, thread.block, thread.num_barriers)
        self._votes[ballot] = self._votes.get(ballot, 0) | int(bool(predicate))
        self._barrier()
        return self._votes[ballot]

    # memory

    def _range(self, address: int, nbytes: int) -> Range:
        for one in self.ranges:
            if one.begin <= address and address + nbytes <= one.end:
                return one
        raise Fault(f"{nbytes} bytes at {address:#x} are nobody's")

    def _deliver(self) -> None:
        self._arrive(self.chance.choice(self._pending))

    def _arrive(self, store: Store) -> None:
        """Behind all earlier stores to any of its bytes."""
        index = next(i for i, one in enumerate(self._pending) if one is store)
        end = store.address + len(store.data)
        for one in self._pending[:index]:
            if one.address < end and store.address < one.address + len(one.data):
                self._arrive(one)
                self._arrive(store)
                return
        self._pending = [one for one in self._pending if one is not store]
        if store.outlives_kernel and len(store.data) == 8:
            if store.address in self.unread:
                raise Fault("a word is overwritten that was not read")
            self.unread.add(store.address)
        self.view(store.address, len(store.data))[:] = np.frombuffer(store.data, np.uint8)

    def _load(self, address: int, nbytes: int) -> int:
        assert address % nbytes == 0, "a load must be aligned"
        there = self._range(address, nbytes)
        thread: Thread = self._here.thread
        if not there.is_shared and there.rank != thread.rank:
            raise Fault("a load from another rank's own memory")
        data = bytearray(self.view(address, nbytes).tobytes())
        for store in self._pending:  # a rank sees what it has stored itself
            if store.rank == thread.rank:
                for k, byte in enumerate(store.data):
                    if 0 <= store.address + k - address < nbytes:
                        data[store.address + k - address] = byte
        return int.from_bytes(data, "little")

    def _store(self, address: int, value: Any, nbytes: int, *, outlives: bool = False) -> None:
        assert address % nbytes == 0, "a store must be aligned"
        data = (int(value) & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little")
        there = self._range(address, nbytes)
        thread: Thread = self._here.thread
        if there.is_shared:
            self._pending.append(Store(address, data, thread.rank, thread.block, outlives))
        elif there.rank != thread.rank:
            raise Fault("a store to another rank's own memory")
        else:
            self.view(address, nbytes)[:] = np.frombuffer(data, np.uint8)

    def _fence(self) -> None:
        thread: Thread = self._here.thread
        self._step()
        for store in [one for one in self._pending if one.rank == thread.rank]:
            if store.block == thread.block and any(one is store for one in self._pending):
                self._arrive(store)

    def _strong_load(self, address: int) -> Any:
        self._step()
        return TYPES.uint32(self._load(address, 4))

    def _strong_store(self, address: int, value: Any) -> None:
        self._step()
        self._store(address, value, 4, outlives=True)

    def _load_pair(self, address: int) -> tuple[Any, Any]:
        assert address % 16 == 0
        words = {}
        for place in self.chance.sample([address, address + 8], 2):
            self._step()
            words[place] = TYPES.uint64(self._load(place, 8))
            self.unread.discard(place)
        return words[address], words[address + 8]

    def _store_pair(self, address: int, low: Any, high: Any) -> None:
        assert address % 16 == 0
        self._step()
        for place, value in ((address, low), (address + 8, high)):
            self._store(place, value, 8, outlives=True)

    def _load_vector(self, address: int) -> tuple[Any, Any]:
        assert address % 16 == 0
        if self._range(address, 16).is_shared:
            self._step()
        return tuple(TYPES.uint64(self._load(address + 8 * k, 8)) for k in range(2))

    def _load_vector_if(self, address: int, is_wanted: Any) -> tuple[Any, Any]:
        if not is_wanted:
            return TYPES.uint64(0), TYPES.uint64(0)
        if not self._range(address, 16).is_shared or self.chance.random() < 0.5:
            return self._load_vector(address)
        assert address % 16 == 0

        def word(place: int) -> Any:
            return Later(lambda: TYPES.uint64(self._load(place, 8)))

        self._step()
        return word(address), word(address + 8)

    def _store_vector(self, address: int, low: Any, high: Any) -> None:
        assert address % 16 == 0
        self._store(address, low, 8)
        self._store(address + 8, high, 8)

    def _nanoseconds(self) -> int:
        self._clock += 100
        return self._clock

    # the sources

    def module(self, name: str) -> dict[str, Any]:
        """The names of a kernels' source, run with the play in place of numba and PTX."""
        if name not in self._modules:
            source = (KERNELS / f"{name}.py").read_text()
            for old, new in self._edit:
                source = source.replace(old, new)
            offered = {**vars(builtins), "__import__": self._import}
            space: dict[str, Any] = {"__builtins__": offered, "__name__": name}
            self._modules[name] = space
            exec(compile(source, str(KERNELS / f"{name}.py"), "exec"), space)
        return self._modules[name]

    def _import(self, name: str, *rest: Any) -> Any:
        wanted = rest[2] or () if len(rest) > 2 else ()
        if name.startswith(("numba", "llvmlite")):
            return self._numba()
        if name == "tpspan.kernels" and "ptx" in wanted:
            return SimpleNamespace(ptx=self._ptx())
        module = name.rpartition(".")[2]
        if name.startswith("tpspan.kernels.device_"):
            return SimpleNamespace(**self.module(module))
        return builtins.__import__(name, *rest)

    def _numba(self) -> Any:
        here = self._here

        def place(attribute: str) -> Any:
            class Place:
                @property
                def x(self) -> int:
                    return getattr(here.thread, attribute)

            return Place()

        def shape(attribute: str) -> Any:
            class Shape:
                @property
                def x(self) -> int:
                    return getattr(here.thread.launch, attribute)

            return Shape()

        own = {
            "_load_u32": lambda address: TYPES.uint32(self._load(address, 4)),
            "_load_u16": lambda address: TYPES.uint32(self._load(address, 2)),
            "_store_u32": lambda address, value: self._store(address, value, 4),
            "_store_u16": lambda address, value: self._store(address, value, 2),
            "_from_f16": lambda bits: np.float32(np.uint16(bits).view(np.float16)),
            "_to_f16": lambda value: TYPES.uint32(_f16(value)),
        }
        cuda = SimpleNamespace(
            jit=lambda **options: lambda function: function,
            threadIdx=place("index"),
            blockIdx=place("block"),
            blockDim=shape("num_threads"),
            gridDim=shape("num_blocks"),
            syncthreads=self._barrier,
            syncthreads_or=self._barrier_or,
            local=SimpleNamespace(array=lambda number, kind: [kind(0)] * number),
        )
        return SimpleNamespace(
            cuda=cuda,
            types=TYPES,
            intrinsic=lambda function: own[function.__name__],
            libdevice=SimpleNamespace(int_as_float=_float, float_as_int=_bits),
            ir=SimpleNamespace(IntType=lambda bits: None, FloatType=lambda: None),
        )

    def _ptx(self) -> Any:
        def pack(convert: Any) -> Any:
            return lambda low, high: TYPES.uint32(convert(low) | convert(high) << 16)

        return SimpleNamespace(
            load_count=self._strong_load,
            store_count=lambda address, value: self._store(address, value, 4),
            load_acquire=self._strong_load,
            store_relaxed=self._strong_store,
            store_release=self._strong_store,
            load_pair=self._load_pair,
            store_pair=self._store_pair,
            load_word=lambda address: TYPES.uint64(self._load(address, 8)),
            store_word=lambda address, value: self._store(address, value, 8),
            load_byte=lambda address: TYPES.uint32(self._load(address, 1)),
            store_byte=lambda address, value: self._store(address, value, 1),
            load_vector=self._load_vector,
            load_vector_if=self._load_vector_if,
            store_vector=self._store_vector,
            pack_bf16=pack(_bf16),
            pack_f16=pack(_f16),
            fence_system=self._fence,
            nanoseconds=self._nanoseconds,
        )


_MODULE_OF = {
    "ll_gather": "device_ll",
    "ll_sum_f32": "device_ll",
    "ll_sum_bf16": "device_ll",
    "ll_sum_f16": "device_ll",
    "fused_gather": "device_fused",
    "fused_sum_f32": "device_fused",
    "fused_sum_bf16": "device_fused",
    "fused_sum_f16": "device_fused",
    "fused_scatter_f32": "device_fused",
    "fused_scatter_bf16": "device_fused",
    "fused_scatter_f16": "device_fused",
}
