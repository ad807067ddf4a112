"""Channels of ranks that share a GPU, on the host backend: their streams' waits are played.

``PlayedStreams`` carries out what ``StreamOps`` would give to the driver. Everything else is what
runs with a GPU: the signals of the link, the turns, and in ``remap`` mode the lanes.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cu

from bodies.stream_logic import PlayedStreams, _Function
from tpspan import Handoff
from tpspan.launch.world import World
from tpspan.memory.host import HostDriver
from tpspan.parallel import handoff_mapped, handoff_parts
from tpspan.parallel.headers import NUM_HEADERS
from tpspan.parallel.link import Link
from tpspan.parallel.side import Side
from tpspan.spans import Signals, signals, stream_ops, stream_queue, stream_watch
from tpspan.spans.fence import StreamsInUse
from tpspan.spans.pages import Pages
from tpspan.spans.signals import num_slots
from tpspan.spans.stream_words import HostAccess, StreamWords

_STREAM = 5
_NUMEL = 1000


class PlayedFence:
    """Everything that was put on the stream so far."""

    def __init__(self, streams: PlayedStreams) -> None:
        self._streams = streams
        _, self._event = streams.new_event(0)
        streams.record(self._event, _STREAM)

    def is_done(self) -> bool:
        return bool(self._streams._done[self._event])

    def give_back(self) -> None:
        assert self.is_done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._streams.synchronize(_STREAM)


@contextmanager
def played(world: World, timeout_s: float) -> Iterator[tuple[World, PlayedStreams]]:
    """A world of the same ranks, whose channels wait by stream operations."""
    streams = PlayedStreams()
    driver: Any = SimpleNamespace(
        device=SimpleNamespace(index=0), current=nullcontext, is_capturing=lambda stream: False
    )
    names = ("CUresult", "CUevent_flags", "CUstreamCaptureMode")
    asked = SimpleNamespace(
        **{name: getattr(cu, name) for name in names},
        cuEventCreate=streams.new_event,
        cuEventRecord=streams.record,
        cuEventQuery=streams.query,
        cuEventDestroy=lambda event: (0,),
        cuThreadExchangeStreamCaptureMode=lambda mode: (0, mode),
    )
    library = SimpleNamespace(cuStreamBatchMemOp_v2=_Function(streams.batch))

    def make_ops(pages: Any, exchange: Any, *more: Any) -> stream_ops.StreamOps:
        ranks: Any = SimpleNamespace(rank=exchange.rank, world_size=exchange.world_size)
        ctypes.memset(pages.address_of(ranks.rank), 0, pages.page_nbytes)
        marks = Pages(exchange, HostDriver())
        words = StreamWords(pages, marks, HostAccess(), ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda name: library)
            words.close = marks.close
            watch = stream_watch.StreamWatch(words, driver, timeout_s, streams.ends.append)
            return stream_ops.StreamOps(words, driver, watch)

    inner = world.subset(range(world.world_size))
    inner.timeout_s = timeout_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watch, "cu", asked)
        patch.setattr(stream_queue, "cu", asked)
        patch.setattr(stream_watch, "_LOOK_S", 0.02)
        patch.setattr(signals, "HostOps", make_ops)
        patch.setattr(handoff_parts, "streams_wait", lambda world: True)
        patch.setattr(StreamsInUse, "use", lambda self, stream=None: _STREAM)
        patch.setattr(StreamsInUse, "fence", lambda self, but=None: PlayedFence(streams))
        try:
            yield inner, streams
            world.control.barrier()
        finally:
            inner.close()
            streams.close()


def produce(handoff: Handoff, streams: PlayedStreams, value: int) -> None:
    """Write a turn on the stream, which takes its time."""
    with handoff.produce() as slot:
        tensor = slot.tensor((_NUMEL,), torch.int32)

        def write() -> None:
            time.sleep(random.random() * 2e-3)
            tensor.fill_(value)

        streams.put(_STREAM, write)


def consume(
    handoff: Handoff, streams: PlayedStreams, value: int, wrong: list[tuple[int, int]]
) -> None:
    """Look at a turn on the stream, late in it, so that a block written too soon is seen."""
    with handoff.consume() as slot:
        tensor = slot.tensor((_NUMEL,), torch.int32)

        def look() -> None:
            time.sleep(random.random() * 4e-3)
            seen = int(tensor[-1]), int(tensor[0])
            if seen != (value, value):
                wrong.append((value, seen[0]))

        streams.put(_STREAM, look)


def left_behind(world: World) -> int:
    """How many posts between these ranks this one has not waited for."""
    ops = Signals.of(Link.of(world, tuple(range(world.world_size))).world)._ops
    assert isinstance(ops, stream_ops.StreamOps)
    words = ops._words
    pairs = [(slot, peer) for slot in range(num_slots(world)) for peer in words.peers]
    posted = words.read([words.posted(slot, words.rank, peer) for slot, peer in pairs])
    counts = [queue.counts for queue in ops._watch._queues.values()]
    waited = [max((each.get(pair, 0) for each in counts), default=0) for pair in pairs]
    return sum(posted) - sum(waited)


def one_after_another(world: World, mode: str) -> None:
    """Channels get the slots of signals of those that were closed: nothing may be left in them.

    Some hand over less than a ring, some leave what was given, and some go the other way.
    """
    with played(world, 5.0) as (inner, streams):
        wrong: list[tuple[int, int]] = []
        cases = [(2, 5, 5), (2, 2, 2), (2, 1, 1), (3, 7, 7), (2, 4, 2), (2, 0, 0), (3, 3, 1)]
        for number, (depth, num_given, num_taken) in enumerate(cases):
            others = tuple(range(1, inner.world_size))
            source = number % 2 if inner.world_size == 2 else 0
            targets = (1 - source,) if inner.world_size == 2 else others
            with Handoff(inner, source, targets, 4 * _NUMEL, mode=mode, depth=depth) as handoff:
                for turn in range(num_given if handoff.is_producer else num_taken):
                    value = 1000 * number + turn
                    if handoff.is_producer:
                        produce(handoff, streams, value)
                    else:
                        consume(handoff, streams, value, wrong)
                streams.synchronize(_STREAM)
                handoff.check()
            assert left_behind(inner) == 0
            world.control.barrier()
        assert not wrong, wrong


def put_back(world: World) -> None:
    """A turn that an exception ended, and that was waited for, is waited for no second time."""
    with played(world, 5.0) as (inner, streams):
        wrong: list[tuple[int, int]] = []
        for _ in range(2):
            with Handoff(inner, 0, 1, 4 * _NUMEL) as handoff:
                for turn in range(5):
                    if not handoff.is_producer:
                        consume(handoff, streams, turn, wrong)
                        continue
                    with pytest.raises(KeyError), handoff.produce():
                        raise KeyError
                    produce(handoff, streams, turn)
                if handoff.is_producer:
                    with pytest.raises(KeyError), handoff.produce():
                        raise KeyError
                streams.synchronize(_STREAM)
            assert left_behind(inner) == 0
        assert not wrong, wrong


def far_ahead(world: World, is_guarded: bool) -> int:
    """The producer's host is far ahead of the consumer's; how many headers were overwritten."""
    wrong, num = 0, NUM_HEADERS + 30
    with played(world, 20.0) as (inner, streams), pytest.MonkeyPatch.context() as patch:
        # As where every rank has a GPU of its own: there kernels wait, as many as fit.
        patch.setattr(stream_watch, "ROOM", 100 * num)
        if not is_guarded:
            patch.setattr(handoff_mapped, "NUM_HEADERS", 10 * num)
        with Handoff(inner, 0, 1, 4 * _NUMEL) as handoff:
            if handoff.is_producer:
                start = time.monotonic()
                for turn in range(num):
                    with handoff.produce() as slot:
                        slot.tensor((1 + turn % 7,), torch.int32)
                        if turn == NUM_HEADERS - 1:
                            world.control.barrier()
                    if turn == NUM_HEADERS + 3 and is_guarded:
                        assert time.monotonic() - start > 0.3, "it did not wait"
            else:
                world.control.barrier()
                time.sleep(0.5)
                for turn in range(num):
                    with handoff.consume() as slot:
                        shapes = [tensor.shape for tensor in slot.tensors()]
                        wrong += shapes != [(1 + turn % 7,)]
            streams.synchronize(_STREAM)
            handoff.check()
    return wrong


def both_ways(world: World, mode: str) -> None:
    """Two channels open at once, as between the stages of a pipeline; neither holds the other."""
    with played(world, 5.0) as (inner, streams):
        wrong: list[tuple[int, int]] = []
        for _ in range(2):
            there = Handoff(inner, 0, 1, 4 * _NUMEL, mode=mode)
            back = Handoff(inner, 1, 0, 4 * _NUMEL, mode=mode)
            for turn in range(9):
                if inner.rank == 0:
                    produce(there, streams, turn)
                    consume(back, streams, -turn, wrong)
                else:
                    consume(there, streams, turn, wrong)
                    produce(back, streams, -turn)
            streams.synchronize(_STREAM)
            for channel in (there, back):
                channel.close()
            assert left_behind(inner) == 0
        assert not wrong, wrong


def unsettled(world: World) -> int:
    """What closing would leave behind without the guard."""
    with played(world, 5.0) as (inner, streams), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Side, "settle", lambda self: None)
        wrong: list[tuple[int, int]] = []
        with Handoff(inner, 0, 1, 4 * _NUMEL) as handoff:
            for turn in range(3):
                if handoff.is_producer:
                    produce(handoff, streams, turn)
                else:
                    consume(handoff, streams, turn, wrong)
            streams.synchronize(_STREAM)
        return left_behind(inner)
