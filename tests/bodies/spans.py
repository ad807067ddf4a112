"""What every span must do, on any backend."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from bodies.common import failure, fill, finish, gather, holds, meet, pattern, raw
from tpspan.errors import ClosedError, InUseError, PeerError
from tpspan.launch.world import World
from tpspan.memory import PAGE_NBYTES, Right
from tpspan.spans import Layout, Span
from tpspan.spans.allocation import OpenSpans

PAGE = PAGE_NBYTES


def uneven(num_rows: int, world_size: int) -> list[int]:
    """Rows that no two ranks have alike, the first rank none if there are others."""
    rows = list(range(world_size))
    rows[-1] += num_rows - sum(rows)
    return rows


def round_trip(
    world: World, shape: tuple[int, ...], dtype: torch.dtype, cut: str = "even", **options: Any
) -> None:
    """What each rank writes into its shard, all ranks read, in place and copied."""
    if cut == "uneven":
        options["rows"] = uneven(shape[0], world.world_size)
    with Span.allocate(world, shape, dtype, **options) as span:
        gathered = span.gathered
        assert tuple(gathered.shape) == shape
        assert (gathered.dtype, gathered.device) == (dtype, world.device)
        assert gathered.is_contiguous()
        assert span.nbytes == gathered.numel() * dtype.itemsize
        fill(span)
        assert holds(span)
        if span.nbytes:
            assert gathered.data_ptr() == span.base_address

        out = torch.empty(shape, dtype=dtype, device=world.device)
        span.copy_to(out)
        meet(span)
        assert out.cpu().reshape(-1).view(torch.uint8).equal(pattern(span.nbytes))

        local = span.local
        slices = span.layout.shards[world.rank]
        assert local.numel() * dtype.itemsize == sum(nbytes for _, nbytes in slices)
        expected = pattern(span.nbytes)
        own = [expected[offset : offset + nbytes] for offset, nbytes in slices]
        seen = local.cpu().reshape(-1).view(torch.uint8)
        assert seen.equal(torch.cat(own) if own else expected[:0])
        meet(span)
        # The shard is the same memory: what is written there arrives everywhere.
        local.view(torch.uint8).fill_(world.rank + 1) if local.dim() else local.zero_()
        meet(span)
        if span.rows is not None:
            assert tuple(local.shape) == (span.rows[world.rank], *shape[1:])
            for rank in range(world.world_size):
                shard = span.shard(rank)
                assert tuple(shard.shape) == (span.rows[rank], *shape[1:])
                assert bool((shard.view(torch.uint8) == rank + 1).all())
        for rank, shards in enumerate(span.layout.shards):
            for offset, nbytes in shards:
                assert bool((raw(span)[offset : offset + nbytes] == rank + 1).all())
        meet(span)

        stats = span.stats()
        owned = sum(gather(world, stats.own_nbytes))
        assert owned == span.layout.span_nbytes == stats.span_nbytes, "held once between them"
        assert stats.num_blocks == len(span.layout.runs)
        del gathered, local, seen
        if span.rows is not None:
            del shard
    assert span.is_closed


def same_table(world: World) -> list[Any]:
    """Return what the tables say and where they lie; they name offsets, not addresses."""
    layout = Layout.blocked(
        [3 * PAGE + 5 * rank + 1 for rank in range(world.world_size)], page_nbytes=PAGE
    )
    with Span.allocate_bytes(world, layout) as span:
        assert [
            (placed.offset_bytes, placed.block.nbytes, placed.block.owner) for placed in span.blocks
        ] == [(run.offset_bytes, run.nbytes, run.owner) for run in layout.runs]
        return [
            (placed.offset_bytes, placed.block.number, placed.block.owner) for placed in span.blocks
        ]


def neighbours_page(world: World) -> list[int]:
    """Shards cut inside pages: few bytes lie on a neighbour's page and are written in place."""
    nbytes = 2 * PAGE * world.world_size
    cuts = [2 * PAGE] * world.world_size
    if world.world_size > 1:
        cuts[0] += 1001
        cuts[-1] -= 1001
    layout = Layout.blocked(cuts, page_nbytes=PAGE)
    with Span.allocate_bytes(world, layout) as span:
        foreign = [
            nbytes
            for offset, nbytes in layout.shards[world.rank]
            for piece in layout.pieces(offset, nbytes)
            if piece.owner != world.rank
        ]
        fill(span, seed=world.world_size)
        assert holds(span, seed=world.world_size)
        meet(span)
    assert span.nbytes == nbytes
    return foreign


def subset_spans(world: World) -> None:
    """Worlds inside the world have spans of their own."""
    half = world.subset([r for r in range(world.world_size) if r % 2 == world.rank % 2][::-1])
    with Span.allocate(half, (half.world_size, PAGE), torch.uint8) as span:
        fill(span, seed=world.rank % 2)
        assert holds(span, seed=world.rank % 2)
        with Span.allocate(world, (world.world_size, 5), torch.int64) as outer:
            fill(outer, seed=9)
            assert holds(outer, seed=9)
            meet(outer)
        meet(span)
    half.close()


def many_at_once(world: World) -> None:
    """Spans stand beside each other and may be closed in any order; their memory is used again."""
    first = [
        Span.allocate(world, (8, PAGE), torch.uint8, layout=layout)
        for layout in ("striped", "blocked", "striped")
    ]
    for seed, span in enumerate(first):
        fill(span, seed)
    assert all(holds(span, seed) for seed, span in enumerate(first))
    pool = first[0]._parts.pool  # type: ignore[union-attr]
    meet(first[0])
    created = pool.stats().num_created
    first[1].close()
    assert holds(first[0], 0)
    assert holds(first[2], 2)
    again = Span.allocate(world, (8, PAGE), torch.uint8)
    assert pool.stats().num_created == created, "closed spans' blocks are taken again"
    fill(again, 5)
    assert holds(again, 5)
    assert holds(first[0], 0)
    meet(again)
    for span in (first[2], again, first[0]):
        span.close()


def tensors_keep_the_span(world: World) -> None:
    """A span without a name lives on in its tensors, and is not closed under them."""
    span = Span.allocate(world, (world.world_size * 4, 1024), torch.float32)
    known = weakref.ref(span)
    row = span.gathered[world.rank]
    row.fill_(world.rank)
    del span
    gc.collect()
    again = known()
    assert again is not None
    meet(again)
    assert row.sum().item() == world.rank * 1024
    assert again.shard(0)[0].sum().item() == 0
    del row
    again.close()


def refuse_to_close(world: World, holder: int) -> None:
    """One rank has a live tensor: that rank is told so, the others who it is; nothing is done."""
    span = Span.allocate(world, (world.world_size, PAGE), torch.uint8, layout="striped")
    held = span.local[:0] if world.rank != holder else span.local
    fill(span)
    kept = held if world.rank == holder else None
    del held
    for _ in range(2):
        error = failure(span.close)
        if world.rank == holder:
            assert isinstance(error, InUseError), error
            assert "1 tensors" in str(error)
        else:
            assert isinstance(error, PeerError), error
            assert error.ranks == (holder,)
            assert "InUseError" in str(error)
        assert not span.is_closed
    meet(span)
    assert holds(span), "it still works"
    meet(span)
    del kept
    span.close()
    span.close()
    assert span.is_closed


def force_close(world: World) -> None:
    """Without asking anybody: the tensor that is left must not be touched."""
    span = Span.allocate(world, (world.world_size, 512), torch.float32)
    kept = span.gathered
    meet(span)
    span.close(force=True)
    assert span.is_closed
    del kept


def closed_everywhere(world: World) -> None:
    span = Span.allocate(world, (world.world_size, PAGE), torch.uint8, layout="striped")
    block = span.new_block(0, PAGE)
    fence = span.fence()
    out = torch.empty(span.shape, dtype=span.dtype, device=world.device)
    span.close()
    uses = {
        "gathered": lambda: span.gathered,
        "local": lambda: span.local,
        "shard": lambda: span.shard(0),
        "tensor": lambda: span.tensor((1,), torch.uint8),
        "copy_to": lambda: span.copy_to(out),
        "barrier": span.barrier,
        "fence": span.fence,
        "blocks": lambda: span.blocks,
        "new_block": lambda: span.new_block(0, PAGE),
        "remap": lambda: span.remap(0, block, after=fence),
        "swap": lambda: span.swap(0, PAGE, after=fence),
        "protect": lambda: span.protect(Right.READ),
        "stats": span.stats,
        "base_address": lambda: span.base_address,
    }
    for name, use in uses.items():
        with pytest.raises(ClosedError, match="was closed"):
            use()
        assert name
    assert "closed" in repr(span)
    span.close()


def closed_world(world: World) -> None:
    """A span whose tensors outlive the world says so instead of touching what is gone."""
    inner = world.subset(range(world.world_size))
    span = Span.allocate(inner, (world.world_size, 512), torch.float32)
    fill(span)
    kept = span.gathered
    expected = kept.cpu().view(torch.uint8).reshape(-1).clone()
    finish(world)
    world.control.barrier()
    inner.close()
    assert not span.is_closed
    assert kept.cpu().view(torch.uint8).reshape(-1).equal(expected), "the tensor stays readable"
    for use in (span.barrier, lambda: span.fence().wait()):
        with pytest.raises(ClosedError, match="world"):
            use()
    with pytest.raises(InUseError, match="still alive"):
        span.close()
    world.control.barrier()
    del kept
    span.close()
    assert span.is_closed


def closes_with_world(world: World) -> None:
    inner = world.subset(range(world.world_size))
    span = Span.allocate(inner, (world.world_size, 512), torch.float32)
    fill(span)
    inner.close()
    assert span.is_closed


def leaving_with_an_error(world: World) -> None:
    """A ``with`` block that one rank leaves by an error asks no other rank."""
    with (
        pytest.raises(KeyError, match="mine"),
        Span.allocate(world, (world.world_size, 512), torch.float32) as span,
    ):
        fill(span)
        raise KeyError("mine")
    assert span.is_closed
    world.control.barrier()


def refused_arguments(world: World) -> None:
    """One clear sentence on every rank, and the next call works."""
    size = world.world_size
    uint8 = torch.uint8
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (((-1, 4), uint8), {}, "not negative"),
        (((2.5, 4), uint8), {}, "must be a sequence of whole numbers"),
        ((5, uint8), {}, "must be a sequence of whole numbers"),
        (((size, 4), uint8), {"rows": 3}, "must be a sequence of whole numbers"),
        (((size, 4), uint8), {"timeout_s": float("nan")}, "timeout_s=nan must be a positive"),
        (((size, 4), uint8), {"timeout_s": 0}, "timeout_s=0 must be a positive"),
        (((size, 4), uint8), {"timeout_s": -1.0}, "timeout_s=-1.0 must be a positive"),
        (((size, 4), uint8), {"timeout_s": 1e300}, "timeout_s=1e+300 must be a positive"),
        (((size, 4), "float32"), {}, "must be a torch.dtype"),
        (((size, 4), uint8), {"layout": "diagonal"}, "'blocked', 'striped' or a Layout"),
        (((size, 4), uint8), {"rows": [size + 1] + [0] * (size - 1)}, "do not cut"),
        (((size, 4), uint8), {"rows": [0] * size}, "do not cut"),
        (((size, 4), uint8), {"rows": [size] * (size + 1)}, "do not cut"),
        (((size, 4), uint8), {"rows": [-1, size + 1][:size]}, "do not cut"),
        (((size, 4), uint8), {"rows": [1] * size, "layout": "striped"}, "rows go with"),
        (((size, 4), uint8), {"layout": "striped", "stripe_nbytes": PAGE + 1}, "multiple of the"),
        (((size, 4), uint8), {"layout": "striped", "stripe_nbytes": 0}, "multiple of the page"),
        (((size, 4), uint8), {"layout": "striped", "stripe_nbytes": -PAGE}, "multiple of the"),
        (((1 << 60,), uint8), {}, "addresses"),
        (
            ((size, 4), uint8),
            {"layout": Layout.blocked([1] * size, page_nbytes=PAGE)},
            "the layout is for",
        ),
        (
            ((size + 1,), uint8),
            {"layout": Layout.blocked([1] * (size + 1), page_nbytes=PAGE)},
            "the layout is for",
        ),
    ]
    for args, options, said in cases:
        error = failure(Span.allocate, world, *args, **options)
        assert isinstance(error, ValueError | TypeError), (args, options, error)
        assert said in str(error), error
        assert "\n" not in str(error)
    with Span.allocate(world, (size, 4), uint8) as span:
        for nbytes in (0, -PAGE, 5, PAGE + 1):
            error = failure(span.new_block, 0, nbytes)
            assert "whole pages" in str(error)
        assert "no rank" in str(failure(lambda: span.new_block(size, PAGE)))
        assert "no rank" in str(failure(lambda: span.shard(size)))
        assert "lie inside" in str(failure(lambda: span.tensor((size * 4 + 1,), uint8)))
        wrong = torch.empty(size, 5, dtype=uint8, device=world.device)
        flat = torch.empty(4, 2 * size, dtype=uint8, device=world.device)
        for out in (wrong, flat[:, :size].T, flat[:, :size].to(torch.int8), flat[:2].to("meta")):
            error = failure(span.copy_to, out)
            assert "out must" in str(error), (out.shape, out.stride(), error)
        fill(span)
        assert holds(span)
        meet(span)


def found_by_address(world: World) -> None:
    """An address leads to the open span whose logical bytes hold it, and to no other."""
    spans = OpenSpans.of(world)
    first = Span.allocate(world, (1000,), torch.uint8)
    second = Span.allocate(world, (PAGE + 7,), torch.uint8)
    for span in (first, second):
        for offset in (0, span.nbytes - 1):
            assert spans.find(span.base_address + offset) is span
        assert spans.find(span.base_address + span.nbytes) is not span
        assert spans.find(span.base_address - 1) is not span
    ordinary = torch.zeros(4, device=world.device)
    assert spans.find(ordinary.data_ptr()) is None
    base = first.base_address
    first.close()
    assert spans.find(base) is None
    second.close()
