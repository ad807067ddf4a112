"""post, wait and barrier between processes of one host: numba njit over futexes.

The same counters and arguments as the device kernels. A waiter spins briefly, then sleeps in the
kernel. Nobody makes a system call to wake where nobody sleeps: a sleeper first says so, then looks
once more, and a poster first stores, then looks for sleepers, with a full fence between the two on
both sides, so at least one of them sees the other. A barrier makes one such call at most: only
who finds all ranks there wakes the others, and the last one to come always does.
"""

from __future__ import annotations

import os
import time

from numba import types

from tpspan.kernels import atomics
from tpspan.kernels.board import LINE_NBYTES

_SLEEPERS = 4
_BELL = 8
_BELL_SLEEPERS = 12
_ONE = 1
_MINUS_ONE = 0xFFFF_FFFF
# Python handles signals only between two calls, so a long wait is made of short ones.
_SLICE_NS = 100_000_000
# About 20 µs of looking costs no more than going to sleep does, if the other side has a core.
_NUM_SPINS_WITH_CORES = 1000
_NUM_SPINS_WITHOUT = 20
_NUM_CORES = len(os.sched_getaffinity(0))


@atomics.compiled("boolean(int64, uint32)")
def _has_arrived(counter: int, count: int) -> bool:
    return types.int32(atomics.load_acquire(counter) - types.uint32(count)) >= 0


@atomics.compiled("uint32(int64)")
def _advance(own: int) -> int:
    count = types.uint32(atomics.load_acquire(own) + types.uint32(_ONE))
    atomics.store_release(own, count)
    return count


@atomics.compiled("void(int64, int64)")
def _post(counter: int, sent: int) -> None:
    atomics.store_release(counter, _advance(sent))
    atomics.fence()
    if atomics.load_acquire(counter + _SLEEPERS) != 0:
        atomics.futex_wake_all(counter)


@atomics.compiled("boolean(int64, uint32, int64, int64)")
def _await_count(counter: int, count: int, timeout_ns: int, num_spins: int) -> bool:
    for _ in range(num_spins):
        if _has_arrived(counter, count):
            return True
        atomics.pause()
    end = atomics.nanoseconds() + timeout_ns
    while True:
        atomics.add(counter + _SLEEPERS, types.uint32(_ONE))
        atomics.fence()
        seen = atomics.load_acquire(counter)
        left = end - atomics.nanoseconds()
        arrived = types.int32(seen - types.uint32(count)) >= 0
        if not arrived and left > 0:
            atomics.futex_wait(counter, seen, left)
        atomics.add(counter + _SLEEPERS, types.uint32(_MINUS_ONE))
        if arrived:
            return True
        if left <= 0:
            return False


@atomics.compiled("int64(int64, int64, int64, uint32, int64)")
def _num_arrived(own: int, rank: int, world_size: int, count: int, first: int) -> int:
    """How many ranks in a row, from the first one asked about, have come."""
    peer = first
    while peer < world_size:
        if peer != rank and not _has_arrived(own + peer * LINE_NBYTES, count):
            break
        peer += 1
    return peer


@atomics.compiled("uint32(int64, int64, int64, int64, int64, int64)")
def _enter(base: int, page_nbytes: int, slot: int, rank: int, world_size: int, epoch: int) -> int:
    """Say to all ranks that this one has come; if it is the last, wake those who sleep."""
    count = _advance(epoch)
    line = base + slot * world_size * LINE_NBYTES
    for distance in range(1, world_size):
        peer = (rank + distance) % world_size
        atomics.store_release(line + peer * page_nbytes + rank * LINE_NBYTES, count)
    atomics.fence()
    is_last = _num_arrived(line + rank * page_nbytes, rank, world_size, count, 0) == world_size
    if is_last and atomics.load_acquire(line + _BELL_SLEEPERS) != 0:
        atomics.add(line + _BELL, types.uint32(_ONE))
        atomics.futex_wake_all(line + _BELL)
    return count


@atomics.compiled("int64(int64, int64, int64, int64, int64, uint32, int64, int64)")
def _await_all(
    base: int,
    page_nbytes: int,
    slot: int,
    rank: int,
    world_size: int,
    count: int,
    timeout_ns: int,
    num_spins: int,
) -> int:
    """How many ranks in a row have come when all have, or when the time is up."""
    line = base + slot * world_size * LINE_NBYTES
    own = line + rank * page_nbytes
    come = 0
    for _ in range(num_spins):
        come = _num_arrived(own, rank, world_size, count, come)
        if come == world_size:
            return come
        atomics.pause()
    end = atomics.nanoseconds() + timeout_ns
    while True:
        seen = atomics.load_acquire(line + _BELL)
        atomics.add(line + _BELL_SLEEPERS, types.uint32(_ONE))
        atomics.fence()
        come = _num_arrived(own, rank, world_size, count, come)
        left = end - atomics.nanoseconds()
        if come < world_size and left > 0:
            atomics.futex_wait(line + _BELL, seen, left)
        atomics.add(line + _BELL_SLEEPERS, types.uint32(_MINUS_ONE))
        if come == world_size or left <= 0:
            return come


def host_post(counter_address: int, sent_address: int) -> None:
    """Advance this rank's count of sent signals and store it to the receiver's counter.

    Args:
        counter_address: the receiver's counter, in memory that both processes map.
        sent_address: this rank's own count, 32 bits.
    """
    _post(counter_address, sent_address)


def host_has_arrived(counter_address: int, count: int) -> bool:
    """Whether a counter of this rank has come to a count; what was written before is then seen."""
    return bool(_has_arrived(counter_address, count))


def host_wait(
    counter_address: int,
    expected_address: int,
    timeout_s: float,
    *,
    peer: int = 0,
    num_cores: int | None = None,
) -> tuple[int, ...]:
    """Advance this rank's count of expected signals and wait until it has arrived.

    Args:
        counter_address: this rank's own counter.
        expected_address: this rank's own count, 32 bits.
        peer: who is named if the time runs out.
        num_cores: cores that the two ranks have between them; by default those of this process.

    Returns:
        Nothing if it has come, ``(peer,)`` if the time ran out.
    """
    count = _advance(expected_address)
    end = time.monotonic_ns() + int(timeout_s * 1e9)
    num_spins = _num_spins(2, num_cores)
    while not _await_count(counter_address, count, _slice_ns(end), num_spins):
        if time.monotonic_ns() >= end:
            return (peer,)
        num_spins = 1
    return ()


def host_barrier(
    base: int,
    page_nbytes: int,
    slot: int,
    rank: int,
    world_size: int,
    epoch_address: int,
    timeout_s: float,
    *,
    num_cores: int | None = None,
) -> tuple[int, ...]:
    """Wait until all ranks have come here.

    Args:
        base, page_nbytes, slot: where the counters lie, see tpspan.kernels.board.
        epoch_address: this rank's own count, 32 bits.
        num_cores: cores that the ranks have between them; by default those of this process.

    Returns:
        The ranks that had not come when the time ran out; none if all came.
    """
    count = _enter(base, page_nbytes, slot, rank, world_size, epoch_address)
    end = time.monotonic_ns() + int(timeout_s * 1e9)
    num_spins = _num_spins(world_size, num_cores)
    place = (base, page_nbytes, slot, rank, world_size, count)
    while _await_all(*place, _slice_ns(end), num_spins) < world_size:
        if time.monotonic_ns() >= end:
            own = base + rank * page_nbytes + slot * world_size * LINE_NBYTES
            peers = (peer for peer in range(world_size) if peer != rank)
            return tuple(p for p in peers if not _has_arrived(own + p * LINE_NBYTES, count))
        num_spins = 1
    return ()


def _slice_ns(end: int) -> int:
    return max(0, min(end - time.monotonic_ns(), _SLICE_NS))


def _num_spins(num_ranks: int, num_cores: int | None) -> int:
    """Looking pays only where every rank has a core: else it keeps a peer from running."""
    num_cores = _NUM_CORES if num_cores is None else num_cores
    return _NUM_SPINS_WITH_CORES if num_ranks <= num_cores else _NUM_SPINS_WITHOUT
