"""Layouts against models that know every byte by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tpspan.spans.copying import rotated
from tpspan.spans.layout import Layout, balanced, pack

pages = st.integers(1, 12)
cuts = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@st.composite
def blocked(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    sizes, page = draw(cuts), draw(pages)
    longest = page * draw(st.integers(1, 5))
    return Layout.blocked(sizes, page_nbytes=page, max_run_nbytes=longest), sizes


@st.composite
def striped(draw: st.DrawFn) -> Layout:
    page = draw(pages)
    return Layout.striped(
        draw(st.integers(0, 200)),
        draw(st.integers(1, 5)),
        stripe_nbytes=page * draw(st.integers(1, 4)),
        page_nbytes=page,
    )


layouts = st.one_of(blocked().map(lambda pair: pair[0]), striped())


def owner_of_each_byte(layout: Layout) -> list[int]:
    return [run.owner for run in layout.runs for _ in range(run.nbytes)]


@given(blocked())
def test_blocked_pages_go_to_the_majority_and_ties_to_the_lowest(
    made: tuple[Layout, list[int]],
) -> None:
    layout, sizes = made
    shard_of = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    assert layout.nbytes == len(shard_of)
    for at in range(0, layout.span_nbytes, layout.page_nbytes):
        votes = Counter(shard_of[at : at + layout.page_nbytes])
        most = max(votes.values())
        expected = min(rank for rank, count in votes.items() if count == most)
        assert layout.owner_of(at) == expected


@given(striped())
def test_stripes_go_round(layout: Layout) -> None:
    for index, run in enumerate(layout.runs):
        assert run.owner == index % layout.world_size
    assert len({run.nbytes for run in layout.runs[:-1]}) <= 1
    for rank in range(layout.world_size):
        assert layout.shard_is_owned(rank)


@given(layouts)
def test_every_byte_has_one_owner_and_one_shard(layout: Layout) -> None:
    """Invariant 1, byte by byte."""
    owners = owner_of_each_byte(layout)
    assert len(owners) == layout.span_nbytes
    assert 0 <= layout.span_nbytes - layout.nbytes < layout.page_nbytes
    assert [layout.owner_of(at) for at in range(layout.span_nbytes)] == owners
    for at in range(0, layout.span_nbytes, layout.page_nbytes):
        assert len(set(owners[at : at + layout.page_nbytes])) == 1
    held = Counter(
        at
        for shard in layout.shards
        for offset, size in shard
        for at in range(offset, offset + size)
    )
    assert held == Counter(range(layout.nbytes))
    for rank in range(layout.world_size):
        assert layout.owned_nbytes(rank) == owners.count(rank)
        shard = {at for offset, size in layout.shards[rank] for at in range(offset, offset + size)}
        assert layout.shard_nbytes(rank) == len(shard)
        owned = {at for at in range(layout.nbytes) if owners[at] == rank}
        assert layout.shard_is_owned(rank) == (shard == owned)


@given(layouts, st.data())
def test_pieces_and_owned_slices_of_any_range(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.span_nbytes))
    nbytes = data.draw(st.integers(0, layout.span_nbytes - start))
    owners = owner_of_each_byte(layout)
    covered: list[int] = []
    for piece in layout.pieces(start, nbytes):
        assert piece.nbytes > 0
        inside = range(piece.offset_bytes, piece.end)
        assert {owners[at] for at in inside} == {piece.owner}
        covered += inside
    assert covered == list(range(start, start + nbytes))
    for rank in range(layout.world_size):
        slices = layout.owned_slices(rank, start, nbytes)
        flat = [at for offset, size in slices for at in range(offset, offset + size)]
        assert flat == [at for at in range(start, start + nbytes) if owners[at] == rank]


@given(blocked())
def test_runs_are_as_long_as_allowed(made: tuple[Layout, list[int]]) -> None:
    layout, _ = made
    longest = max((run.nbytes for run in layout.runs), default=0)
    for run, following in zip(layout.runs, layout.runs[1:], strict=False):
        if run.owner == following.owner:
            assert run.nbytes == longest, "only a run of full length is followed by its owner's"


@given(layouts)
def test_copies_in_rotation_cover_all_and_begin_at_the_neighbour(layout: Layout) -> None:
    everything = sorted(layout.pieces(), key=lambda piece: piece.offset_bytes)
    present = {piece.owner for piece in everything}
    for rank in range(layout.world_size):
        order = rotated(layout, rank)
        assert sorted(order, key=lambda piece: piece.offset_bytes) == everything
        if (rank + 1) % layout.world_size in present:
            assert order[0].owner == (rank + 1) % layout.world_size


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 300))
def test_packed_pieces_are_aligned_and_disjoint(sizes: list[int], alignment: int) -> None:
    offsets, total = pack(sizes, alignment)
    end = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % alignment == 0
        assert 0 <= offset - end < alignment
        end = offset + size
    assert total == end


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_balanced_parts(total: int, num_parts: int) -> None:
    parts = balanced(total, num_parts)
    assert (len(parts), sum(parts)) == (num_parts, total)
    assert max(parts) - min(parts) <= 1
    assert list(parts) == sorted(parts, reverse=True)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1 << 42), min_size=1, max_size=8))
def test_sizes_of_real_spans_take_no_time(sizes: list[int]) -> None:
    page = 2 << 20
    layout = Layout.blocked(sizes, page_nbytes=page)
    assert layout.nbytes == sum(sizes)
    assert all(run.nbytes <= 1 << 30 for run in layout.runs)
    for rank, size in enumerate(sizes):
        assert abs(layout.owned_nbytes(rank) - size) < 2 * page
