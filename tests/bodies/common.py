"""What bodies about spans share: bytes that tell where they belong, and who failed how."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tpspan.launch.world import World
from tpspan.spans import Signals, Span
from tpspan.spans.allocation import pool_of


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """The byte that belongs at each offset; no period divides a page."""
    period = ((torch.arange(251) * 7 + seed) % 251).to(torch.uint8)
    return period.repeat(nbytes // 251 + 1)[:nbytes]


def raw(span: Span) -> torch.Tensor:
    """The whole span as bytes."""
    return span.tensor((span.nbytes,), torch.uint8)


def fill(span: Span, seed: int = 0) -> None:
    """Write this rank's shard, wherever its pages lie, and wait until all have."""
    expected = pattern(span.nbytes, seed).to(span.world.device)
    whole = raw(span)
    for offset, nbytes in span.layout.shards[span.world.rank]:
        whole[offset : offset + nbytes] = expected[offset : offset + nbytes]
    meet(span)


def holds(span: Span, seed: int = 0) -> bool:
    """Whether this rank sees in the whole span what all ranks wrote with ``fill``."""
    return bool(raw(span).cpu().equal(pattern(span.nbytes, seed)))


def meet(span: Span) -> None:
    """A barrier of streams and hosts."""
    span.barrier()
    finish(span.world)
    span.world.control.barrier()


def finish(world: World) -> None:
    """Wait for the device of this rank."""
    if world.backend == "cuda":
        torch.cuda.synchronize()


def failure(step: Callable[..., object], *args: Any, **kwargs: Any) -> BaseException | None:
    """What a step raises; without its frames, which would keep tensors alive."""
    try:
        step(*args, **kwargs)
    except Exception as error:
        return error.with_traceback(None)
    return None


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's value, by the control plane and not by what is tested."""
    return world.control.all_gather(value)


def trim(world: World) -> None:
    """The state between two calls: what is made once is there, and the pool keeps no blocks."""
    gc.collect()
    Signals.of(world)
    world.resource("pool", pool_of).trim()


@contextmanager
def short_lived(world: World, timeout_s: float) -> Iterator[World]:
    """A world of the same ranks with a board of its own, which may end up out of step."""
    inner = world.subset(range(world.world_size))
    inner.timeout_s = timeout_s
    Span.allocate(inner, (0,), torch.uint8).close()  # connections are made with time to spare
    try:
        yield inner
    finally:
        world.control.barrier()
        gc.collect()
        inner.close()
