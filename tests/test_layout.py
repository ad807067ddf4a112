"""Layouts by hand: cuts, ties, stripes, longest runs, and what is refused."""

from __future__ import annotations

import pytest

from tpspan.spans.layout import Layout, Run, balanced, pack

P = 10  # a page


def blocked(*sizes: int, longest: int = 1000) -> Layout:
    return Layout.blocked(sizes, page_nbytes=P, max_run_nbytes=longest)


def owners(layout: Layout) -> str:
    """The owner of every page, as digits."""
    return "".join(
        str(layout.owner_of(at)) for at in range(0, layout.span_nbytes, layout.page_nbytes)
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([20, 20], "0011"),
        ([25, 15], "0001"),  # a tie goes to the lower rank
        ([24, 16], "0011"),
        ([26, 14], "0001"),
        ([0, 20], "11"),
        ([20, 0], "00"),
        ([0, 0, 7], "2"),
        ([5, 0, 5], "0"),
        ([4, 3, 3], "0"),
        ([3, 4, 3], "1"),
        ([3, 3, 4], "2"),
        ([1, 1, 1], "0"),
        ([1, 9, 9, 1], "12"),
        ([12, 1, 1, 1, 9], "044"),
        ([0, 0], ""),
        ([1], "0"),
        ([10, 1], "01"),
        ([10, 0, 0, 1], "03"),
    ],
)
def test_a_page_goes_to_who_has_most_of_it(sizes: list[int], expected: str) -> None:
    """Invariant 1: one owner a page, whatever the cut."""
    layout = blocked(*sizes)
    assert owners(layout) == expected
    assert layout.span_nbytes == len(expected) * P
    assert [layout.shard_nbytes(rank) for rank in range(len(sizes))] == sizes
    assert sum(layout.owned_nbytes(rank) for rank in range(len(sizes))) == layout.span_nbytes


def test_a_run_is_a_block_and_long_runs_are_cut() -> None:
    layout = blocked(55, 20, longest=2 * P)
    assert layout.runs == (Run(0, 20, 0), Run(20, 20, 0), Run(40, 20, 0), Run(60, 20, 1))
    layout = blocked(35, 3, 42)
    assert layout.runs == (Run(0, 40, 0), Run(40, 40, 2))
    assert [layout.runs_of(rank) for rank in range(3)] == [
        (Run(0, 40, 0),),
        (),
        (Run(40, 40, 2),),
    ]


def test_shards_keep_their_bytes_on_a_neighbours_page() -> None:
    layout = blocked(18, 7)
    assert layout.shards == (((0, 18),), ((18, 7),))
    assert layout.owned_slices(0) == ((0, 20),)
    assert layout.owned_slices(1) == ((20, 5),)
    assert list(layout.pieces(18, 7)) == [Run(18, 2, 0), Run(20, 5, 1)]
    assert not layout.shard_is_owned(0)
    assert not layout.shard_is_owned(1)
    assert blocked(20, 7).shard_is_owned(1)


def test_stripes_alternate() -> None:
    layout = Layout.striped(75, 3, stripe_nbytes=2 * P, page_nbytes=P)
    assert owners(layout) == "00112200"
    assert layout.runs[-1] == Run(60, 20, 0)
    assert layout.shards == (((0, 20), (60, 15)), ((20, 20),), ((40, 20),))
    assert all(layout.shard_is_owned(rank) for rank in range(3))
    short = Layout.striped(61, 3, stripe_nbytes=2 * P, page_nbytes=P)
    assert short.runs[-1] == Run(60, 10, 0)
    assert Layout.striped(0, 3, stripe_nbytes=P, page_nbytes=P).runs == ()
    assert Layout.striped(5, 3, stripe_nbytes=P, page_nbytes=P).shards == (((0, 5),), (), ())


def test_a_byte_outside_has_no_owner() -> None:
    layout = blocked(15, 10)
    assert layout.owner_of(29) == 1  # padding lies in the last page
    for outside in (-1, 30):
        with pytest.raises(IndexError, match="outside 30 bytes"):
            layout.owner_of(outside)
    for offset, nbytes in ((-1, 5), (25, 6), (31, 0)):
        with pytest.raises(IndexError, match="outside 30 bytes"):
            list(layout.pieces(offset, nbytes))
    assert list(layout.pieces(30, 0)) == []
    assert list(layout.pieces(5, 0)) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layout.blocked([], page_nbytes=P), "at least one rank"),
        (lambda: Layout.blocked([3, -1], page_nbytes=P), "must not be negative"),
        (lambda: Layout.blocked([3], page_nbytes=0), "multiple of the page"),
        (lambda: Layout.blocked([3], page_nbytes=P, max_run_nbytes=15), "multiple of the page"),
        (lambda: Layout.striped(5, 0, stripe_nbytes=P, page_nbytes=P), "at least one rank"),
        (lambda: Layout.striped(-5, 2, stripe_nbytes=P, page_nbytes=P), "must not be negative"),
        (lambda: Layout.striped(5, 2, stripe_nbytes=0, page_nbytes=P), "multiple of the page"),
        (lambda: Layout.striped(5, 2, stripe_nbytes=P + 1, page_nbytes=P), "multiple of the page"),
        (lambda: balanced(-1, 2), "cannot cut"),
        (lambda: balanced(1, 0), "cannot cut"),
        (lambda: pack([-1]), "negative"),
        (lambda: pack([1], alignment=0), "positive"),
    ],
)
def test_what_makes_no_layout(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("runs", "shards", "said"),
    [
        ((Run(0, 10, 0),), (((0, 15),),), "cover 10 of 15"),
        ((Run(0, 10, 0), Run(20, 10, 0)), (((0, 15),),), "does not follow"),
        ((Run(0, 10, 0), Run(0, 10, 0)), (((0, 15),),), "does not follow"),
        ((Run(0, 15, 0),), (((0, 15),),), "whole pages"),
        ((Run(0, 0, 0), Run(0, 20, 0)), (((0, 15),),), "does not follow"),
        ((Run(0, 20, 1),), (((0, 15),),), "no owner"),
        ((Run(0, 20, -1),), (((0, 15),),), "no owner"),
        ((Run(0, 20, 0),), (((0, 14),),), "cover 14 of 15"),
        ((Run(0, 20, 0),), (((0, 16),),), "cover 16 of 15"),
        ((Run(0, 20, 0),), (((0, 5), (4, 11)),), "gap or overlap at byte 5"),
        ((Run(0, 20, 0),), (((0, 5), (6, 9)),), "gap or overlap at byte 5"),
        ((Run(0, 20, 0),), (((0, 15),), ()), "2 shards"),
        ((Run(0, 20, 0),), (((0, 15), (15, 0)),), "gap or overlap"),
    ],
)
def test_a_layout_checks_itself(
    runs: tuple[Run, ...], shards: tuple[tuple[tuple[int, int], ...], ...], said: str
) -> None:
    """Invariant 1: every page has exactly one owner, every byte is in exactly one shard."""
    with pytest.raises(ValueError, match=said):
        Layout(15, 1, P, runs, shards)


def test_packing_and_cutting() -> None:
    assert pack([]) == ((), 0)
    assert pack([1, 256, 0, 3]) == ((0, 256, 512, 512), 515)
    assert pack([5, 5], alignment=1) == ((0, 5), 10)
    assert balanced(10, 4) == (3, 3, 2, 2)
    assert balanced(0, 3) == (0, 0, 0)
    assert balanced(2, 3) == (1, 1, 0)
