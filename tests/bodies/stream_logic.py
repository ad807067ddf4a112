"""How streams of ranks that share a GPU wait for each other, on the host backend.

The operations themselves are those that the driver would get; a thread for each stream carries them
out in their order, as a GPU does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cu

from tpspan.errors import PeerError, TpspanError
from tpspan.kernels.board import has_arrived
from tpspan.launch.world import World
from tpspan.memory.host import HostDriver
from tpspan.spans import stream_ops, stream_queue, stream_watch, stream_words
from tpspan.spans.board import Board
from tpspan.spans.pages import Pages

_NUM_WORDS = 6
_POLL_S = 2e-4
_OWN_STREAMS = 1000


class PlayedStreams:
    """Streams by number; what is put on one is done by its thread, one after the other.

    Attributes:
        capturing: whether they are.
        broken: whether the driver fails when it is asked how far they are.
        room: for so many steps on a stream; who puts operations on a full one is held.
        contexts: of the threads that have one, if only those may record an event.
        ends: the errors for which a job would have been ended.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.broken = False
        self.room = 1 << 20
        self.contexts: set[int] | None = None
        self.ends: list[TpspanError] = []
        self._todo: dict[int, queue.Queue[Callable[[], object] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._done: dict[int, bool] = {}
        self._marks: dict[int, int] = {}
        self._num_events = self._num_marks = 0
        self._num_streams = _OWN_STREAMS

    def put(self, stream: int, step: Callable[[], object]) -> None:
        if stream not in self._todo:
            todo = self._todo[stream] = queue.Queue()
            thread = threading.Thread(target=self._run, args=(todo,), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._todo[stream].put(step)

    def batch(self, stream: int, num: int, address: int, flags: int) -> int:
        words = (ctypes.c_uint64 * (_NUM_WORDS * num)).from_address(address)
        operations = [
            tuple(words[at : at + 4]) for at in range(0, _NUM_WORDS * num, _NUM_WORDS)
        ]  # as the driver does, before the call returns
        for operation in operations:
            while stream in self._todo and self._todo[stream].unfinished_tasks >= self.room:
                time.sleep(_POLL_S)
            self.put(stream, functools.partial(_carry_out, *operation))
        return 0

    def synchronize(self, stream: int) -> None:
        done = threading.Event()
        self.put(stream, done.set)
        assert done.wait(20), "a played stream does not come to rest"

    def close(self) -> None:
        for todo in self._todo.values():
            todo.put(None)
        for thread in self._threads:
            thread.join()

    # What stream_watch asks of the driver.
    def new_event(self, flags: int) -> tuple[int, int]:
        self._num_events += 1
        self._done[self._num_events] = True
        return 0, self._num_events

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The driver's context, in this thread."""
        thread, contexts = threading.get_ident(), self.contexts
        if contexts is None or thread in contexts:
            yield
            return
        contexts.add(thread)
        try:
            yield
        finally:
            contexts.discard(thread)

    def record(self, event: int, stream: int) -> tuple[Any]:
        if self.contexts is not None and threading.get_ident() not in self.contexts:
            return (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._done[event] = False
        self._num_marks += 1
        latest = self._marks[event] = self._num_marks

        def reached() -> None:
            if self._marks[event] == latest:  # an event stands for where it was recorded last
                self._done[event] = True

        self.put(stream, reached)
        return (0,)

    def query(self, event: int) -> tuple[Any]:
        if self.broken:
            return (cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        return _code(self._done[event])

    # What DeviceAccess asks of the driver; its streams have numbers of their own.
    def new_stream(self, flags: int, priority: int) -> tuple[int, int]:
        self._num_streams += 1
        return 0, self._num_streams

    def query_stream(self, stream: int) -> tuple[Any]:
        todo = self._todo.get(stream)
        return _code(todo is None or not todo.unfinished_tasks)

    def read(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        self.put(stream, functools.partial(ctypes.memmove, target, source, nbytes))
        return (0,)

    def write(self, stream: int, place: int, value: int, flags: int) -> tuple[int]:
        self.put(stream, functools.partial(_carry_out, stream_ops._WRITE, place, value, 0))
        return (0,)

    @staticmethod
    def _run(todo: queue.Queue[Callable[[], object] | None]) -> None:
        while (step := todo.get()) is not None:
            step()
            todo.task_done()


def _code(is_done: bool) -> tuple[Any]:
    return (cu.CUresult(0 if is_done else cu.CUresult.CUDA_ERROR_NOT_READY),)


def _carry_out(kind: int, place: int, value: int, how: int) -> None:
    word = ctypes.c_uint32.from_address(place)
    if kind == stream_ops._WRITE:
        word.value = value
        return
    while not (has_arrived(word.value, value) if how == 0 else word.value == value):
        time.sleep(_POLL_S)


@contextlib.contextmanager
def played(
    world: World, timeout_s: float, on_device: bool = False
) -> Iterator[tuple[PlayedStreams, Any]]:
    """The streams, and ``StreamOps`` of a world of the same ranks over them.

    Args:
        on_device: look at the words as if they lay in the memory of a GPU.
    """
    inner = world.subset(range(world.world_size))
    inner.timeout_s = timeout_s
    streams = PlayedStreams()
    pages = Pages(Board.of(inner).exchange, inner.driver)
    marks = Pages(Board.of(inner).exchange, HostDriver())
    ctypes.memset(pages.address_of(inner.rank), 0, pages.page_nbytes)
    driver: Any = SimpleNamespace(
        device=SimpleNamespace(index=0),
        current=streams.current,
        is_capturing=lambda stream: streams.capturing,
    )
    names = ("CUresult", "CUevent_flags", "CUstreamCaptureMode", "CUstream_flags")
    asked = SimpleNamespace(
        **{name: getattr(cu, name) for name in names},
        cuEventCreate=streams.new_event,
        cuEventRecord=streams.record,
        cuEventQuery=streams.query,
        cuEventDestroy=lambda event: (0,),
        cuThreadExchangeStreamCaptureMode=lambda mode: (0, mode),
        cuCtxGetStreamPriorityRange=lambda: (0, 0, -5),
        cuStreamCreateWithPriority=streams.new_stream,
        cuStreamQuery=streams.query_stream,
        cuStreamDestroy=lambda stream: (0,),
        cuMemcpyDtoHAsync=streams.read,
        cuStreamWriteValue32=streams.write,
    )
    library = SimpleNamespace(cuStreamBatchMemOp_v2=_Function(streams.batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watch, "cu", asked)
        patch.setattr(stream_queue, "cu", asked)
        patch.setattr(stream_watch, "_LOOK_S", 0.02)
        patch.setattr(stream_words, "cu", asked)
        access: stream_words.Access = stream_words.HostAccess()
        with pytest.MonkeyPatch.context() as making:
            making.setattr(ctypes, "CDLL", lambda name: library)
            making.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            if on_device:
                access = stream_words.DeviceAccess(driver)
            words = stream_words.StreamWords(pages, marks, access, inner)
            watch = stream_watch.StreamWatch(words, driver, timeout_s, streams.ends.append)
            ops = stream_ops.StreamOps(words, driver, watch)
        world.control.barrier()
        try:
            yield streams, ops
            world.control.barrier()
        finally:
            ops.close()
            streams.close()
            pages.close()
            marks.close()
            inner.close()


class _Function:
    """A function of a library, which takes the types of its arguments as an attribute."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


def barriers(world: World, captured: bool) -> None:
    """No stream leaves a barrier before all have come, on one stream or several, in and out."""
    with played(world, 20.0) as (streams, ops):
        page = Pages(Board.of(world).exchange, world.driver)
        own = ctypes.c_uint64.from_address(page.address_of(world.rank))
        counts = [
            ctypes.c_uint64.from_address(page.address_of(rank)) for rank in range(world.world_size)
        ]
        wrong: list[list[int]] = []

        def come() -> None:
            time.sleep(1e-3 * ((own.value * 7 + world.rank * 3) % 4))
            own.value += 1

        def look(turn: int) -> None:
            seen = [count.value for count in counts]
            if min(seen) < turn:
                wrong.append(seen)

        for turn in range(1, 61):
            streams.capturing = captured and turn % 3 == 0
            streams.put(7, come)
            ops.barrier(2, 7)
            streams.put(7, functools.partial(look, turn))
            streams.capturing = False
        streams.synchronize(7)
        assert not wrong, wrong[:3]
        world.control.barrier()
        page.close()


def posts(world: World) -> None:
    """A wait takes each post of its peer once."""
    with played(world, 20.0) as (streams, ops):
        after, before = ((world.rank + k) % world.world_size for k in (1, -1))
        order: list[int] = []
        for turn in range(20):
            streams.put(3, lambda: time.sleep(1e-3 * (world.rank % 2)))
            ops.post(1, after, 3)
            ops.wait(1, before, 4)
            streams.put(4, functools.partial(order.append, turn))
        streams.synchronize(3)
        streams.synchronize(4)
        assert order == list(range(20))
        assert ops.missing() == ()
        world.control.barrier()


def books(world: World) -> None:
    """What is kept of waits does not grow on a stream that never comes to rest."""
    with played(world, 20.0) as (streams, ops), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_queue, "_MARK_S", 0.0)
        after, before = ((world.rank + k) % world.world_size for k in (1, -1))
        for _ in range(20):
            ops.post(1, after, 3)
            ops.wait(1, before, 4)
        ops.wait(1, before, 4)
        waits = ops._watch.queue(4).waits
        end = time.monotonic() + 10
        while len(waits) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert list(waits) == [(1, before, 21)]
        world.control.barrier()
        ops.post(1, after, 3)
        streams.synchronize(4)


def fresh_thread(world: World) -> None:
    """A thread without a context of the driver launches as others do, and is watched."""
    with played(world, 0.4) as (streams, ops):
        ops.barrier(0, 5)
        streams.synchronize(5)
        world.control.barrier()
        streams.contexts = set()
        failed: list[BaseException] = []

        def launch() -> None:
            try:
                ops.barrier(0, 5)
            except BaseException as error:
                failed.append(error)

        if world.rank:
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            assert not failed, failed
            streams.synchronize(5)
            assert ops.missing() == (0,)
        world.control.barrier()


def late(world: World, victim: int, captured: bool, on_device: bool) -> None:
    """Everybody names the rank that did not come, whoever's deadline passes first.

    Words on the device are seen although a stream that could look at them is held itself.
    """
    with played(world, 0.6, on_device) as (streams, ops):
        release = threading.Event()
        if on_device:
            streams.put(_OWN_STREAMS + 1, release.wait)

        def meet(num: int) -> None:
            streams.capturing = captured
            for _ in range(num):
                ops.barrier(0, 5)
            streams.capturing = False
            if captured:
                ops.barrier(1, 5)  # a replay is not noted: what follows it on the stream is

        meet(2)
        streams.synchronize(5)
        world.control.barrier()
        if world.rank != victim:
            time.sleep(0.15 * world.rank)
            start = time.monotonic()
            meet(2)
            streams.synchronize(5)
            assert time.monotonic() - start < 5
            assert ops.missing() == (victim,), ops.missing()
        release.set()


def silent(world: World) -> None:
    """A wait for a post that never comes ends, and names who owes it; others are not named."""
    with played(world, 0.4, True) as (streams, ops):
        before, after = ((world.rank + k) % world.world_size for k in (-1, 1))
        ops.post(3, after, 9)
        ops.wait(3, before, 9)
        streams.synchronize(9)
        world.control.barrier()
        if world.rank == 1:
            ops.wait(3, before, 9)
            ops.wait(3, after, 9)  # the stream never comes to this one
            streams.synchronize(9)
            assert ops.missing() == (before,)
        world.control.barrier()
        assert ops.missing() == (0,)  # all were told


def full(world: World) -> None:
    """A thread that is held for room on a stream holds no others, and goes on at the deadline."""
    with played(world, 0.6, True) as (streams, ops):
        streams.room = 16
        if world.rank:

            def meet() -> None:
                for _ in range(40):
                    ops.barrier(0, 5)

            start = time.monotonic()
            thread = threading.Thread(target=meet)
            thread.start()
            time.sleep(0.2)
            ops.post(1, 0, 9)
            streams.synchronize(9)
            assert thread.is_alive() and not ops.missing()
            thread.join()
            streams.synchronize(5)
            assert time.monotonic() - start < 8
            assert ops.missing() == (0,)
        world.control.barrier()


def busy(world: World) -> None:
    """Streams that are held by something else are left alone, and so is who comes a little later.

    All are held for longer than the deadline; the first then waits for the others a tenth of it.
    """
    with played(world, 1.5) as (streams, ops):
        streams.put(6, lambda: time.sleep(2.0 + 0.15 * world.rank / (world.world_size - 1)))
        ops.barrier(0, 6)
        streams.synchronize(6)
        assert ops.missing() == ()


def ahead(world: World, victim: int) -> None:
    """A host is held, and told at the deadline, before it has filled a stream with waits."""
    with played(world, 0.6, True) as (streams, ops):
        queue = ops._watch.queue(5)
        most = 0

        def meet(num: int) -> None:
            nonlocal most
            for _ in range(num):
                ops.barrier(0, 5)
                most = max(most, queue.num_ahead)

        meet(stream_watch.ROOM)
        streams.synchronize(5)
        assert not ops.missing()
        world.control.barrier()
        if world.rank != victim:
            start = time.monotonic()
            with pytest.raises(PeerError) as raised:
                meet(2 * stream_watch.ROOM)
            assert raised.value.ranks == (victim,), raised.value
            assert 0.5 < time.monotonic() - start < 8
            assert stream_watch.ROOM <= most < stream_watch.ROOM + world.world_size
            streams.synchronize(5)
        world.control.barrier()
        assert not streams.ends


def held(world: World) -> None:
    """A look that waits in the driver for too long ends the job; one that comes back does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watch, "_PATIENCE_S", 0.5)
        with played(world, 0.4, True) as (streams, ops):
            if world.rank:
                words, room = ops._watch._words, threading.Event()
                look = words.read

                def read(addresses: list[int]) -> list[int]:
                    room.wait()
                    found: list[int] = look(addresses)
                    return found

                words.read = read
                ops.barrier(0, 5)
                end = time.monotonic() + 10
                while not streams.ends and time.monotonic() < end:
                    time.sleep(0.01)
                (error,) = streams.ends
                assert str(error).startswith(f"rank {world.rank}: a launch has waited"), error
                room.set()
                streams.synchronize(5)
                assert ops.missing() == (0,)
            world.control.barrier()
            assert len(streams.ends) == (world.rank > 0)


def slot_of_two_streams(world: World) -> None:
    """A slot that was used from one stream and then from another holds nobody up."""
    with played(world, 20.0) as (streams, ops):
        for stream in (5, 6, 5):
            ops.barrier(0, stream)
            streams.synchronize(stream)
        world.control.barrier()
        start = time.monotonic()
        ops._watch.close()
        assert time.monotonic() - start < 2


def replayed_beside(world: World) -> None:
    """Replays whose ranks come one a little after the other are not late, whatever rests beside."""
    with played(world, 0.4) as (streams, ops):
        for _ in range(2):
            ops.barrier(0, 5)
        streams.synchronize(5)
        world.control.barrier()
        streams.capturing = True
        for _ in range(150):
            if world.rank == 0:
                streams.put(7, lambda: time.sleep(0.01))
            ops.barrier(1, 7)
            streams.synchronize(7)
        streams.capturing = False
        assert ops.missing() == ()
        world.control.barrier()


def behind_a_graph(world: World) -> None:
    """A stream held in a graph goes on although what is behind the graph has come already."""
    with played(world, 0.5) as (streams, ops):
        if world.rank == 0:
            for peer in range(1, world.world_size):
                ops.post(2, peer, 9)
            streams.synchronize(9)
        world.control.barrier()
        if world.rank:
            streams.capturing = True
            for _ in range(3):
                ops.barrier(1, 5)
            streams.capturing = False
            ops.wait(2, 0, 5)
            streams.synchronize(5)
            assert ops.missing() == (0,)
        world.control.barrier()


def posted_after_all(world: World) -> None:
    """Closing ends although words that were moved go back when their ranks come yet."""
    with played(world, 0.5) as (streams, ops):
        if world.rank == 1:
            for _ in range(3):
                ops.wait(2, 0, 5)
                streams.put(5, lambda: time.sleep(0.3))
            while not ops.missing():
                time.sleep(0.01)
        world.control.barrier()
        if world.rank == 0:
            place = ctypes.c_uint32.from_address(ops._words.posted(2, 1, 0))
            for _ in range(20):
                place.value = 1
                time.sleep(0.01)
        elif world.rank == 1:
            start = time.monotonic()
            ops._watch.close()
            assert time.monotonic() - start < 5
            assert not streams._todo[5].unfinished_tasks
        world.control.barrier()


def many_stuck(world: World) -> None:
    """Many streams that wait for a late rank go on together, and no job is ended for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watch, "_PATIENCE_S", 0.5)
        with played(world, 0.5) as (streams, ops):
            if world.rank:
                start = time.monotonic()
                for slot in range(12):
                    ops.barrier(slot, 5 + slot)
                for slot in range(12):
                    streams.synchronize(5 + slot)
                assert time.monotonic() - start < 2
                assert ops.missing() == (0,)
            world.control.barrier()
            assert not streams.ends


def late_by(world: World) -> None:
    """What is put behind a wait does not put its deadline off."""
    with played(world, 2.0) as (streams, ops):
        ops.barrier(0, 5)
        streams.synchronize(5)
        world.control.barrier()
        if world.rank:
            start = time.monotonic()
            ops.barrier(0, 5)
            time.sleep(1.8)
            ops.barrier(0, 5)
            while not ops.missing():
                time.sleep(0.01)
            assert 1.9 < time.monotonic() - start < 2.6  # half a second may lie between marks
            streams.synchronize(5)
        world.control.barrier()


def who_is_late(world: World) -> None:
    """A rank that posts behind a barrier is not late if another one does not come to that."""
    victim = world.world_size - 1
    with played(world, 0.6) as (streams, ops):
        ops.barrier(0, 5)
        streams.synchronize(5)
        world.control.barrier()
        if world.rank != victim:
            time.sleep(0.1 * world.rank)
            ops.barrier(0, 5)
            if world.rank == 0:
                ops.wait(1, 1, 5)
            elif world.rank == 1:
                ops.post(1, 0, 5)
            streams.synchronize(5)
            assert ops.missing() == (victim,)
        world.control.barrier()


def broken(world: World) -> None:
    """A driver that fails is no launch that waits: no job is ended for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watch, "_PATIENCE_S", 0.1)
        with played(world, 0.3) as (streams, ops):
            streams.broken = True
            ops.barrier(0, 5)
            with ops._watch.lock:
                (watched,) = ops._watch._queues.values()
            with watched.order:
                mark = watched.mark(0, always=True)
                with ops._watch.lock:
                    watched.noted(0, mark)
            time.sleep(1.5)
            streams.broken = False
            assert not streams.ends
