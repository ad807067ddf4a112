"""A remap as one call: which functions it calls, and how far it comes when one of them fails."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tpspan.errors import DriverError
from tpspan.kernels import host_remap
from tpspan.memory import PAGE_NBYTES, Right

_ADDRESS, _OLD, _NEW, _ACCESS = 1 << 45, 3, 7, 1 << 46
_BAD = 400


class Library:
    """C functions that note what they get; one of them may refuse."""

    def __init__(self, refused: str = "") -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._refused = refused
        self._kept = [self._function("unmap", 2), self._function("map", 5)]
        self._kept.append(self._function("access", 4))
        self.addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept]

    def _function(self, name: str, num: int) -> Any:
        def call(*arguments: int) -> int:
            self.calls.append((name, arguments))
            return _BAD if name == self._refused else 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * num)(call)


def remap(library: Library) -> tuple[int, int]:
    unmap, map_, access = library.addresses
    return host_remap.remap(unmap, map_, access, _ADDRESS, PAGE_NBYTES, _NEW, _ACCESS, num_access=1)


def test_a_remap_is_three_calls() -> None:
    library = Library()
    assert remap(library) == (3, 0)
    assert library.calls == [
        ("unmap", (_ADDRESS, PAGE_NBYTES)),
        ("map", (_ADDRESS, PAGE_NBYTES, 0, _NEW, 0)),
        ("access", (_ADDRESS, PAGE_NBYTES, _ACCESS, 1)),
    ]


@pytest.mark.parametrize(("refused", "num_done"), [("unmap", 0), ("map", 1), ("access", 2)])
def test_a_remap_says_how_far_it_came(refused: str, num_done: int) -> None:
    library = Library(refused)
    assert remap(library) == (num_done, _BAD)
    assert len(library.calls) == num_done + 1


@pytest.mark.parametrize(
    ("refused", "call", "there"),
    [
        ("unmap", "cuMemUnmap", _OLD),
        ("map", "cuMemMap", None),
        ("access", "cuMemSetAccess", _NEW),
        ("", None, _NEW),
    ],
)
def test_the_driver_knows_what_is_mapped(refused: str, call: str | None, there: int | None) -> None:
    """What was mapped last is what a later ``unmap`` must find."""
    driver = pytest.importorskip("tpspan.memory.cuda").CudaDriver
    made: Any = object.__new__(driver)
    library = Library(refused)
    blocks = {handle: SimpleNamespace(nbytes=PAGE_NBYTES, on_host=False) for handle in (_OLD, _NEW)}
    made._blocks, made._mapped = blocks, {_ADDRESS: blocks[_OLD]}
    made._remap_calls, made.remap = tuple(library.addresses), host_remap.remap
    access = SimpleNamespace(getPtr=lambda: _ACCESS)
    made._accesses = {(Right.READ, False): [access]}

    def replace() -> bool:
        done: bool = made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.READ)
        return done

    if call is None:
        assert replace()
    else:
        with pytest.raises(DriverError) as raised:
            replace()
        assert raised.value.call == call
    assert made._mapped.get(_ADDRESS) is (None if there is None else blocks[there])
    assert made.is_mapped(_ADDRESS) == (there is not None)


def test_a_driver_does_nothing_where_the_slow_way_is_needed() -> None:
    driver = pytest.importorskip("tpspan.memory.cuda").CudaDriver
    made: Any = object.__new__(driver)
    here, on_host = (SimpleNamespace(nbytes=PAGE_NBYTES, on_host=is_it) for is_it in (False, True))
    made._blocks, made._mapped = {_NEW: here, _OLD: on_host}, {_ADDRESS: here}
    assert not made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.READ), "numba was not given to it"
    made.remap = host_remap.remap
    assert not made.replace(_ADDRESS, PAGE_NBYTES, _NEW, Right.NONE)
    assert not made.replace(_ADDRESS, PAGE_NBYTES, _OLD, Right.READ)
    assert not made.replace(_ADDRESS + PAGE_NBYTES, PAGE_NBYTES, _NEW, Right.READ)
