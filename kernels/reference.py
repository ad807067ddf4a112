"""What the kernels compute, as plainly as it can be said; the tests compare with this.

The functions take the kernels' own arguments and work on host memory. They do not wait: a count
that has not arrived is reported as missing at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from tpspan.kernels.board import COUNT_MASK, counter_address, has_arrived


def reference_post(counter_address: int, sent_address: int) -> None:
    """Advance the own count and copy it to the receiver's counter."""
    _word(counter_address).value = _advance(sent_address)


def reference_wait(
    counter_address: int, expected_address: int, *, peer: int = 0
) -> tuple[int, ...]:
    """Advance the own count; the peer is missing if its counter is behind."""
    expected = _advance(expected_address)
    return () if has_arrived(_word(counter_address).value, expected) else (peer,)


def reference_barrier(
    base: int, page_nbytes: int, slot: int, rank: int, world_size: int, epoch_address: int
) -> tuple[int, ...]:
    """Advance the own count, tell every peer, and name the peers that have not told as much."""
    epoch = _advance(epoch_address)
    place = (base, page_nbytes, world_size, slot)
    peers = [peer for peer in range(world_size) if peer != rank]
    for peer in peers:
        _word(counter_address(*place, peer, rank)).value = epoch
    counts = {peer: _word(counter_address(*place, rank, peer)).value for peer in peers}
    return tuple(peer for peer, count in counts.items() if not has_arrived(count, epoch))


def reference_gather_copy(
    target_address: int, source_address: int, pieces: Iterable[tuple[int, int, int]]
) -> None:
    """Copy pieces of (source offset, target offset, bytes) one after another."""
    for source, target, nbytes in pieces:
        ctypes.memmove(target_address + target, source_address + source, nbytes)


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _advance(address: int) -> int:
    word = _word(address)
    word.value = (word.value + 1) & COUNT_MASK
    return word.value
