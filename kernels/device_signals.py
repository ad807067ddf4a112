"""The bodies of the device kernels post, wait and barrier, in numba over plain addresses.

A sender's or receiver's own count is kept in device memory and advanced by the kernel: a count
passed as an argument would be frozen into a captured graph.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.board import LINE_NBYTES

_ONE = types.uint32(1)
_ZERO = types.int32(0)
# The clock is slow to read and ticks in steps: look at it once in this many polls.
_POLLS_PER_LOOK = 32


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _arrives(counter: int, expected: int, timeout_ns: int) -> bool:
    start = ptx.nanoseconds()
    while True:
        for _ in range(_POLLS_PER_LOOK):
            if types.int32(ptx.load_acquire(counter) - expected) >= _ZERO:
                return True
        if ptx.nanoseconds() - start > timeout_ns:
            return False


def post(counter: int, sent: int) -> None:
    count = types.uint32(ptx.load_count(sent) + _ONE)
    ptx.store_count(sent, count)
    ptx.fence_system()
    ptx.store_release(counter, count)


def wait(counter: int, expected: int, status: int, timeout_ns: int) -> None:
    count = types.uint32(ptx.load_count(expected) + _ONE)
    ptx.store_count(expected, count)
    if not _arrives(counter, count, timeout_ns):
        ptx.store_release(status, _ONE)
    ptx.fence_system()


def barrier(
    base: int,
    page_nbytes: int,
    slot: int,
    rank: int,
    world_size: int,
    epoch: int,
    status: int,
    timeout_ns: int,
) -> None:
    peer = types.int64(cuda.threadIdx.x)
    count = types.uint32(ptx.load_count(epoch) + _ONE)
    cuda.syncthreads()  # every thread has read the epoch before it advances
    if peer == 0:
        ptx.store_count(epoch, count)
    if peer < world_size and peer != rank:
        ptx.fence_system()
        first = slot * world_size
        ptx.store_release(base + peer * page_nbytes + (first + rank) * LINE_NBYTES, count)
        own = base + rank * page_nbytes + (first + peer) * LINE_NBYTES
        if not _arrives(own, count, timeout_ns):
            ptx.store_release(status + 4 * peer, _ONE)
        ptx.fence_system()
