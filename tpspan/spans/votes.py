"""A step that all ranks take or none: each takes it, then all say how it went (invariant 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from tpspan.errors import PeerError

T = TypeVar("T")


@dataclass(frozen=True)
class Vote:
    """How a step went on one rank.

    Attributes:
        text: what it raised, or None.
        blamed: the ranks at fault; others than the voter if it only suffered from theirs.
    """

    text: str | None = None
    blamed: tuple[int, ...] = ()


def attempt(rank: int, step: Callable[[], T]) -> tuple[T | None, BaseException | None, Vote]:
    """Take a step; return its value or its error, and this rank's vote."""
    try:
        return step(), None, Vote()
    except BaseException as error:
        blamed = error.ranks if isinstance(error, PeerError) else (rank,)
        return None, error, Vote(f"{type(error).__name__}: {error}", blamed)


def settle(what: str, error: BaseException | None, votes: Sequence[Vote]) -> None:
    """Raise if the step failed on any rank.

    Args:
        what: names the step.
        error: what this rank's own step raised.
        votes: every rank's, by rank.

    Raises:
        PeerError: it failed on other ranks; says what they said.
        BaseException: ``error``, if the fault is this rank's own or nobody admits to it.
    """
    if error is not None and not isinstance(error, PeerError):
        raise error
    failed = {rank: vote for rank, vote in enumerate(votes) if vote.text}
    # Who only suffered from another's failure knows less about it than the other.
    admitted = {rank: vote for rank, vote in failed.items() if rank in vote.blamed}
    if error is not None and not admitted:
        raise error
    told = admitted or failed
    if told:
        ranks = {rank for vote in told.values() for rank in vote.blamed}
        texts = "; ".join(str(vote.text) for vote in told.values())
        raise PeerError(ranks, f"{what} failed there and was undone on all ranks: {texts}")


def together(
    what: str, rank: int, step: Callable[[], T], gather: Callable[[Vote], Sequence[Vote]]
) -> T:
    """Take a step on every rank, and fail on all if it fails on one. Collective.

    The caller undoes its own part when this raises.

    Args:
        gather: gives every rank's vote to every rank.

    Raises:
        As ``settle``.
    """
    value, error, vote = attempt(rank, step)
    settle(what, error, gather(vote))
    return cast(T, value)
