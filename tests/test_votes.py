"""Steps that all ranks take or none, and what failures leave alive. Nobody else is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from tpspan.errors import PeerError
from tpspan.launch.votes import Caught, Vote, attempt, settle, together


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Thing:
    """What a step held when it failed, such as a tensor."""


def failing(things: list[weakref.ref[Thing]], make: Callable[[], Exception]) -> Callable[[], None]:
    def step() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise make()

    return step


def test_a_step_that_works_everywhere_returns_its_value() -> None:
    assert together("a step", 0, lambda: 7, lambda vote: [vote, Vote()]) == 7


def test_the_own_error_is_raised_and_keeps_nothing_alive(no_garbage_collection: None) -> None:
    """Invariant 4; a tensor that a traceback kept would hold its span."""
    things: list[weakref.ref[Thing]] = []
    with pytest.raises(OSError, match="full"):
        together("a step", 1, failing(things, lambda: OSError("full")), lambda vote: [Vote(), vote])
    assert things[0]() is None


def test_the_failure_of_others_is_told_and_keeps_nothing_alive(
    no_garbage_collection: None,
) -> None:
    def gather(vote: Vote) -> list[Vote]:
        assert vote == Vote("PeerError: rank 1: is gone", (1,))
        return [vote, Vote("OSError: full", (1,))]

    things: list[weakref.ref[Thing]] = []
    with pytest.raises(PeerError) as caught:
        together("a step", 0, failing(things, lambda: PeerError([1], "is gone")), gather)
    assert caught.value.ranks == (1,)
    assert caught.value.what == "a step failed there and was undone on all ranks: OSError: full"
    assert things[0]() is None


def test_a_failure_that_nobody_admits_is_raised_as_it_is() -> None:
    value, caught, vote = attempt(0, failing([], lambda: PeerError([1], "is gone")))
    assert value is None
    with pytest.raises(PeerError, match="rank 1: is gone"):
        settle("a step", caught, [vote, Vote()])
    assert caught.take() is None


def test_the_outcome_is_said() -> None:
    with pytest.raises(PeerError, match="a step failed there and left a mess: OSError: full"):
        settle("a step", Caught(None), [Vote(), Vote("OSError: full", (1,))], outcome="left a mess")
