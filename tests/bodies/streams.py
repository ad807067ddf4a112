"""What only streams and graphs can show; the host backend has neither."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch

from bodies.common import failure, finish, gather, meet, raw, short_lived
from bodies.remap import mark, striped, value_at
from faulty import FaultyDriver
from tpspan.errors import CaptureError, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, Right
from tpspan.spans import Span, stream_watch

PAGE = PAGE_NBYTES
LONG_CYCLES = 400_000_000  # about 0.2 s


def waits_for_kernels(world: World, slow: int) -> None:
    """One rank's kernel still uses the range when all call: nobody unmaps before it is done."""
    with striped(world) as span:
        mark(span)
        block = span.new_block(0, PAGE)
        before = raw(span)[PAGE : 2 * PAGE]
        copy = torch.empty(PAGE, dtype=torch.uint8, device=world.device)
        finish(world)
        world.control.barrier()
        stream = torch.cuda.Stream(world.device)
        with torch.cuda.stream(stream):
            if world.rank == slow:
                torch.cuda._sleep(LONG_CYCLES)
            copy.copy_(before)
            done = stream.record_event()
        span.record_stream(stream)
        fence = span.fence()
        assert world.rank != slow or not fence.is_done()
        with FaultyDriver(world.driver) as watch:
            start = time.monotonic()
            old = span.remap(PAGE, block, after=fence)
            unmapped = min(each.start_s for each in watch.named("unmap") + watch.named("replace"))
        assert done.query()
        waited = gather(world, unmapped - start)
        if not world.shares_device or world.rank == slow:
            assert waited[slow] > 0.05, "the kernel was too short to see anything"
        assert bool((copy == 2).all()), "it read what was there before"
        assert span.remap(PAGE, old, after=span.fence()) is block
        meet(span)
        del before


def capture(world: World) -> None:
    """No mapping changes during a capture, and a replay sees what is mapped by then."""
    with striped(world) as span:
        mark(span)
        page = raw(span)[PAGE : 2 * PAGE]
        seen = torch.zeros(PAGE, dtype=torch.uint8, device=world.device)
        graph = torch.cuda.CUDAGraph()
        block = span.new_block(0, PAGE)
        before = span.blocks
        fence = span.fence()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            seen.copy_(page)
            assert isinstance(failure(span.fence), CaptureError)
            for step in (
                lambda: span.remap(PAGE, block, after=fence),
                lambda: span.swap(0, PAGE, after=fence),
                span.close,
            ):
                error = failure(step)
                assert isinstance(error, CaptureError | PeerError), error
                assert "captured into a graph" in str(error)
        assert span.blocks == before
        graph.replay()
        finish(world)
        assert bool((seen == 2).all())
        world.control.barrier()
        span.remap(PAGE, block, after=span.fence())
        if world.rank == 0:
            page.fill_(77)
        meet(span)
        graph.replay()
        finish(world)
        assert bool((seen == 77).all()), "the replay reads the new memory at the old address"
        meet(span)
        del graph, page


def captured_barrier(world: World) -> None:
    """A barrier inside a graph works at every replay."""
    with Span.allocate(world, (world.world_size, 4), torch.int32) as span:
        span.local.zero_()
        meet(span)
        stream = torch.cuda.Stream(world.device)
        seen = torch.empty(world.world_size, 4, dtype=torch.int32, device=world.device)
        local, gathered = span.local, span.gathered
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            span.barrier()  # everything is loaded before the capture
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                local.add_(world.rank + 1)
                span.barrier()
                seen.copy_(gathered)
                span.barrier()
            for turn in range(1, 6):
                graph.replay()
                span.barrier()  # one outside, in between
                stream.synchronize()
                assert seen[:, 0].tolist() == [
                    turn * (rank + 1) for rank in range(world.world_size)
                ]
        meet(span)
        del graph, local, gathered


def late_on_a_stream(world: World, victim: int) -> None:
    """A stream's wait ends at the deadline, and the host is told who was missing."""
    with short_lived(world, 1.0) as inner:
        span = Span.allocate(inner, (world.world_size, 4), torch.float32)
        meet(span)
        if world.rank != victim:
            time.sleep(0.2 * world.rank)  # one deadline passes after the other
            start = time.monotonic()
            span.barrier()
            span.barrier()
            finish(world)
            # Whoever came first tells all the others.
            assert 0.9 - 0.2 * world.rank < time.monotonic() - start < 5
            error = failure(span.barrier)
            assert isinstance(error, PeerError), error
            assert error.ranks == (victim,), error.ranks
        world.control.barrier()
        span.close(force=True)


def far_ahead(world: World, victim: int, num_kernels: int, patience_s: float | None = None) -> None:
    """A host that has filled its stream while it waits for a late rank is told at the deadline."""
    with contextlib.ExitStack() as stack:
        if patience_s is not None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(stream_watch, "_PATIENCE_S", patience_s)
        inner = stack.enter_context(short_lived(world, 2.0))
        span = Span.allocate(inner, (world.world_size, 4), torch.float32)
        meet(span)
        if world.rank != victim:
            values = torch.zeros(16, device=world.device)
            start = time.monotonic()
            error: Exception | None = None
            for _ in range(4000):
                for _ in range(num_kernels):
                    values += 1
                try:
                    span.barrier()
                except PeerError as raised:
                    error = raised
                    break
            finish(world)
            assert 1.9 < time.monotonic() - start < 15
            assert isinstance(error, PeerError) and error.ranks == (victim,), error
        world.control.barrier()
        span.close(force=True)


def stray_write(world: World, victim: int) -> int:
    """A kernel writes through a read-only mapping: its process is lost, the data are not."""
    span = striped(world)
    mark(span)
    span.protect(Right.READ)
    world.control.barrier()
    if world.rank == victim:
        with pytest.raises(RuntimeError, match="illegal memory access|CUDA error"):
            raw(span).zero_()
            torch.cuda.synchronize()
        world.control.barrier()
        # Its context is lost, and with it all that a world closes: this process can only end.
        os.kill(os.getpid(), signal.SIGKILL)
    world.control.barrier()
    values = [value_at(span, page) for page in range(len(span.blocks))]
    assert values == list(range(1, len(values) + 1))
    span.close(force=True)
    return values[0]
