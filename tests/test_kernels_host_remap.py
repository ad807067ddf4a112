"""A remap as one call: which functions it calls, and how far it comes when one of them fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tpspan.errors import DriverError
from tpspan.kernels import host_remap
from tpspan.memory import PAGE_NBYTES, Right

_ADDRESS, _OLD, _NEW, _ACCESS = 1 << 45, 3, 7, 1 << 46
_BAD = 400


class Library:
    """C functions that note what they get and refuse what they are told to."""

    def __init__(self, *refused: tuple[str, int]) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._refused = refused
        self._kept = [self._function("unmap", 2), self._function("map", 5)]
        self._kept.append(self._function("access", 4))
        self.addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept]

    def _function(self, name: str, num: int) -> Any:
        def call(*arguments: int) -> int:
            self.calls.append((name, arguments))
            handle = arguments[3] if name == "map" else 0
            return _BAD if (name, handle) in self._refused else 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * num)(call)


def remap(library: Library) -> tuple[int, ...]:
    unmap, map_, access = library.addresses
    return host_remap.remap(
        unmap, map_, access, _ADDRESS, PAGE_NBYTES, _OLD, _NEW, _ACCESS, num_access=1
    )


def test_a_remap_is_three_calls() -> None:
    library = Library()
    assert remap(library) == (3, 0, 0)
    assert library.calls == [
        ("unmap", (_ADDRESS, PAGE_NBYTES)),
        ("map", (_ADDRESS, PAGE_NBYTES, 0, _NEW, 0)),
        ("access", (_ADDRESS, PAGE_NBYTES, _ACCESS, 1)),
    ]


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        ([("unmap", 0)], (0, _BAD, 1)),
        ([("map", _NEW)], (1, _BAD, 1)),
        ([("map", _NEW), ("map", _OLD)], (1, _BAD, 0)),
        ([("access", 0)], (2, _BAD, 0)),
    ],
)
def test_a_remap_says_how_far_it_came(
    refused: list[tuple[str, int]], found: tuple[int, int, int]
) -> None:
    assert remap(Library(*refused)) == found


@pytest.mark.parametrize(
    ("refused", "call", "there"),
    [
        ([("unmap", 0)], "cuMemUnmap", _OLD),
        ([("map", _NEW)], "cuMemMap", _OLD),
        ([("map", _NEW), ("map", _OLD)], "cuMemMap", None),
        ([("access", 0)], "cuMemSetAccess", _NEW),
        ([], None, _NEW),
    ],
)
def test_the_driver_knows_what_is_mapped(
    refused: list[tuple[str, int]], call: str | None, there: int | None
) -> None:
    """What was mapped last is what a later ``unmap`` must find."""
    driver = pytest.importorskip("tpspan.memory.cuda").CudaDriver
    made: Any = object.__new__(driver)
    library = Library(*refused)
    block = SimpleNamespace(nbytes=PAGE_NBYTES, on_host=False)
    made._blocks = {_OLD: block, _NEW: block}
    made._mapped, made._handles = {_ADDRESS: block}, {_ADDRESS: _OLD}
    made._remap_calls, made.remap = tuple(library.addresses), host_remap.remap
    access = SimpleNamespace(getPtr=lambda: _ACCESS)
    made._accesses = {(Right.READ, False): [access]}

    def replace() -> bool:
        done: bool = made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.READ)
        return done

    if call is None:
        assert replace()
    else:
        assert refusal(replace).call == call
    assert made._handles == ({} if there is None else {_ADDRESS: there})
    assert set(made._mapped) == set(made._handles)
    assert not made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.NONE), "the slow way does that"
    made.remap = None
    assert not made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.READ)


def refusal(call: Callable[[], object]) -> DriverError:
    with pytest.raises(DriverError) as raised:
        call()
    return raised.value
