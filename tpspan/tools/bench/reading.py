"""How fast a rank reads in place: its own shard, each peer's, and all of them in order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpspan.tools.bench import values
from tpspan.tools.bench.measuring import Bench

GROUP = "read in place"
_CHECK_SALT = 7


def measure(bench: Bench, nbytes: int) -> None:
    """Rates of a sum over parts of a span. Collective.

    All ranks read at once, a peer's shard by the same distance on all, so that no two read from one
    owner; the whole range in order, so that they do.
    """
    world = bench.world
    span = values.allocate(world, nbytes)
    values.fill(span, _CHECK_SALT)
    span.barrier()
    values.check(span, _CHECK_SALT, "before reading in place")
    shard_nbytes = span.local.numel() * values.DTYPE.itemsize
    out = torch.empty((), dtype=values.DTYPE, device=world.device)
    plain = values.expected(0, span.local.numel(), _CHECK_SALT, world.device)
    how = "sum of float32"
    notes = "; ".join(
        filter(None, [how, "all ranks at once on one GPU" if world.shares_device else bench.crowd])
    )
    _rate(bench, "ordinary memory", plain, out, shard_nbytes, notes)
    _rate(bench, "own shard", span.local, out, shard_nbytes, notes)
    for distance in range(1, world.world_size):
        peer = (world.rank + distance) % world.world_size
        name = f"shard of the rank {distance} to the right"
        _rate(bench, name, span.shard(peer), out, shard_nbytes, notes)
    _rate(bench, "whole range in order", span.gathered, out, span.nbytes, notes)
    if world.world_size > 1:
        alone = f"{how}; one rank reads, the others rest"
        _rate(bench, "ordinary memory, alone", plain, out, shard_nbytes, alone, in_turns=True)
        _rate(bench, "own shard, alone", span.local, out, shard_nbytes, alone, in_turns=True)
        right = span.shard((world.rank + 1) % world.world_size)
        name = "right neighbour's shard, alone"
        _rate(bench, name, right, out, shard_nbytes, alone, in_turns=True)
        del right
        name = "whole range in order, alone"
        _rate(bench, name, span.gathered, out, span.nbytes, alone, in_turns=True)
    bench.start_together()
    span.close()


def summing(part: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """A body that reads every byte of a tensor once."""
    return lambda: torch.sum(part, dim=0, out=out)


def _rate(
    bench: Bench,
    name: str,
    part: torch.Tensor,
    out: torch.Tensor,
    nbytes: int,
    note: str,
    *,
    in_turns: bool = False,
) -> None:
    once = bench.on_stream(summing(part, out), 5 if bench.is_cuda else 1)
    samples = bench.sample(once, most=50, in_turns=in_turns)
    bench.add_rate(GROUP, name, nbytes, samples, note)
