"""The bodies of the device kernels fused_gather and fused_sum: stage, meet and read in one launch.

Every rank has a GPU of its own, so a kernel may wait for another rank's. Block b of a rank stages
some chunks, meets block b of every other rank, and reads the same chunks of theirs: blocks need not
wait for each other. The count of meetings is kept in device memory, one for each block, and its
parity says which of two buffers is used, so a captured graph can be replayed.

All launches have the same number of blocks, and each block meets its partners even if it has
nothing to stage. So all counts are equal, and a buffer is written again only two launches later:
by then this rank has met its peers in the launch between, which they began after they had finished
reading (invariant 6).

A read over the link takes about a microsecond, so what a thread reads at once decides: four vectors
of a gather; of a sum all ranks' at one place, and of two ranks at four places.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.board import LINE_NBYTES
from tpspan.kernels.device_copy import _copy_chunk
from tpspan.kernels.device_ll import _divide, _pack_bf16, _pack_f16, _pack_f32
from tpspan.kernels.device_reduce import _from_bf16, _from_bits, _from_f16, _part
from tpspan.kernels.device_signals import _arrives

_ONE = types.uint32(1)
_ZERO = types.int32(0)
# Who waits no longer than this many polls, about 10 us, does without the clock, which is slow.
_POLLS_WITHOUT_CLOCK = 32
_MOST_RANKS = 8
_UNROLLED = 4
_MOST_WORDS = 16  # two of every rank, or of two ranks at four places


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _comes(counter: int, expected: int, timeout_ns: int) -> bool:
    for _ in range(_POLLS_WITHOUT_CLOCK):
        if types.int32(ptx.load_acquire(counter) - expected) >= _ZERO:
            return True
    return _arrives(counter, expected, timeout_ns)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _post_block(
    base: int, page_nbytes: int, rank: int, world_size: int, epoch: int, count: int
) -> None:
    """Tell the same block of all other ranks that this one has written its chunks."""
    cuda.syncthreads()  # it has, and every thread has read the count
    peer = types.int64(cuda.threadIdx.x)
    if peer == 0:
        ptx.store_count(epoch, count)
    if peer < world_size and peer != rank:
        # One fence, not a release behind it: that would be a second one of a microsecond.
        ptx.fence_system()
        first = types.int64(cuda.blockIdx.x) * world_size
        ptx.store_relaxed(base + peer * page_nbytes + (first + rank) * LINE_NBYTES, count)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _await_blocks(
    base: int,
    page_nbytes: int,
    rank: int,
    world_size: int,
    count: int,
    status: int,
    timeout_ns: int,
) -> None:
    """Wait for the same block of all other ranks; what each wrote before is then visible to all.

    The thread that polls acquires, and the barrier of the block hands that on: no fence is needed.
    """
    peer = types.int64(cuda.threadIdx.x)
    if peer < world_size and peer != rank:
        first = types.int64(cuda.blockIdx.x) * world_size
        own = base + rank * page_nbytes + (first + peer) * LINE_NBYTES
        if not _comes(own, count, timeout_ns):
            ptx.store_release(status + 4 * peer, _ONE)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_group(source: int, first: int, size: int, low: Any, high: Any) -> None:
    """This thread's next four vectors of a chunk, as far as there are so many."""
    step = 16 * types.int64(cuda.blockDim.x)
    for k in range(_UNROLLED):
        offset = first + k * step
        is_there = types.uint32(1) if offset < size else types.uint32(0)
        vector = ptx.load_vector_if(source + offset, is_there)
        low[k] = vector[0]
        high[k] = vector[1]


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _store_group(target: int, first: int, size: int, low: Any, high: Any) -> None:
    step = 16 * types.int64(cuda.blockDim.x)
    for k in range(_UNROLLED):
        offset = first + k * step
        if offset < size:
            ptx.store_vector(target + offset, low[k], high[k])


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_aligned(target: int, source: int, size: int, low: Any, high: Any) -> None:
    """Copy a chunk, all of it a multiple of 16, whose first vectors are loaded already."""
    offset = 16 * types.int64(cuda.threadIdx.x)
    step = 16 * types.int64(cuda.blockDim.x)
    _store_group(target, offset, size, low, high)
    offset += _UNROLLED * step
    more_low = cuda.local.array(_UNROLLED, types.uint64)
    more_high = cuda.local.array(_UNROLLED, types.uint64)
    while offset < size:
        _load_group(source, offset, size, more_low, more_high)
        _store_group(target, offset, size, more_low, more_high)
        offset += _UNROLLED * step


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _read_chunks(
    target: int,
    source: int,
    stride: int,
    nbytes: int,
    size: int,
    rank: int,
    world_size: int,
) -> None:
    """Copy ``size`` bytes of every other rank p, from ``source + p * stride`` to its place.

    All is a multiple of 16. The vectors of all ranks stand in one row, the right neighbour's first,
    and a thread has four under way whatever their number.
    """
    per_peer = size >> 4
    num_vectors = per_peer * (world_size - 1)
    item = types.int64(cuda.threadIdx.x)
    step = types.int64(cuda.blockDim.x)
    low = cuda.local.array(_UNROLLED, types.uint64)
    high = cuda.local.array(_UNROLLED, types.uint64)
    to = cuda.local.array(_UNROLLED, types.int64)
    while item < num_vectors:
        for k in range(_UNROLLED):
            this = item + k * step
            is_there = types.uint32(1) if this < num_vectors else types.uint32(0)
            distance = types.int64(types.uint32(this) // types.uint32(per_peer))
            peer = rank + 1 + distance
            if peer >= world_size:
                peer -= world_size
            offset = 16 * (this - distance * per_peer)
            to[k] = target + peer * nbytes + offset
            vector = ptx.load_vector_if(source + peer * stride + offset, is_there)
            low[k] = vector[0]
            high[k] = vector[1]
        for k in range(_UNROLLED):
            if item + k * step < num_vectors:
                ptx.store_vector(to[k], low[k], high[k])
        item += _UNROLLED * step


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
    # One chunk a block.
    offset = types.int64(cuda.blockIdx.x) * chunk_nbytes
    size = max(min(nbytes - offset, chunk_nbytes), 0)
    begin = source + offset
    low = cuda.local.array(_UNROLLED, types.uint64)
    high = cuda.local.array(_UNROLLED, types.uint64)
    # The count, which says where to, comes while these loads are under way.
    is_aligned = ((begin | size) & 15) == 0
    thread = 16 * types.int64(cuda.threadIdx.x)
    _load_group(begin, thread, size if is_aligned else types.int64(0), low, high)
    epoch = epochs + 4 * types.int64(cuda.blockIdx.x)
    count = types.uint32(ptx.load_count(epoch) + _ONE)
    buffer = staging + types.int64(count & _ONE) * (region_nbytes >> 1)
    own = buffer + rank * region_nbytes + offset
    if is_aligned:
        _copy_aligned(own, begin, size, low, high)
    else:
        _copy_chunk(own, begin, size)
    _post_block(base, page_nbytes, rank, world_size, epoch, count)
    # While the peers' counts are under way.
    to = target + rank * nbytes + offset
    is_there = to == begin
    if is_aligned and not is_there and (to & 15) == 0:
        _copy_aligned(to, begin, size, low, high)
        is_there = True
    _await_blocks(base, page_nbytes, rank, world_size, count, status, timeout_ns)
    are_aligned = ((target | nbytes) & 15) == 0
    if are_aligned:
        staged = buffer + offset
        _read_chunks(target + offset, staged, region_nbytes, nbytes, size, rank, world_size)
    if not (is_there and are_aligned):  # what is left, one after the other
        for distance in range(world_size):
            peer = (rank + distance) % world_size
            given = begin if distance == 0 else buffer + peer * region_nbytes + offset
            if not (is_there if distance == 0 else are_aligned):
                _copy_chunk(target + peer * nbytes + offset, given, size)


def _fused_sum(load: Any, pack: Any, itemsize: int) -> Any:
    """A kernel body for elements of 2 or 4 bytes; sizes and addresses are multiples of 16."""
    width = 8 * itemsize
    per_word = 8 // itemsize

    @cuda.jit(device=True, inline="always")  # type: ignore[misc]
    def add(total: Any, word: int, is_first: bool) -> None:
        for k in range(per_word):
            more = load(_part(word, k, width))
            # Not 0 + first: that would lose the sign of a zero.
            total[k] = more if is_first else total[k] + more

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
        # One chunk a block.
        chunk = types.int64(cuda.blockIdx.x) * chunk_nbytes
        end = min(chunk + chunk_nbytes, nbytes)
        size = max(end - chunk, 0)
        begin = source + chunk
        low = cuda.local.array(_UNROLLED, types.uint64)
        high = cuda.local.array(_UNROLLED, types.uint64)
        # The count, which says where to, comes while these loads are under way.
        is_aligned = ((begin | size) & 15) == 0
        thread = 16 * types.int64(cuda.threadIdx.x)
        _load_group(begin, thread, size if is_aligned else types.int64(0), low, high)
        epoch = epochs + 4 * types.int64(cuda.blockIdx.x)
        count = types.uint32(ptx.load_count(epoch) + _ONE)
        buffer = staging + types.int64(count & _ONE) * (region_nbytes >> 1)
        own = buffer + rank * region_nbytes + chunk
        if is_aligned:
            _copy_aligned(own, begin, size, low, high)
        else:
            _copy_chunk(own, begin, size)
        _post_block(base, page_nbytes, rank, world_size, epoch, count)
        _await_blocks(base, page_nbytes, rank, world_size, count, status, timeout_ns)
        step = 16 * types.int64(cuda.blockDim.x)
        offset = chunk + thread
        words = cuda.local.array(_MOST_WORDS, types.uint64)
        result = cuda.local.array(2, types.uint64)
        total = cuda.local.array(4, types.float32)
        for k in range(4):
            total[k] = types.float32(0.0)
        # Loops of known length are unrolled: each place is written once here, to be compiled soon.
        if world_size == 2:
            by = types.float32(1.0) / types.float32(divisor)  # 1 or 2: the product is exact, too
            while offset < end:
                for k in range(2 * _UNROLLED):
                    place = offset + (k >> 1) * step
                    is_there = types.uint32(1) if place < end else types.uint32(0)
                    vector = ptx.load_vector_if(buffer + (k & 1) * region_nbytes + place, is_there)
                    words[2 * k] = vector[0]
                    words[2 * k + 1] = vector[1]
                for k in range(_UNROLLED):
                    for half in range(2):
                        for peer in range(2):
                            add(total, words[4 * k + 2 * peer + half], peer == 0)
                        for each in range(per_word):
                            total[each] = total[each] * by
                        result[half] = pack(total[0], total[1], total[2], total[3])
                    place = offset + k * step
                    if place < end:
                        ptx.store_vector(target + place, result[0], result[1])
                offset += _UNROLLED * step
        else:
            while offset < end:
                for peer in range(_MOST_RANKS):
                    is_there = types.uint32(1) if peer < world_size else types.uint32(0)
                    place = buffer + peer * region_nbytes + offset
                    vector = ptx.load_vector_if(place, is_there)
                    words[2 * peer] = vector[0]
                    words[2 * peer + 1] = vector[1]
                for half in range(2):
                    for peer in range(_MOST_RANKS):
                        if peer < world_size:
                            add(total, words[2 * peer + half], peer == 0)
                    _divide(total, per_word, divisor)
                    result[half] = pack(total[0], total[1], total[2], total[3])
                ptx.store_vector(target + offset, result[0], result[1])
                offset += step

    return body


fused_sum_f32 = _fused_sum(_from_bits, _pack_f32, 4)
fused_sum_bf16 = _fused_sum(_from_bf16, _pack_bf16, 2)
fused_sum_f16 = _fused_sum(_from_f16, _pack_f16, 2)
