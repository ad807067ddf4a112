"""What spans hold while they are measured, and whether they do: nothing wrong is ever timed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tpspan.errors import TpspanError
from tpspan.launch.world import World
from tpspan.spans import Board, Span

DTYPE = torch.float32
_PRIME = 8388593  # below 2**24: exact in float32; no two blocks hold the same values
_CHUNK = 4 << 20


class WrongValues(TpspanError):
    """A span or a copy of it did not hold what its owners had written."""


def allocate(world: World, nbytes: int) -> Span:
    """A blocked span of about ``nbytes``, the same number of elements on every rank. Collective."""
    num_each = max(1, nbytes // DTYPE.itemsize // world.world_size)
    return Span.allocate(world, (num_each * world.world_size,), DTYPE)


def expected(start: int, stop: int, salt: int, device: torch.device) -> torch.Tensor:
    """The values of elements ``start`` to ``stop``: every salt and element gives another one."""
    index = torch.arange(start, stop, dtype=torch.int64, device=device)
    return index.add_(salt * 131071).remainder_(_PRIME).to(DTYPE)


def fill(span: Span, salt: int) -> None:
    """Write this rank's shard."""
    local = span.local
    start = span.world.rank * local.numel()
    for at, stop in _chunks(0, local.numel()):
        local[at:stop] = expected(start + at, start + stop, salt, local.device)


def check(span: Span, salt: int, what: str, *, start: int = 0, stop: int | None = None) -> None:
    """Compare elements of all ranks with what their owners wrote, on every rank. Collective.

    Raises:
        WrongValues: here; PeerError on the other ranks.
    """
    gathered = span.gathered
    _compare(span.world, gathered, salt, what, start, gathered.numel() if stop is None else stop)


def check_copy(world: World, copy: torch.Tensor, salt: int, what: str) -> None:
    """``check`` of an ordinary tensor that should hold the whole span's values. Collective."""
    _compare(world, copy, salt, what, 0, copy.numel())


def _compare(
    world: World, found: torch.Tensor, salt: int, what: str, start: int, stop: int
) -> None:
    def compare() -> None:
        for at, end in _chunks(start, stop):
            wrong = found[at:end] != expected(at, end, salt, found.device)
            num_wrong = int(wrong.sum())
            if num_wrong:
                first = at + int(wrong.nonzero()[0])
                raise WrongValues(
                    f"{what}: {num_wrong} of elements {at} to {end} are wrong, the first is "
                    f"element {first}, which is {float(found[first])}"
                )

    Board.of(world).together(f"checking values {what}", compare)


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _CHUNK):
        yield at, min(at + _CHUNK, stop)
