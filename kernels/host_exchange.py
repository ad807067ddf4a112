"""One step of a collective on the host: stage, tell all, wait for all, compare; and pulling.

A step writes this rank's bytes into one of its two halves, copies its request beside them, enters
a barrier of the board, and after it looks whether all ranks asked for the same: the comparison
rides on the barrier that the data needs anyway. All of it is one call, since a call from Python
costs as much as a barrier between two cores.

A *place* is a row of 64-bit words that says who this rank is:

=====  ===========================================================================================
word   content
=====  ===========================================================================================
0-4    base, page_nbytes, slot, rank, world_size of the board (tpspan.kernels.board)
5      address of this rank's own count of barriers, 32 bits
6      the count that the barrier under way waits for
7      how often to look before sleeping
8      where in a rank's page the requests lie
9-16   this rank's request
=====  ===========================================================================================
"""

from __future__ import annotations

from numba import types

from tpspan.kernels import atomics
from tpspan.kernels.host_signals import _await_all, _enter

PLACE_WORDS = 17
REQUEST_WORDS = 8
_COUNT = 48
_SPINS = 56
_REQUESTS = 64
_REQUEST = 72
_REQUEST_NBYTES = 8 * REQUEST_WORDS
_ONE_LOOK = 1

ALL_CAME, LATE, DIFFERENT = 0, 1, 2


@atomics.compiled("int64(int64, int64, int64, int64)")
def _finish(place: int, parity: int, timeout_ns: int, num_spins: int) -> int:
    base = atomics.load_int64(place)
    page_nbytes = atomics.load_int64(place + 8)
    slot = atomics.load_int64(place + 16)
    rank = atomics.load_int64(place + 24)
    world_size = atomics.load_int64(place + 32)
    count = types.uint32(atomics.load_int64(place + _COUNT))
    come = _await_all(base, page_nbytes, slot, rank, world_size, count, timeout_ns, num_spins)
    if come < world_size:
        return 1
    first = base + atomics.load_int64(place + _REQUESTS) + parity * _REQUEST_NBYTES
    for peer in range(1, world_size):
        request = first + peer * page_nbytes
        for word in range(REQUEST_WORDS):
            if atomics.load_int64(request + 8 * word) != atomics.load_int64(first + 8 * word):
                return 2
    return 0


@atomics.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _step(
    place: int,
    parity: int,
    target: int,
    source: int,
    head_nbytes: int,
    tail_offset: int,
    tail_nbytes: int,
    keep: int,
    timeout_ns: int,
) -> int:
    base = atomics.load_int64(place)
    page_nbytes = atomics.load_int64(place + 8)
    slot = atomics.load_int64(place + 16)
    rank = atomics.load_int64(place + 24)
    world_size = atomics.load_int64(place + 32)
    epoch = atomics.load_int64(place + 40)
    own = base + rank * page_nbytes + atomics.load_int64(place + _REQUESTS)
    atomics.copy_bytes(own + parity * _REQUEST_NBYTES, place + _REQUEST, _REQUEST_NBYTES)
    if head_nbytes > 0:
        atomics.copy_bytes(target, source, head_nbytes)
    if tail_nbytes > 0:
        atomics.copy_bytes(target + tail_offset, source + tail_offset, tail_nbytes)
    count = _enter(base, page_nbytes, slot, rank, world_size, epoch)
    atomics.store_int64(place + _COUNT, types.int64(count))
    if keep != 0:
        atomics.copy_bytes(keep, source, head_nbytes)
    return _finish(place, parity, timeout_ns, atomics.load_int64(place + _SPINS))


@atomics.compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
) -> None:
    for distance in range(1, world_size):
        peer = (rank + distance) % world_size
        size = min(piece_nbytes, nbytes - peer * piece_nbytes)
        if size > 0:
            atomics.copy_bytes(target + peer * target_stride, source + peer * source_stride, size)


def host_step(
    place: int,
    parity: int,
    target: int,
    source: int,
    head_nbytes: int,
    tail_offset: int,
    tail_nbytes: int,
    keep: int,
    timeout_ns: int,
) -> int:
    """Stage bytes, say so to all ranks, and wait until all have done the same.

    Args:
        place: address of the words above.
        parity: 0 and 1 in turn; which of the two requests of a rank is written.
        target, source: the first ``head_nbytes`` and the ``tail_nbytes`` from ``tail_offset`` are
            copied; what lies between is not.
        keep: copy the head there as well, while waiting; 0 for no.
        timeout_ns: how long to wait.

    Returns:
        ``ALL_CAME``; ``LATE`` if somebody has not come, see ``host_step_again``; or ``DIFFERENT``
        if all came and the requests differ, on every rank alike.
    """
    return _step(
        place, parity, target, source, head_nbytes, tail_offset, tail_nbytes, keep, timeout_ns
    )


def host_step_again(place: int, parity: int, timeout_ns: int) -> int:
    """Go on waiting after ``LATE``; returns as ``host_step`` does."""
    return _finish(place, parity, timeout_ns, _ONE_LOOK)


def host_pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
) -> None:
    """Copy one piece of every other rank, the right neighbour's first: so ranks do not meet.

    Piece p goes from ``source + p * source_stride`` to ``target + p * target_stride``. It has
    ``piece_nbytes``, or what is left of ``nbytes`` when those before it are full.
    """
    _pull(target, target_stride, source, source_stride, piece_nbytes, nbytes, rank, world_size)
