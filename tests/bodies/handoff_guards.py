"""What guards the remaps of a channel on CUDA, with the guard and without; graphs; no waiting."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from bodies.common import failure, finish
from bodies.handoff import MIB, side_of
from bodies.streams import LONG_CYCLES
from tpspan import Handoff
from tpspan.errors import CaptureError
from tpspan.launch.world import World
from tpspan.memory.driver import Right


def remap_waits(world: World, guarded: bool) -> list[bool]:
    """Whether a kernel that was running when a slot was released had ended at each remap."""
    driver, seen = world.driver, []
    handoff = Handoff(world, 0, 1, MIB, mode="remap")
    side = side_of(handoff, producer=world.rank == 0)
    slot = handoff.acquire()
    if world.rank == 0:
        slot.tensor((16,), torch.int32).fill_(5)
        torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # touches nothing: without the guard it does not crash
    done = torch.cuda.current_stream().record_event()
    replace = driver.replace

    def watched(address: int, nbytes: int, handle: int, right: Right) -> bool:
        seen.append(done.query())
        return replace(address, nbytes, handle, right)

    driver.replace = watched  # type: ignore[method-assign]
    try:
        if not guarded:
            passed = SimpleNamespace(is_done=lambda: True, give_back=lambda: None)
            side.streams.fence = lambda but=None: passed  # type: ignore
        start = time.monotonic()
        slot.release()
        assert time.monotonic() - start < 0.05, "the launching thread does not wait"
        while not seen and time.monotonic() - start < 10:
            time.sleep(0.001)
    finally:
        del driver.replace
        if not guarded:
            del side.streams.fence
    del slot
    finish(world)
    world.control.barrier()
    handoff.close(force=True)
    return seen


def during_a_capture(world: World, guarded: bool) -> list[bool]:
    """Slots are refused in a capture, and a remap waits for its end (invariant 7).

    Returns:
        For each remap whether a capture was going on.
    """
    driver, seen, capturing = world.driver, [], [False]
    handoff = Handoff(world, 0, 1, MIB, mode="remap")
    fixed = handoff.fixed_tensor((16,), torch.int32)
    side = side_of(handoff, producer=world.rank == 0)
    out = torch.zeros(16, dtype=torch.int32, device=world.device)
    replace = driver.replace

    def watched(address: int, nbytes: int, handle: int, right: Right) -> bool:
        seen.append(capturing[0])
        return replace(address, nbytes, handle, right)

    with handoff.acquire() as slot:
        if world.rank == 0:
            fixed.fill_(1)
    finish(world)
    assert side.lane is not None
    side.lane.drain()
    if not guarded:
        side.lane._refuse_capture = lambda: None
    slot = handoff.acquire()
    stream = torch.cuda.Stream(world.device)
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(LONG_CYCLES)
    driver.replace = watched  # type: ignore[method-assign]
    try:
        slot.release()  # the remap waits for the kernel; meanwhile a capture begins
        handoff.record_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # torch.cuda.graph would wait
            capturing[0] = True
            if world.rank == 0:
                fixed.add_(1)
            else:
                torch.add(fixed, 0, out=out)
            assert isinstance(failure(handoff.acquire), CaptureError)
            time.sleep(0.6)
            capturing[0] = False
            graph.capture_end()
        start = time.monotonic()
        while not seen and time.monotonic() - start < 10:
            time.sleep(0.001)
    finally:
        del driver.replace
    finish(world)
    world.control.barrier()
    del fixed, slot, graph
    handoff.close(force=True)
    return seen


def through_a_graph(world: World, num: int) -> int:
    """A graph captured once writes, another reads, whatever is mapped by then; wrong turns."""
    device = world.device
    with Handoff(world, 0, 1, 4 * MIB, mode="remap") as handoff:
        fixed = handoff.fixed_tensor((MIB,), torch.int32)
        number = torch.zeros(1, dtype=torch.int32, device=device)
        wrong = torch.zeros(1, dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        for turn in range(num):
            with handoff.acquire() as slot:
                assert slot.tensor((MIB,), torch.int32).data_ptr() == fixed.data_ptr()
                if turn == 0:
                    stream = torch.cuda.Stream(device)
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        if world.rank == 0:
                            fixed.copy_(number.expand(MIB))
                        else:
                            wrong.add_((fixed != number).sum())
                        number.add_(1)
                graph.replay()
        finish(world)
        result = int(wrong.item())
        handoff.check()
        del fixed, graph
    return result


def never_synchronises(world: World, mode: str, num: int) -> None:
    """In a steady state nothing of torch waits on the host, and no turn is damaged."""
    numel = 4 * MIB
    ones = torch.ones(numel, dtype=torch.int32, device=world.device)
    wrong = torch.zeros(1, dtype=torch.int64, device=world.device)
    with Handoff(world, 0, 1, 4 * numel, mode=mode) as handoff:
        finish(world)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for turn in range(num):
                with handoff.acquire() as slot:
                    tensor = slot.tensor((numel,), torch.int32)
                    if world.rank == 0:
                        torch.mul(ones, turn, out=tensor)
                    else:
                        wrong.add_((tensor != turn).sum())
                    del tensor
        finally:
            torch.cuda.set_sync_debug_mode("default")
        finish(world)
        assert int(wrong.item()) == 0
        assert handoff.stats().copied_nbytes == 0
