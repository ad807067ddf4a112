"""Who can multiply x by a W whose rows lie on all ranks: tpspan's policies, and torch's ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional

from tpspan.parallel.linear import GatheredLinear
from tpspan.tools.bench import torch_peers
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender

READS = ("in_place", "staged", "auto")


def contenders_of(
    bench: Bench,
    x: torch.Tensor,
    layers: dict[str, GatheredLinear],
    shard: torch.Tensor,
    whole: torch.Tensor,
) -> Iterator[Contender]:
    """All of them, in the order of the table. Collective.

    Args:
        x: of this rank.
        layers: by their policy, over one span.
        shard, whole: this rank's rows of W, and all of them, in ordinary memory.
    """
    yield Contender(
        "local", "floor", lambda: functional.linear(x, whole), "W gathered already, ordinary memory"
    )
    weight = layers["auto"].reader.weight
    remote = [piece for piece in weight.copies if piece.owner != bench.world.rank]
    buffer = torch.empty_like(whole)

    def wire() -> None:
        with weight.lane.forked():
            weight.lane.copy(buffer.data_ptr(), weight.address, remote)

    if bench.is_cuda and remote:
        yield Contender("wire", "floor", wire, "copies of the other ranks' rows alone")
    notes = {"auto": "chosen by rows of x", "staged": "copied in pieces meanwhile"}
    for read in READS:
        body = functools.partial(layers[read], x)
        yield Contender(read, "ours", body, notes.get(read, ""))

    def gathered() -> torch.Tensor:
        torch_peers.all_gather(buffer, shard)
        return functional.linear(x, buffer)

    for peer in torch_peers.collective(bench, gathered):
        yield Contender(f"{peer.name} + mm", peer.role, peer.body, peer.note)
    memory = torch_peers.symmetric(bench, shard.numel(), shard.dtype)
    own = memory
    if isinstance(memory, torch.Tensor):
        own = memory.view(shard.shape).copy_(shard)

    def low_contention() -> torch.Tensor:
        name = torch_peers.group_name()
        found = torch.ops.symm_mem._low_contention_all_gather(own, name)
        return functional.linear(x, torch_peers.wait(found).view_as(whole))

    def fused() -> torch.Tensor:
        name = torch_peers.group_name()
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(own, [x.T], 0, name)
        return products[0].T

    note = "torch symmetric memory"
    yield torch_peers.of_symmetric("low contention + mm", own, low_contention, note)
    yield torch_peers.of_symmetric("fused", own, fused, note)
