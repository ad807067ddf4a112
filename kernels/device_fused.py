"""The bodies of the device kernels fused_gather and fused_sum: stage, meet and read in one launch.

Every rank has a GPU of its own, so a kernel may wait for another rank's. Block b of a rank stages a
chunk of the input where the others can read it, meets block b of every other rank by a counter, and
reads the chunks that they staged: blocks need not wait for each other. A call of more bytes takes
several rounds of that, all in one launch, and a block stages the chunk of the round after before it
waits for the peers' chunks of this one: ``stage 1, post 1; stage 2, post 2, await 1, read 1; stage
3, post 3, await 2, read 2; ...; await n, read n``.

Rounds are counted for each block, in device memory and on through all launches, so that a captured
graph can be replayed. The count's last two bits say which of the block's four slots it stages in.

Why no byte is overwritten before it was read (invariant 6). Take round c + 1 of block b of rank r.
It is staged where round c - 3 of that block was, which block b of every peer q must have read.

1. All ranks make the same launches, of the same numbers of blocks and rounds, and a block goes
   through all rounds even if it has nothing to stage. So round c of block b is the same round of
   the same launch on all ranks. A slot belongs to one block whatever the shape of the launch:
   nothing but the rounds of block b of the ranks has to be looked at.
2. r stages round c + 1 behind its wait for round c - 1. Within a launch the order above says so. At
   the beginning of a launch it has waited for even more, for launches of a rank follow each other,
   and each ends with a wait for its last round: the first round of a launch has c awaited, the
   second c - 1.
3. q posts round c - 1 behind its reads of round c - 3. Within a launch these are the reads of the
   step before; if round c - 1 is the first or the second one of a launch, round c - 3 was read in
   an earlier launch, which has ended. What the threads of a block have read is behind them when
   they come to the barrier in front of the post; the post's fence and the wait's acquire hand that
   on to r.

Three slots would not do: round c - 2 may still be read when c + 1 is staged. A rank reads its own
slots, too, but its block goes through barriers between any read and the next write.

A peer that does not come before the deadline ends the block, which leaves a mark and does nothing
in later launches: it neither stages again, so a peer that comes too late reads what it should, nor
posts, so that the peer in turn finds out.

A read over the link takes one or two microseconds, so what a thread reads at once decides: four
vectors of a gather; of a sum all ranks' at one place, and of two ranks at four places.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.board import LINE_NBYTES
from tpspan.kernels.device_copy import _copy_chunk
from tpspan.kernels.device_ll import (
    _divide,
    _pack_bf16,
    _pack_f16,
    _pack_f32,
    _store_piece,
)
from tpspan.kernels.device_reduce import _from_bf16, _from_bits, _from_f16, _part
from tpspan.kernels.device_signals import _arrives

_NONE = types.uint32(0)
_ONE = types.uint32(1)
_ZERO = types.int32(0)
# Who waits no longer than this many polls, about 10 us, does without the clock, which is slow.
_POLLS_WITHOUT_CLOCK = 32
_MOST_RANKS = 8
_UNROLLED = 4
_SLOT_MASK = types.uint32(3)  # four slots
_MOST_WORDS = 16  # two of every rank, or of two ranks at four places


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _comes(counter: int, expected: int, timeout_ns: int) -> bool:
    for _ in range(_POLLS_WITHOUT_CLOCK):
        if types.int32(ptx.load_acquire(counter) - expected) >= _ZERO:
            return True
    return _arrives(counter, expected, timeout_ns)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _post_block(
    base: int, page_nbytes: int, rank: int, world_size: int, count: int, epoch: int, last: int
) -> None:
    """Tell the same block of all other ranks that this one has written its chunk."""
    cuda.syncthreads()  # it has, and every thread has read the count, and the chunks of before
    peer = types.int64(cuda.threadIdx.x)
    if peer == 0:
        ptx.store_count(epoch, last)
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
    epoch: int,
    status: int,
    timeout_ns: int,
) -> bool:
    """Wait for the same block of all other ranks; what each wrote before is then visible to all.

    The thread that polls acquires, and the barrier of the block hands that on: no fence is needed.
    The last threads poll: the first ones may still be in the fence of their post. Returns whether
    all have come, which the threads of a block agree on.
    """
    peer = types.int64(cuda.blockDim.x) - 1 - types.int64(cuda.threadIdx.x)
    is_late = types.int32(0)
    if peer < world_size and peer != rank:
        first = types.int64(cuda.blockIdx.x) * world_size
        own = base + rank * page_nbytes + (first + peer) * LINE_NBYTES
        if not _comes(own, count, timeout_ns):
            ptx.store_release(status + 4 * peer, _ONE)
            ptx.store_count(_mark_of(epoch), _ONE)
            is_late = types.int32(1)
    return cuda.syncthreads_or(is_late) == 0


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _mark_of(epoch: int) -> int:
    """Where the block notes that it has given up: beside its count."""
    return epoch + 4


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _offset_of(turn: int, chunk_nbytes: int) -> int:
    """Where the block's chunk of a round begins; a round takes consecutive chunks."""
    return (turn * cuda.gridDim.x + cuda.blockIdx.x) * chunk_nbytes


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _size_of(turn: int, chunk_nbytes: int, num_rounds: int, nbytes: int) -> int:
    """How many bytes of the block's chunk of a round there are; none behind the last round."""
    size = max(min(nbytes - _offset_of(turn, chunk_nbytes), chunk_nbytes), 0)
    return size if turn < num_rounds else types.int64(0)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_early(begin: int, size: int, low: Any, high: Any) -> None:
    """This thread's first four vectors of a chunk, if it is copied by vectors."""
    is_aligned = ((begin | size) & 15) == 0
    thread = 16 * types.int64(cuda.threadIdx.x)
    _load_group(begin, thread, size if is_aligned else types.int64(0), low, high)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _slot_of(count: int, staging: int, region_nbytes: int, slot_nbytes: int) -> int:
    """Where the first rank's block stages in the round of this count: a quarter for each slot."""
    quarter = types.int64(count & _SLOT_MASK) * (region_nbytes >> 2)
    return staging + quarter + cuda.blockIdx.x * slot_nbytes


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


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _store_result(address: int, low: int, high: int) -> None:
    """Sixteen bytes to any address."""
    if (address & 15) == 0:
        ptx.store_vector(address, low, high)
    else:
        _store_piece(address, low, types.int64(8))
        _store_piece(address + 8, high, types.int64(8))


def fused_gather(
    target: int,
    source: int,
    nbytes: int,
    chunk_nbytes: int,
    num_rounds: int,
    staging: int,
    region_nbytes: int,
    slot_nbytes: int,
    base: int,
    page_nbytes: int,
    rank: int,
    world_size: int,
    epochs: int,
    status: int,
    timeout_ns: int,
) -> None:
    epoch = epochs + 8 * types.int64(cuda.blockIdx.x)
    are_aligned = ((target | nbytes) & 15) == 0
    low = cuda.local.array(_UNROLLED, types.uint64)
    high = cuda.local.array(_UNROLLED, types.uint64)
    # The first vectors of a chunk are loaded a round early, and here while the count, which says
    # where to, is under way.
    turn = types.int64(0)
    begin = source + _offset_of(turn, chunk_nbytes)
    _load_early(begin, _size_of(turn, chunk_nbytes, num_rounds, nbytes), low, high)
    before = ptx.load_count(epoch)
    if ptx.load_count(_mark_of(epoch)) != _NONE:
        return
    last = types.uint32(before + types.uint32(num_rounds))
    while turn <= num_rounds:
        if turn < num_rounds:
            count = types.uint32(before + types.uint32(turn) + _ONE)
            offset = _offset_of(turn, chunk_nbytes)
            size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
            begin = source + offset
            is_aligned = ((begin | size) & 15) == 0
            own = _slot_of(count, staging, region_nbytes, slot_nbytes) + rank * region_nbytes
            if is_aligned:
                _copy_aligned(own, begin, size, low, high)
            else:
                _copy_chunk(own, begin, size)
            _post_block(base, page_nbytes, rank, world_size, count, epoch, last)
            # While the peers' counts are under way.
            to = target + rank * nbytes + offset
            if is_aligned and (to & 15) == 0 and to != begin:
                _copy_aligned(to, begin, size, low, high)
            begin = source + _offset_of(turn + 1, chunk_nbytes)
            _load_early(begin, _size_of(turn + 1, chunk_nbytes, num_rounds, nbytes), low, high)
        if turn > 0:
            count = types.uint32(before + types.uint32(turn))
            if not _await_blocks(
                base, page_nbytes, rank, world_size, count, epoch, status, timeout_ns
            ):
                return
            given = _slot_of(count, staging, region_nbytes, slot_nbytes)
            there = _offset_of(turn - 1, chunk_nbytes)
            length = _size_of(turn - 1, chunk_nbytes, num_rounds, nbytes)
            if are_aligned:
                to = target + there
                _read_chunks(to, given, region_nbytes, nbytes, length, rank, world_size)
            begin = source + there
            to = target + rank * nbytes + there
            is_there = to == begin or ((begin | to | length) & 15) == 0
            if not (is_there and are_aligned):  # what is left, one after the other
                for distance in range(world_size):
                    peer = rank + distance
                    if peer >= world_size:
                        peer -= world_size
                    where = begin if distance == 0 else given + peer * region_nbytes
                    if not (is_there if distance == 0 else are_aligned):
                        _copy_chunk(target + peer * nbytes + there, where, length)
        turn += 1


def _fused_sum(load: Any, pack: Any, itemsize: int) -> Any:
    """A kernel body for elements of 2 or 4 bytes; the size is a multiple of 16."""
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
        num_rounds: int,
        staging: int,
        region_nbytes: int,
        slot_nbytes: int,
        base: int,
        page_nbytes: int,
        rank: int,
        world_size: int,
        divisor: int,
        epochs: int,
        status: int,
        timeout_ns: int,
    ) -> None:
        epoch = epochs + 8 * types.int64(cuda.blockIdx.x)
        thread = 16 * types.int64(cuda.threadIdx.x)
        step = 16 * types.int64(cuda.blockDim.x)
        low = cuda.local.array(_UNROLLED, types.uint64)
        high = cuda.local.array(_UNROLLED, types.uint64)
        # The first vectors of a chunk are loaded a round early, and here while the count, which
        # says where to, is under way.
        turn = types.int64(0)
        begin = source + _offset_of(turn, chunk_nbytes)
        _load_early(begin, _size_of(turn, chunk_nbytes, num_rounds, nbytes), low, high)
        before = ptx.load_count(epoch)
        if ptx.load_count(_mark_of(epoch)) != _NONE:
            return
        last = types.uint32(before + types.uint32(num_rounds))
        words = cuda.local.array(_MOST_WORDS, types.uint64)
        result = cuda.local.array(2, types.uint64)
        total = cuda.local.array(4, types.float32)
        for k in range(4):
            total[k] = types.float32(0.0)
        while turn <= num_rounds:
            if turn < num_rounds:
                count = types.uint32(before + types.uint32(turn) + _ONE)
                begin = source + _offset_of(turn, chunk_nbytes)
                size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
                own = _slot_of(count, staging, region_nbytes, slot_nbytes) + rank * region_nbytes
                if ((begin | size) & 15) == 0:
                    _copy_aligned(own, begin, size, low, high)
                else:
                    _copy_chunk(own, begin, size)
                _post_block(base, page_nbytes, rank, world_size, count, epoch, last)
                begin = source + _offset_of(turn + 1, chunk_nbytes)
                _load_early(begin, _size_of(turn + 1, chunk_nbytes, num_rounds, nbytes), low, high)
            if turn > 0:
                count = types.uint32(before + types.uint32(turn))
                if not _await_blocks(
                    base, page_nbytes, rank, world_size, count, epoch, status, timeout_ns
                ):
                    return
                given = _slot_of(count, staging, region_nbytes, slot_nbytes)
                end = _size_of(turn - 1, chunk_nbytes, num_rounds, nbytes)
                to = target + _offset_of(turn - 1, chunk_nbytes)
                offset = thread
                # Loops of known length are unrolled: each place is written once here, to be
                # compiled soon.
                if world_size == 2:
                    # 1 or 2: the product is exact, too
                    by = types.float32(1.0) / types.float32(divisor)
                    while offset < end:
                        for k in range(2 * _UNROLLED):
                            place = offset + (k >> 1) * step
                            is_there = types.uint32(1) if place < end else types.uint32(0)
                            place += given + (k & 1) * region_nbytes
                            vector = ptx.load_vector_if(place, is_there)
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
                                _store_result(to + place, result[0], result[1])
                        offset += _UNROLLED * step
                else:
                    while offset < end:
                        for peer in range(_MOST_RANKS):
                            is_there = types.uint32(1) if peer < world_size else types.uint32(0)
                            place = given + peer * region_nbytes + offset
                            vector = ptx.load_vector_if(place, is_there)
                            words[2 * peer] = vector[0]
                            words[2 * peer + 1] = vector[1]
                        for half in range(2):
                            for peer in range(_MOST_RANKS):
                                if peer < world_size:
                                    add(total, words[2 * peer + half], peer == 0)
                            _divide(total, per_word, divisor)
                            result[half] = pack(total[0], total[1], total[2], total[3])
                        _store_result(to + offset, result[0], result[1])
                        offset += step
            turn += 1

    return body


fused_sum_f32 = _fused_sum(_from_bits, _pack_f32, 4)
fused_sum_bf16 = _fused_sum(_from_bf16, _pack_bf16, 2)
fused_sum_f16 = _fused_sum(_from_f16, _pack_f16, 2)
