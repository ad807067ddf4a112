"""What the GPU engine stages, where it reads and when it meets, on the host backend.

The engine itself runs; only what it asks of a GPU is played: kernels by plain copies and sums over
the same arguments, streams by doing everything at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bodies import distributed
from tpspan.distributed import ahead, buffers, counts, cuda_group, cuda_reduce, groups
from tpspan.launch.world import World


def every_call(world: World, dtype: str, through_host: bool, captured: bool) -> None:
    """All functions over all sizes, in all the ways that need no GPU."""
    before = counts.stats().served
    with played(through_host=through_host, captured=captured):
        distributed.every_call(world, dtype)
    ways = {way for way, num in counts.stats().served.items() if num > before.get(way, 0)}
    is_ahead = not (through_host or captured)
    assert ("all_gather: staged ahead" in ways) == is_ahead
    assert ("reduce_scatter: staged ahead" in ways) == is_ahead
    assert ("all_reduce: staged ahead" in ways) == (is_ahead and world.world_size == 2)


def every_reduction(world: World, through_host: bool) -> None:
    """The other operations, the mean, and bits that are the same on all ranks."""
    with played(through_host=through_host, captured=False):
        distributed.every_reduction(world)


def grown(world: World) -> None:
    """Buffers that a graph has captured stay where they are when larger ones are made."""
    with played(through_host=False, captured=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "_LARGEST_NBYTES", 16 << 20)
        made = buffers.Buffers(world)
        data = (ctypes.c_uint8 * 64)(*range(64))
        seen: list[int] = []
        for nbytes in (4 << 20, 8 << 20, 16 << 20):
            made.capturing = nbytes != 8 << 20
            first = made.stage(ctypes.addressof(data), 64, 0)
            if made.capturing:
                seen += [made.staged(first, rank) for rank in range(made.world_size)]
            made.capturing = False
            world.control.barrier()
            made.fit(nbytes)
            assert made.nbytes == nbytes
        world.control.barrier()
        for address in seen:
            assert ctypes.string_at(address, 64) == bytes(data)
        assert len(made._kept) == 2, "what no graph knows was closed"
        world.control.barrier()
        made.close()


@contextmanager
def played(*, through_host: bool, captured: bool) -> Iterator[None]:
    """Let the host backend's groups use the GPU engine."""

    def engine(world: World) -> cuda_group.CudaGroup:
        made = cuda_group.CudaGroup(world)
        if through_host:
            made._host_buffers, made._ahead = buffers.Buffers(world, on_host=True), None
        return made

    asked = SimpleNamespace(
        _cuda_getDevice=lambda: None,
        _cuda_isCurrentStreamCapturing=lambda: captured,
        _cuda_getCurrentRawStream=lambda index: 0,
    )
    stream = SimpleNamespace(
        synchronize=lambda: None,
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        cuda_stream=0,
    )
    event = SimpleNamespace(record=lambda stream: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "HostGroup", engine)
        patch.setattr(cuda_group, "_C", asked)
        patch.setattr(cuda_group, "prepare", lambda *names: None)
        patch.setattr(cuda_group, "Fused", lambda world: None)
        patch.setattr(cuda_group, "THROUGH_HOST_NBYTES", 1 << 30)
        patch.setattr(cuda_group, "pull", pull)
        patch.setattr(cuda_reduce, "pull", pull)
        patch.setattr(cuda_reduce, "device_sum", device_sum)
        patch.setattr(buffers, "_SMALLEST_NBYTES", 2 << 20)
        patch.setattr(buffers, "_LARGEST_NBYTES", 2 << 20)
        patch.setattr(cuda_group, "LARGE_NBYTES", 32 << 10)
        patch.setattr(ahead, "_FIRST_NBYTES", 8 << 10)
        patch.setattr(torch.cuda, "Stream", lambda device: stream)
        patch.setattr(torch.cuda, "Event", lambda: event)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda *device: stream)
        patch.setattr(torch.cuda, "synchronize", lambda *device: None)
        yield


def pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
    num_pieces: int,
    **where: Any,
) -> None:
    """``tpspan.kernels.stream_reduce.pull`` by plain copies."""
    for distance in range(1, num_pieces + 1):
        peer = (rank + distance) % world_size
        part = min(piece_nbytes, max(nbytes - peer * piece_nbytes, 0))
        ctypes.memmove(target + peer * target_stride, source + peer * source_stride, part)


def device_sum(
    dtype: str,
    target: int,
    second: int,
    source: int,
    stride: int,
    own: int,
    numel: int,
    rank: int,
    world_size: int,
    divisor: int = 1,
    **where: Any,
) -> None:
    """``tpspan.kernels.stream_reduce.device_sum`` by torch."""
    kind = getattr(torch, dtype)
    places = [source + peer * stride for peer in range(world_size)]
    places[rank] = own
    result = over(places[0], numel, kind).to(torch.float32, copy=True)
    for place in places[1:]:
        result += over(place, numel, kind)
    result /= divisor
    for place in filter(None, (target, second)):
        over(place, numel, kind).copy_(result)


def over(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = numel * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)
