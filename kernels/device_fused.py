"""The bodies of the device kernels fused_gather, fused_sum and fused_scatter: all in one launch.

Every rank has a GPU of its own, so a kernel may wait for another rank's. Blocks come in pairs. The
first block of a pair, the *stager*, copies a chunk of the input in each round to where the other
ranks can read it, and posts the round's number to the second block, the *reader*, of the same pair
on every rank. A reader waits for that number from the stagers of all ranks, reads what they staged,
and posts the number back to them: their slot is free. The last vectors of a round it stores only
when the next round has come and vectors of that are under way, and it posts at the barrier that
follows. So the link is never idle while something is staged, and pairs need not wait for each
other. A call of more bytes takes several rounds, all in one launch::

    stager:  await "round c - 8 was read", stage c, post "c is staged", c += 1
    reader:  await "c is staged", post "c - 2 was read", load from c, store of c - 1 and c, c += 1

In the end a reader stores the rest and posts the last round. So of the eight slots of a pair six
may be ahead of what is read.

Rounds are counted for each block, in device memory and on through all launches, so that a captured
graph can be replayed. The count's last three bits say which of the pair's eight slots it lies in.

Why no byte is overwritten before it was read (invariant 6). Take round c of a pair.

1. All ranks make the same launches, of the same numbers of pairs and rounds, and a block goes
   through all rounds even if there is nothing to stage. So round c of a pair is the same round of
   the same launch on all ranks. A slot belongs to one pair whatever the shape of the launch:
   nothing but the rounds of this pair has to be looked at.
2. A stager stages round c in the slot of round c - 8, behind its wait for the post of round c - 8
   by the readers of all ranks. A reader posts behind its reads: a thread has what it read when it
   stores it, or what it added up of it, and does so in front of the barrier in front of the post.
   That needs no fence: nothing that happens later can change what was read. It does not matter
   which launches the two rounds are of: the count that is waited for is the same.
3. An output may lie on its own rank's input. A reader writes the output of round c behind its own
   stager's post of round c, so that chunk of the input has been staged. The stager then reads
   later chunks only (and chunk c, if it copies its own part to another place), and no round writes
   where another one's chunk lies. (What fused_scatter does not stage, its own part, the same thread
   of the reader reads and then writes.)

A launch ends without looking whether its last rounds were read by others: who stages in their slots
next will look. Its own rank's output is complete, and its input may be written again, for both
blocks of every pair have ended.

A block that waits in vain until the deadline gives up: it leaves a mark. The other block of its
pair, if it waits, sees the mark and gives up as well, and in later launches neither does anything.
So nothing is staged over what a rank that comes too late still has to read, and since nothing is
posted either, that rank finds out in turn. A stager waits for twice as long: a rank whose reader
does not post may itself wait for a third one, which its readers name by then.

A read over the link takes one or two microseconds, so what is under way decides. A thread reads two
vectors of a gather at once, or all ranks' at one place of a sum, or two ranks' at two, and has the
next ones under way when it stores them. More at once do not help; but a round should be four such
lots or more, for what a block reads while it passes from one to the next is a lot.
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

_NONE = types.uint32(0)
_ONE = types.uint32(1)
_ZERO = types.int32(0)
# Who waits no longer than this many polls, about 10 us, does without the clock, which is slow.
_POLLS_WITHOUT_CLOCK = 32
_MOST_RANKS = 8
_POLLS_PER_LOOK = 32
_CAME, _LATE, _ALONE = types.int32(0), types.int32(1), types.int32(2)
_UNROLLED = 2  # vectors that a thread copies at once
_PLACES = 2  # at which it adds up two ranks' vectors at once
_NUM_SLOTS = types.uint32(8)
_SLOT_BITS = 3
_SLOT_MASK = types.uint32(7)
_MOST_WORDS = 16  # two of every rank


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _pair() -> int:
    """The number of this block's pair."""
    return types.int64(cuda.blockIdx.x) >> 1


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _is_stager() -> bool:
    return (types.int64(cuda.blockIdx.x) & 1) == 0


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _count_of(epochs: int) -> int:
    """Where this block counts its rounds."""
    return epochs + 8 * types.int64(cuda.blockIdx.x)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _mark_of(epochs: int) -> int:
    """Where this block notes that it has given up: beside its count."""
    return _count_of(epochs) + 4


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _other_mark_of(epochs: int) -> int:
    """Where the other block of this pair notes it."""
    return epochs + 8 * (types.int64(cuda.blockIdx.x) ^ 1) + 4


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _has_given_up(epochs: int) -> bool:
    """Whether this block or the other one of its pair did, in an earlier launch."""
    own = ptx.load_count(_mark_of(epochs))
    other = ptx.load_count(_other_mark_of(epochs))
    return (own | other) != _NONE


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _has_come(counter: int, expected: int, seen: Any) -> bool:
    if types.int32(seen[0] - expected) >= _ZERO:
        return True
    seen[0] = ptx.load_acquire(counter)
    return types.int32(seen[0] - expected) >= _ZERO


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _await_count(counter: int, expected: int, other_mark: int, timeout_ns: int, seen: Any) -> int:
    """Wait for a count; say whether it came, was late, or is not to come: the pair gives up."""
    for _ in range(_POLLS_WITHOUT_CLOCK):
        if _has_come(counter, expected, seen):
            return _CAME
    start = ptx.nanoseconds()
    while True:
        for _ in range(_POLLS_PER_LOOK):
            if _has_come(counter, expected, seen):
                return _CAME
        if ptx.load_count(other_mark) != _NONE:
            return _ALONE
        if ptx.nanoseconds() - start > timeout_ns:
            return _LATE


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _post_staged(
    base: int, page_nbytes: int, rank: int, world_size: int, count: int, epochs: int, last: int
) -> None:
    """Stager: tell the readers of this pair, on every rank, that a round is staged."""
    cuda.syncthreads()  # it is, and every thread has read the count
    if types.int64(cuda.threadIdx.x) < world_size:
        # One fence, not a release behind it: that would be a second one of a microsecond.
        ptx.fence_system()
    _post(base, page_nbytes, rank, world_size, count, epochs, last)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _post(
    base: int, page_nbytes: int, rank: int, world_size: int, count: int, epochs: int, last: int
) -> None:
    """Behind a barrier of the block: post a round to the other block of this pair on every rank."""
    peer = types.int64(cuda.threadIdx.x)
    if peer == 0:
        ptx.store_count(_count_of(epochs), last)
    if peer < world_size:
        line = (types.int64(cuda.blockIdx.x) ^ 1) * world_size + rank
        ptx.store_relaxed(base + peer * page_nbytes + line * LINE_NBYTES, count)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _poll(
    base: int,
    page_nbytes: int,
    rank: int,
    world_size: int,
    count: int,
    epochs: int,
    status: int,
    timeout_ns: int,
    seen: Any,
) -> int:
    """Wait for the other block of this pair on all ranks, a thread for each rank.

    The last threads poll: the first ones may still be in the fence of a post.

    Args:
        seen: the latest count that this thread knows of: a round that came early costs nothing.

    Returns:
        1 if this thread has waited in vain.
    """
    peer = types.int64(cuda.blockDim.x) - 1 - types.int64(cuda.threadIdx.x)
    if peer >= world_size:
        return types.int32(0)
    line = types.int64(cuda.blockIdx.x) * world_size + peer
    own = base + rank * page_nbytes + line * LINE_NBYTES
    # Its own rank's blocks may in turn wait for another rank, which they name by then.
    patience_ns = timeout_ns if peer != rank else 4 * timeout_ns
    came = _await_count(own, count, _other_mark_of(epochs), patience_ns, seen)
    if came == _CAME:
        return types.int32(0)
    if came == _LATE:
        ptx.store_release(status + 4 * peer, _ONE)
    ptx.store_count(_mark_of(epochs), _ONE)
    return types.int32(1)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _have_all_come(is_late: int) -> bool:
    """What all threads of the block agree on, and what the others did before is now visible.

    The threads that polled have acquired it, and the barrier hands that on: no fence is needed.
    """
    return cuda.syncthreads_or(is_late) == 0


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _offset_of(turn: int, chunk_nbytes: int) -> int:
    """Where the pair's chunk of a round begins; a round takes consecutive chunks."""
    return (turn * (types.int64(cuda.gridDim.x) >> 1) + _pair()) * chunk_nbytes


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _size_of(turn: int, chunk_nbytes: int, num_rounds: int, nbytes: int) -> int:
    """How many bytes of the pair's chunk of a round there are; none behind the last round."""
    size = max(min(nbytes - _offset_of(turn, chunk_nbytes), chunk_nbytes), 0)
    return size if turn < num_rounds else types.int64(0)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_early(begin: int, size: int, low: Any, high: Any) -> None:
    """This thread's first vectors of a chunk, if it is copied by vectors."""
    is_aligned = ((begin | size) & 15) == 0
    thread = 16 * types.int64(cuda.threadIdx.x)
    _load_group(begin, thread, size if is_aligned else types.int64(0), low, high)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _slot_of(count: int, staging: int, region_nbytes: int, slot_nbytes: int) -> int:
    """Where the first rank's pair stages in the round of this count."""
    slot = types.int64(count & _SLOT_MASK) * (region_nbytes >> _SLOT_BITS)
    return staging + slot + _pair() * slot_nbytes


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_group(source: int, first: int, size: int, low: Any, high: Any) -> None:
    """This thread's next vectors of a chunk, as far as there are so many."""
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
def _copy_aligned(target: int, also: int, source: int, size: int, low: Any, high: Any) -> None:
    """Copy a chunk, all of it a multiple of 16, whose first vectors are loaded already.

    Args:
        also: where a second copy goes; 0 for nowhere.
    """
    offset = 16 * types.int64(cuda.threadIdx.x)
    step = 16 * types.int64(cuda.blockDim.x)
    _store_group(target, offset, size, low, high)
    if also != 0:
        _store_group(also, offset, size, low, high)
    offset += _UNROLLED * step
    more_low = cuda.local.array(_UNROLLED, types.uint64)
    more_high = cuda.local.array(_UNROLLED, types.uint64)
    while offset < size:
        _load_group(source, offset, size, more_low, more_high)
        _store_group(target, offset, size, more_low, more_high)
        if also != 0:
            _store_group(also, offset, size, more_low, more_high)
        offset += _UNROLLED * step


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_row(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    size: int,
    first: int,
    rank: int,
    world_size: int,
    low: Any,
    high: Any,
    to: Any,
) -> None:
    """Load this thread's next vectors of ``size`` bytes of each other rank, and note where to.

    Rank p's are read at ``source + p * source_stride``. All is a multiple of 16. The vectors of all
    ranks stand in one row, the right neighbour's first, and a thread has as many under way
    whatever their number.

    Args:
        first: where in the row the block's next vectors begin.
        to: the addresses; 0 for none.
    """
    per_peer = size >> 4
    num_vectors = per_peer * (world_size - 1)
    item = first + types.int64(cuda.threadIdx.x)
    step = types.int64(cuda.blockDim.x)
    for k in range(_UNROLLED):
        this = item + k * step
        is_there = types.uint32(1) if this < num_vectors else types.uint32(0)
        distance = types.int64(types.uint32(this) // types.uint32(max(per_peer, 1)))
        peer = rank + 1 + distance
        if peer >= world_size:
            peer -= world_size
        offset = 16 * (this - distance * per_peer)
        to[k] = target + peer * target_stride + offset if is_there else types.int64(0)
        vector = ptx.load_vector_if(source + peer * source_stride + offset, is_there)
        low[k] = vector[0]
        high[k] = vector[1]


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _store_row(low: Any, high: Any, to: Any) -> None:
    for k in range(_UNROLLED):
        if to[k] != 0:
            ptx.store_vector(to[k], low[k], high[k])


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _copy_rows(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    size: int,
    rank: int,
    world_size: int,
) -> None:
    """Copy ``size`` bytes for every other rank p, from ``source + p * source_stride``."""
    first = types.int64(0)
    low = cuda.local.array(_UNROLLED, types.uint64)
    high = cuda.local.array(_UNROLLED, types.uint64)
    to = cuda.local.array(_UNROLLED, types.int64)
    while first < (size >> 4) * (world_size - 1):
        _load_row(
            target,
            target_stride,
            source,
            source_stride,
            size,
            first,
            rank,
            world_size,
            low,
            high,
            to,
        )
        _store_row(low, high, to)
        first += _UNROLLED * types.int64(cuda.blockDim.x)


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
    turn = types.int64(0)
    seen = cuda.local.array(1, types.uint32)
    if _is_stager():
        longer_ns = 2 * timeout_ns
        low = cuda.local.array(_UNROLLED, types.uint64)
        high = cuda.local.array(_UNROLLED, types.uint64)
        # The first vectors of a chunk are loaded while the counts are under way.
        size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
        _load_early(source + _offset_of(turn, chunk_nbytes), size, low, high)
        before = ptx.load_count(_count_of(epochs))
        if _has_given_up(epochs):
            return
        last = types.uint32(before + types.uint32(num_rounds))
        seen[0] = types.uint32(before - _NUM_SLOTS)
        while turn < num_rounds:
            count = types.uint32(before + types.uint32(turn) + _ONE)
            free = types.uint32(count - _NUM_SLOTS)
            is_late = _poll(
                base, page_nbytes, rank, world_size, free, epochs, status, longer_ns, seen
            )
            if not _have_all_come(is_late):
                return
            offset = _offset_of(turn, chunk_nbytes)
            size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
            begin = source + offset
            is_aligned = ((begin | size) & 15) == 0
            own = _slot_of(count, staging, region_nbytes, slot_nbytes) + rank * region_nbytes
            to = target + rank * nbytes + offset
            also = to if to != begin and (to & 15) == 0 and is_aligned else types.int64(0)
            if is_aligned:
                _copy_aligned(own, also, begin, size, low, high)
            else:
                _copy_chunk(own, begin, size)
            _post_staged(base, page_nbytes, rank, world_size, count, epochs, last)
            if to != begin and also == 0:
                _copy_chunk(to, begin, size)
            turn += 1
            size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
            _load_early(source + _offset_of(turn, chunk_nbytes), size, low, high)
        return
    before = ptx.load_count(_count_of(epochs))
    if _has_given_up(epochs):
        return
    last = types.uint32(before + types.uint32(num_rounds))
    seen[0] = before
    are_aligned = ((target | nbytes) & 15) == 0
    now_low = cuda.local.array(_UNROLLED, types.uint64)
    now_high = cuda.local.array(_UNROLLED, types.uint64)
    now_to = cuda.local.array(_UNROLLED, types.int64)
    low = cuda.local.array(_UNROLLED, types.uint64)
    high = cuda.local.array(_UNROLLED, types.uint64)
    to = cuda.local.array(_UNROLLED, types.int64)
    for k in range(_UNROLLED):
        now_to[k] = 0
    # What is loaded next: the vectors of a round from ``first`` on. Then those before are stored.
    # So the link has something to carry while the block is between two rounds, too.
    turn, first, num_vectors = types.int64(-1), types.int64(0), types.int64(0)
    count, size, given, begin = before, types.int64(0), types.int64(0), types.int64(0)
    is_over = False
    while True:
        if first >= num_vectors:
            turn += 1
            count = types.uint32(before + types.uint32(turn))
            is_late = types.int32(0)
            if turn < num_rounds:
                is_late = _poll(
                    base,
                    page_nbytes,
                    rank,
                    world_size,
                    types.uint32(count + _ONE),
                    epochs,
                    status,
                    timeout_ns,
                    seen,
                )
            is_over = not _have_all_come(is_late) or turn == num_rounds
            if turn > 1:
                was_read = types.uint32(count - _ONE)
                _post(base, page_nbytes, rank, world_size, was_read, epochs, last)
            first = types.int64(0)
            size = types.int64(0)
            if not is_over:
                size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
            num_vectors = (size >> 4) * (world_size - 1)
            given = _slot_of(types.uint32(count + _ONE), staging, region_nbytes, slot_nbytes)
            begin = target + _offset_of(turn, chunk_nbytes)
        if are_aligned:
            _load_row(
                begin,
                nbytes,
                given,
                region_nbytes,
                size,
                first,
                rank,
                world_size,
                low,
                high,
                to,
            )
            _store_row(now_low, now_high, now_to)
            for k in range(_UNROLLED):
                now_low[k] = low[k]
                now_high[k] = high[k]
                now_to[k] = to[k]
            first += _UNROLLED * types.int64(cuda.blockDim.x)
        else:
            for distance in range(1, world_size):
                peer = rank + distance
                if peer >= world_size:
                    peer -= world_size
                _copy_chunk(begin + peer * nbytes, given + peer * region_nbytes, size)
            first = num_vectors
        if is_over:
            break
    if turn > 0:
        cuda.syncthreads()
        _post(base, page_nbytes, rank, world_size, count, epochs, last)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_words(
    given: int,
    region_nbytes: int,
    mine: int,
    rank: int,
    world_size: int,
    first: int,
    size: int,
    words: Any,
) -> None:
    """This thread's next vectors of every rank: of two ranks at two places, of more at one.

    Args:
        given: where rank 0 has staged; the others lie ``region_nbytes`` apart.
        mine: where this rank's own are read.
        first, size: where the block's next vectors begin, and how many bytes there are.
    """
    place = first + 16 * types.int64(cuda.threadIdx.x)
    if world_size == 2:
        low = mine if rank == 0 else given
        high = mine if rank == 1 else given + region_nbytes
        for k in range(2 * _PLACES):
            at = place + (k >> 1) * 16 * types.int64(cuda.blockDim.x)
            is_there = types.uint32(1) if at < size else types.uint32(0)
            vector = ptx.load_vector_if(at + (high if k & 1 else low), is_there)
            words[2 * k] = vector[0]
            words[2 * k + 1] = vector[1]
    else:
        for peer in range(_MOST_RANKS):
            is_there = types.uint32(1) if peer < world_size and place < size else types.uint32(0)
            begin = mine if peer == rank else given + peer * region_nbytes
            vector = ptx.load_vector_if(begin + place, is_there)
            words[2 * peer] = vector[0]
            words[2 * peer + 1] = vector[1]


def _reduction(load: Any, pack: Any, itemsize: int, is_scatter: bool) -> Any:
    """A kernel body for elements of 2 or 4 bytes; the size is a multiple of 16.

    A sum stages a chunk of the vector, and reads the same chunk of all ranks. A scatter stages a
    chunk of every other rank's part, side by side, and reads its own part's of all ranks.
    """
    width = 8 * itemsize
    per_word = 8 // itemsize

    @cuda.jit(device=True, inline="always")  # type: ignore[misc]
    def add(total: Any, word: int, is_first: bool) -> None:
        for k in range(per_word):
            more = load(_part(word, k, width))
            # Not 0 + first: that would lose the sign of a zero.
            total[k] = more if is_first else total[k] + more

    @cuda.jit(device=True, inline="always")  # type: ignore[misc]
    def add_up(words: Any, to: int, size: int, divisor: int, world_size: int) -> None:
        """Add up what ``_load_words`` has loaded, and store it where there are ``size`` bytes."""
        result = cuda.local.array(2, types.uint64)
        total = cuda.local.array(4, types.float32)
        for k in range(4):
            total[k] = types.float32(0.0)
        place = 16 * types.int64(cuda.threadIdx.x)
        # Loops of known length are unrolled: each place is written once here, to be compiled soon.
        if world_size == 2:
            by = types.float32(1.0) / types.float32(divisor)  # 1 or 2: the product is exact, too
            for k in range(_PLACES):
                for half in range(2):
                    for peer in range(2):
                        add(total, words[4 * k + 2 * peer + half], peer == 0)
                    for each in range(per_word):
                        total[each] = total[each] * by
                    result[half] = pack(total[0], total[1], total[2], total[3])
                at = place + k * 16 * types.int64(cuda.blockDim.x)
                if at < size:
                    _store_result(to + at, result[0], result[1])
        elif place < size:
            for half in range(2):
                for peer in range(_MOST_RANKS):
                    if peer < world_size:
                        add(total, words[2 * peer + half], peer == 0)
                _divide(total, per_word, divisor)
                result[half] = pack(total[0], total[1], total[2], total[3])
            _store_result(to + place, result[0], result[1])

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
        turn = types.int64(0)
        seen = cuda.local.array(1, types.uint32)
        # Whether a scatter's own part is read where it is given.
        is_read_there = is_scatter and (source & 15) == 0
        if _is_stager():
            longer_ns = 2 * timeout_ns
            low = cuda.local.array(_UNROLLED, types.uint64)
            high = cuda.local.array(_UNROLLED, types.uint64)
            if not is_scatter:
                # The first vectors of a chunk are loaded while the counts are under way.
                size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
                _load_early(source + _offset_of(turn, chunk_nbytes), size, low, high)
            before = ptx.load_count(_count_of(epochs))
            if _has_given_up(epochs):
                return
            last = types.uint32(before + types.uint32(num_rounds))
            seen[0] = types.uint32(before - _NUM_SLOTS)
            while turn < num_rounds:
                count = types.uint32(before + types.uint32(turn) + _ONE)
                free = types.uint32(count - _NUM_SLOTS)
                is_late = _poll(
                    base, page_nbytes, rank, world_size, free, epochs, status, longer_ns, seen
                )
                if not _have_all_come(is_late):
                    return
                begin = source + _offset_of(turn, chunk_nbytes)
                size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
                own = _slot_of(count, staging, region_nbytes, slot_nbytes) + rank * region_nbytes
                if is_scatter:
                    if is_read_there:
                        _copy_rows(own, chunk_nbytes, begin, nbytes, size, rank, world_size)
                    else:
                        for peer in range(world_size):
                            _copy_chunk(own + peer * chunk_nbytes, begin + peer * nbytes, size)
                elif ((begin | size) & 15) == 0:
                    _copy_aligned(own, types.int64(0), begin, size, low, high)
                else:
                    _copy_chunk(own, begin, size)
                _post_staged(base, page_nbytes, rank, world_size, count, epochs, last)
                turn += 1
                if not is_scatter:
                    size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
                    _load_early(source + _offset_of(turn, chunk_nbytes), size, low, high)
            return
        before = ptx.load_count(_count_of(epochs))
        if _has_given_up(epochs):
            return
        last = types.uint32(before + types.uint32(num_rounds))
        seen[0] = before
        words = cuda.local.array(_MOST_WORDS, types.uint64)
        now_words = cuda.local.array(_MOST_WORDS, types.uint64)
        for k in range(_MOST_WORDS):
            now_words[k] = types.uint64(0)
        now_to, now_size = types.int64(0), types.int64(0)
        turn, first = types.int64(-1), types.int64(0)
        count, size, given = before, types.int64(0), types.int64(0)
        mine, to = types.int64(0), types.int64(0)
        is_over = False
        # As many bytes as the block adds up at once.
        step = 16 * types.int64(cuda.blockDim.x) * (_PLACES if world_size == 2 else 1)
        while True:
            if first >= size:
                turn += 1
                count = types.uint32(before + types.uint32(turn))
                is_late = types.int32(0)
                if turn < num_rounds:
                    is_late = _poll(
                        base,
                        page_nbytes,
                        rank,
                        world_size,
                        types.uint32(count + _ONE),
                        epochs,
                        status,
                        timeout_ns,
                        seen,
                    )
                is_over = not _have_all_come(is_late) or turn == num_rounds
                if turn > 1:
                    was_read = types.uint32(count - _ONE)
                    _post(base, page_nbytes, rank, world_size, was_read, epochs, last)
                first = types.int64(0)
                size = types.int64(0)
                if not is_over:
                    size = _size_of(turn, chunk_nbytes, num_rounds, nbytes)
                given = _slot_of(types.uint32(count + _ONE), staging, region_nbytes, slot_nbytes)
                if is_scatter:
                    given += rank * chunk_nbytes
                mine = given + rank * region_nbytes
                if is_read_there:
                    mine = source + rank * nbytes + _offset_of(turn, chunk_nbytes)
                to = target + _offset_of(turn, chunk_nbytes)
            _load_words(given, region_nbytes, mine, rank, world_size, first, size, words)
            add_up(now_words, now_to, now_size, divisor, world_size)
            for k in range(_MOST_WORDS):
                now_words[k] = words[k]
            now_to, now_size = to + first, size - first
            first += step
            if is_over:
                break
        if turn > 0:
            cuda.syncthreads()
            _post(base, page_nbytes, rank, world_size, count, epochs, last)

    return body


fused_sum_f32 = _reduction(_from_bits, _pack_f32, 4, False)
fused_sum_bf16 = _reduction(_from_bf16, _pack_bf16, 2, False)
fused_sum_f16 = _reduction(_from_f16, _pack_f16, 2, False)
fused_scatter_f32 = _reduction(_from_bits, _pack_f32, 4, True)
fused_scatter_bf16 = _reduction(_from_bf16, _pack_bf16, 2, True)
fused_scatter_f16 = _reduction(_from_f16, _pack_f16, 2, True)
