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

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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

# memcpy itself passes the caches by from about 1 MiB on; what peers read next should stay there.
_PIECE_NBYTES = 128 << 10
_VECTOR_NBYTES = 32
_UNROLLED_NBYTES = 4 * _VECTOR_NBYTES
_VECTOR = ir.VectorType(ir.IntType(64), 4)

ALL_CAME, LATE, DIFFERENT = 0, 1, 2

Emit = Callable[[Any, Any, Any, Any], Any]


@intrinsic  # type: ignore[misc]
def _move_past_caches(typing: Any, target: Any, source: Any) -> tuple[Any, Emit]:
    """32 bytes to an address that is a multiple of 32, without reading its line first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target_value, source_value = (
            builder.inttoptr(value, _VECTOR.as_pointer()) for value in arguments
        )
        loaded = builder.load(source_value)
        loaded.align = 1
        stored = builder.store(loaded, target_value)
        stored.align = _VECTOR_NBYTES
        one = ir.Constant(ir.IntType(32), 1)
        stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@atomics.compiled("void(int64, int64, int64)")
def _copy_cached(target: int, source: int, nbytes: int) -> None:
    at = 0
    while at < nbytes:
        size = min(nbytes - at, _PIECE_NBYTES)
        atomics.copy_bytes(target + at, source + at, size)
        at += size


@atomics.compiled("void(int64, int64, int64)")
def _copy_past_caches(target: int, source: int, nbytes: int) -> None:
    """For what is larger than the caches: writing it through them would read it first."""
    head = min((-target) & (_VECTOR_NBYTES - 1), nbytes)
    atomics.copy_bytes(target, source, head)
    at = head
    while at + _UNROLLED_NBYTES <= nbytes:
        _move_past_caches(target + at, source + at)
        _move_past_caches(target + at + 32, source + at + 32)
        _move_past_caches(target + at + 64, source + at + 64)
        _move_past_caches(target + at + 96, source + at + 96)
        at += _UNROLLED_NBYTES
    atomics.copy_bytes(target + at, source + at, nbytes - at)
    atomics.fence()  # such stores are ordered with nothing else


@atomics.compiled("void(int64, int64, int64, boolean)")
def _copy(target: int, source: int, nbytes: int, past_caches: bool) -> None:
    if past_caches:
        _copy_past_caches(target, source, nbytes)
    else:
        _copy_cached(target, source, nbytes)


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


@atomics.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)")
def _step(
    place: int,
    parity: int,
    target: int,
    source: int,
    head_nbytes: int,
    tail_offset: int,
    tail_nbytes: int,
    keep: int,
    past_caches: bool,
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
        _copy_cached(target, source, head_nbytes)
    if tail_nbytes > 0:
        _copy_cached(target + tail_offset, source + tail_offset, tail_nbytes)
    count = _enter(base, page_nbytes, slot, rank, world_size, epoch)
    atomics.store_int64(place + _COUNT, types.int64(count))
    if keep != 0:
        _copy(keep, source, head_nbytes, past_caches)
    return _finish(place, parity, timeout_ns, atomics.load_int64(place + _SPINS))


@atomics.compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, boolean)")
def _pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
    past_caches: bool = False,
) -> None:
    for distance in range(1, world_size):
        peer = (rank + distance) % world_size
        size = min(piece_nbytes, nbytes - peer * piece_nbytes)
        if size > 0:
            _copy(target + peer * target_stride, source + peer * source_stride, size, past_caches)


def host_step(
    place: int,
    parity: int,
    target: int,
    source: int,
    head_nbytes: int,
    tail_offset: int,
    tail_nbytes: int,
    keep: int,
    past_caches: bool,
    timeout_ns: int,
) -> int:
    """Stage bytes, say so to all ranks, and wait until all have done the same.

    Args:
        place: address of the words above.
        parity: 0 and 1 in turn; which of the two requests of a rank is written.
        target, source: the first ``head_nbytes`` and the ``tail_nbytes`` from ``tail_offset`` are
            copied; what lies between is not.
        keep: copy the head there as well, while waiting; 0 for no.
        past_caches: for ``keep``: see ``host_pull``.
        timeout_ns: how long to wait.

    Returns:
        ``ALL_CAME``; ``LATE`` if somebody has not come, see ``host_step_again``; or ``DIFFERENT``
        if all came and the requests differ, on every rank alike.
    """
    return _step(
        place,
        parity,
        target,
        source,
        head_nbytes,
        tail_offset,
        tail_nbytes,
        keep,
        past_caches,
        timeout_ns,
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
    past_caches: bool = False,
) -> None:
    """Copy one piece of every other rank, the right neighbour's first: so ranks do not meet.

    Piece p goes from ``source + p * source_stride`` to ``target + p * target_stride``. It has
    ``piece_nbytes``, or what is left of ``nbytes`` when those before it are full.

    Args:
        past_caches: write without reading the target first: for what is larger than the caches.
    """
    _pull(
        target,
        target_stride,
        source,
        source_stride,
        piece_nbytes,
        nbytes,
        rank,
        world_size,
        past_caches,
    )
