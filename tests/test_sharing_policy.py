"""Layouts, trees and messages: arithmetic and text, without a keeper."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpspan.sharing import wire
from tpspan.sharing.layout import MAX_BLOCKS, Entry, PublishedLayout, listed
from tpspan.sharing.tree import flatten, unflatten

PAGE = 2 << 20


def part(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Entry:
    stride = torch.empty(shape, device="meta").stride()
    return Entry((name,), 0, shape, stride, dtype)


@given(
    st.lists(st.integers(0, 3 * PAGE), max_size=8),
    st.sampled_from(["host", "cuda"]),
    st.sampled_from([None, PAGE, 4 * PAGE]),
)
def test_layouts(sizes: list[int], backend: str, block_nbytes: int | None) -> None:
    parts = [part(f"t{i}", size, dtype=torch.uint8) for i, size in enumerate(sizes)]
    layout = PublishedLayout.packed(
        parts, page_nbytes=PAGE, backend=backend, block_nbytes=block_nbytes
    )
    assert layout.span_nbytes % PAGE == 0
    assert layout.nbytes == sum(sizes)
    assert 0 < layout.span_nbytes < sum(sizes) + 256 * len(sizes) + PAGE + 1
    if block_nbytes is None:
        assert len(layout.sizes) <= MAX_BLOCKS[backend]
    assert all(size == layout.sizes[0] for size in layout.sizes[:-1])
    end = 0
    for entry in layout.entries:
        assert entry.offset_bytes >= end
        assert entry.offset_bytes % 256 == 0
        end = entry.offset_bytes + entry.nbytes
        places = layout.places_of(entry.names)
        covered = [
            place
            for place, offset in enumerate(layout.offsets)
            if entry.nbytes and offset < end and entry.offset_bytes < offset + layout.sizes[place]
        ]
        assert list(places) == covered
    assert end <= layout.span_nbytes
    twin = PublishedLayout.decode(layout.encode())
    assert twin == layout
    assert twin.encode() == layout.encode()
    assert layout.differences(parts) == []


def test_many_tensors_make_few_blocks() -> None:
    large = PublishedLayout.packed([part("x", 4 << 30)], page_nbytes=PAGE, backend="cuda")
    assert len(large.sizes) == MAX_BLOCKS["cuda"]
    assert large.sizes[0] == -(-(16 << 30) // (PAGE * MAX_BLOCKS["cuda"])) * PAGE


def test_differences_are_all_named() -> None:
    layout = PublishedLayout.packed(
        [part("a", 2), part("b", 3), part("c", 4), Entry(("d", "e"), 0, (1,), (1,), torch.int8)],
        page_nbytes=PAGE,
        backend="host",
    )
    others = [part("a", 5), part("b", 3, dtype=torch.int32), part("d", 1, dtype=torch.int8)]
    found = layout.differences([*others, part("n", 1)])
    assert found == [
        "a is (5,) torch.float32 and was (2,) torch.float32",
        "b is (3,) torch.int32 and was (3,) torch.float32",
        "c is missing",
        "d is tied to other names",
        "e is missing",
        "n is new",
    ]
    assert listed([str(i) for i in range(30)]).endswith("19; and 10 more")
    with pytest.raises(KeyError):
        layout.places_of(["z"])


plain = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(width=32)
trees = st.recursive(
    plain.filter(lambda value: value == value),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(alphabet="abc", max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_trees_come_back(tree: Any) -> None:
    tensors, skeleton = flatten({"tree": tree, "tensor": torch.ones(2)})
    assert list(tensors) == ["tensor"]
    again = unflatten(skeleton, tensors)
    assert again["tree"] == tree
    assert repr(again["tree"]) == repr(tree), "tuples and lists, integers and text are told apart"
    assert again["tensor"] is tensors["tensor"]


def test_trees_that_cannot_be_published() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="two tensors of the state have the path 'a.b'"):
        flatten({"a": {"b": one}, "a.b": one})
    with pytest.raises(TypeError, match="a.0 is a object"):
        flatten({"a": [object()]})
    with pytest.raises(TypeError, match=r"the key \(1,\) of a"):
        flatten({"a": {(1,): one}})


def test_messages_arrive_as_they_were_sent() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        for num_fds in (0, 1, 64, 65, 130):
            fds = [socket.socket().detach() for _ in range(num_fds)]
            wire.send(left, {"n": num_fds}, b"x" * num_fds, num_fds, fds)
            message, data, count = wire.receive(right)
            assert (message, data, count) == ({"n": num_fds}, b"x" * num_fds, num_fds)
            taken = list(wire.receive_fds(right, count))
            assert len(set(taken)) == num_fds
            for fd in taken:
                socket.socket(fileno=fd).close()
        left.sendall(wire.HEADER.pack(1 << 30, 0, 0))
        with pytest.raises(wire.WireError, match="impossible size"):
            wire.receive(right)
        left.close()
        with pytest.raises(wire.WireError, match="has ended"):
            wire.receive(right)
