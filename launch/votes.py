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
        text: what it raised, its type's name first, or None.
        blamed: the ranks at fault; others than the voter if it only suffered from theirs.
    """

    text: str | None = None
    blamed: tuple[int, ...] = ()


class Caught:
    """What a step raised on this rank, if anything, until ``settle`` takes it out.

    A frame that kept the error itself would keep it alive, and be kept alive by it, when it is
    raised through that frame: with it every tensor of the step, until the garbage collector comes.
    """

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def take(self) -> BaseException | None:
        """Return the error, and forget it."""
        error, self._error = self._error, None
        return error


def attempt(rank: int, step: Callable[[], T]) -> tuple[T | None, Caught, Vote]:
    """Take a step; return its value, its error, and this rank's vote."""
    try:
        return step(), Caught(None), Vote()
    except BaseException as error:
        blamed = error.ranks if isinstance(error, PeerError) else (rank,)
        return None, Caught(error), Vote(f"{type(error).__name__}: {error}", blamed)


def settle(
    what: str, caught: Caught, votes: Sequence[Vote], *, outcome: str = "was undone on all ranks"
) -> None:
    """Raise if the step failed on any rank.

    Args:
        what: names the step.
        caught: what this rank's own step raised.
        votes: every rank's, by rank.
        outcome: what the failure leaves behind.

    Raises:
        PeerError: it failed on other ranks; says what they said.
        BaseException: this rank's own error, if the fault is its own or nobody admits to it.
    """
    failed = {rank: vote for rank, vote in enumerate(votes) if vote.text}
    # Who only suffered from another's failure knows less about it than the other.
    admitted = {rank: vote for rank, vote in failed.items() if rank in vote.blamed}
    error = caught.take()
    try:
        if error is not None and not (isinstance(error, PeerError) and admitted):
            raise error
    finally:
        del error
    told = admitted or failed
    if told:
        ranks = {rank for vote in told.values() for rank in vote.blamed}
        texts = "; ".join(str(vote.text) for vote in told.values())
        raise PeerError(ranks, f"{what} failed there and {outcome}: {texts}")


def together(
    what: str, rank: int, step: Callable[[], T], gather: Callable[[Vote], Sequence[Vote]]
) -> T:
    """Collective. Take a step on every rank, and fail on all if it fails on one.

    The caller undoes its own part when this raises.

    Args:
        gather: gives every rank's vote to every rank.

    Raises:
        As ``settle``.
    """
    value, caught, vote = attempt(rank, step)
    settle(what, caught, gather(vote))
    return cast(T, value)
