"""The bodies of the device kernels fused_gather and fused_sum: stage, meet and read in one launch.

Every rank has a GPU of its own, so a kernel may wait for another rank's. Block b of a rank stages
some chunks, meets block b of every other rank, and reads the same chunks of theirs: blocks need not
wait for each other. The count of meetings is kept in device memory, one for each block, and its
parity says which of two buffers is used, so a captured graph can be replayed.

All launches have the same number of blocks, and each block meets its partners even if it has
nothing to stage. So all counts are equal, and a buffer is written again only two launches later:
by then this rank has met its peers in the launch between, which they began after they had finished
reading (invariant 6).
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.board import LINE_NBYTES
from tpspan.kernels.device_copy import _copy_chunk
from tpspan.kernels.device_reduce import (
    _from_bf16,
    _from_bits,
    _from_f16,
    _part,
    _to_bf16,
    _to_bits,
    _to_f16,
)
from tpspan.kernels.device_signals import _arrives

_ONE = types.uint32(1)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _meet_block(
    base: int,
    page_nbytes: int,
    rank: int,
    world_size: int,
    epoch: int,
    count: int,
    status: int,
    timeout_ns: int,
) -> None:
    """Meet the same block of all ranks; what each wrote before is then visible to all."""
    cuda.syncthreads()  # the block has written its chunks, and every thread has read the count
    peer = types.int64(cuda.threadIdx.x)
    if peer == 0:
        ptx.store_count(epoch, count)
    if peer < world_size and peer != rank:
        ptx.fence_system()
        first = types.int64(cuda.blockIdx.x) * world_size
        ptx.store_release(base + peer * page_nbytes + (first + rank) * LINE_NBYTES, count)
        own = base + rank * page_nbytes + (first + peer) * LINE_NBYTES
        if not _arrives(own, count, timeout_ns):
            ptx.store_release(status + 4 * peer, _ONE)
        ptx.fence_system()
    cuda.syncthreads()


def fused_gather(
    target: int,
    source: int,
    nbytes: int,
    chunk_nbytes: int,
    staging: int,
    region_nbytes: int,
    base: int,
    page_nbytes: int,
    rank: int,
    world_size: int,
    epochs: int,
    status: int,
    timeout_ns: int,
) -> None:
    epoch = epochs + 4 * types.int64(cuda.blockIdx.x)
    count = types.uint32(ptx.load_count(epoch) + _ONE)
    buffer = staging + types.int64(count & _ONE) * (region_nbytes >> 1)
    first = types.int64(cuda.blockIdx.x) * chunk_nbytes
    step = types.int64(cuda.gridDim.x) * chunk_nbytes
    own = buffer + rank * region_nbytes
    offset = first
    while offset < nbytes:
        _copy_chunk(own + offset, source + offset, min(nbytes - offset, chunk_nbytes))
        offset += step
    _meet_block(base, page_nbytes, rank, world_size, epoch, count, status, timeout_ns)
    for distance in range(1, world_size + 1):
        peer = (rank + distance) % world_size
        begin = source if peer == rank else buffer + peer * region_nbytes
        offset = first
        while offset < nbytes:
            to = target + peer * nbytes + offset
            if to != begin + offset:
                _copy_chunk(to, begin + offset, min(nbytes - offset, chunk_nbytes))
            offset += step


def _fused_sum(load: Any, store: Any, itemsize: int) -> Any:
    """A kernel body for elements of 2 or 4 bytes; sizes and addresses are multiples of 16."""
    width = 8 * itemsize
    per_word = 8 // itemsize

    def body(
        target: int,
        source: int,
        nbytes: int,
        chunk_nbytes: int,
        staging: int,
        region_nbytes: int,
        base: int,
        page_nbytes: int,
        rank: int,
        world_size: int,
        divisor: int,
        epochs: int,
        status: int,
        timeout_ns: int,
    ) -> None:
        epoch = epochs + 4 * types.int64(cuda.blockIdx.x)
        count = types.uint32(ptx.load_count(epoch) + _ONE)
        buffer = staging + types.int64(count & _ONE) * (region_nbytes >> 1)
        first = types.int64(cuda.blockIdx.x) * chunk_nbytes
        step = types.int64(cuda.gridDim.x) * chunk_nbytes
        own = buffer + rank * region_nbytes
        offset = first
        while offset < nbytes:
            _copy_chunk(own + offset, source + offset, min(nbytes - offset, chunk_nbytes))
            offset += step
        _meet_block(base, page_nbytes, rank, world_size, epoch, count, status, timeout_ns)
        by = types.float32(divisor)
        total = cuda.local.array(8, types.float32)
        chunk = first
        while chunk < nbytes:
            end = min(chunk + chunk_nbytes, nbytes)
            offset = chunk + 16 * types.int64(cuda.threadIdx.x)
            while offset < end:
                for k in range(2 * per_word):
                    total[k] = types.float32(0.0)
                for peer in range(world_size):
                    vector = ptx.load_vector(buffer + peer * region_nbytes + offset)
                    for k in range(per_word):
                        low = load(_part(vector[0], k, width))
                        high = load(_part(vector[1], k, width))
                        total[k] = low if peer == 0 else total[k] + low
                        total[per_word + k] = high if peer == 0 else total[per_word + k] + high
                low_word = types.uint64(0)
                high_word = types.uint64(0)
                for k in range(per_word):
                    shift = types.uint64(k * width)
                    low_word |= types.uint64(store(total[k] / by)) << shift
                    high_word |= types.uint64(store(total[per_word + k] / by)) << shift
                ptx.store_vector(target + offset, low_word, high_word)
                offset += 16 * types.int64(cuda.blockDim.x)
            chunk += step

    return body


fused_sum_f32 = _fused_sum(_from_bits, _to_bits, 4)
fused_sum_bf16 = _fused_sum(_from_bf16, _to_bf16, 2)
fused_sum_f16 = _fused_sum(_from_f16, _to_f16, 2)
