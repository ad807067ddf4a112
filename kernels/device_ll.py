"""The bodies of the device kernels ll_gather and ll_sum: few bytes, in words that carry a flag.

Every rank has a GPU of its own. Eight bytes of data travel as sixteen: two words, each of four
bytes of data and a 32-bit flag. Block b of a rank stores its words straight into the memory of
every other rank, then polls its own memory until words with the flag of this launch are there. No
fence, no counter, and nothing is read over the link.

Why a word is whole. Words are stored and loaded as vectors of two aligned 64-bit words, relaxed and
of system scope. To PTX's memory model a vector is its elements, in no order, and each is an access
of its own that is never split. So whoever sees the flag sees the data beside it, and need not know
anything about another word: nothing has to be ordered, and a relaxed access is enough.

Why no word is overwritten before it was read (invariant 6). The flag of a launch is its number,
which each block counts in device memory, so that a graph can be replayed. The number's parity says
which of two slots a block's words go to. Take a word that rank r's block b stores into rank q's
memory in launch n. The next word stored there is of launch n + 2 at the earliest:

1. In launch n + 1 block b of r has seen a word of launch n + 1 from block b of q: all launches have
   the same number of blocks, and a block without data sends one word of zeros.
2. Block b of q began launch n + 1 after q's launch n had ended, for they are on one stream: all
   its words of launch n had been polled by then.
3. A block polls every word that is sent to it, those without data too. So all stores of launch n
   had arrived when launch n + 1 of q began: none is left that could overtake a later one.

Only launches of these kernels take part: they have slots and counts of their own, so any other
kernels may run between them.

Why a flag is not mistaken. A word holds the flag of the last launch that stored it, of this parity.
A slot's far end may be left alone for long, while the number goes once around all 2**32. Therefore
the last two launches of every 2**30, one of each parity, fill the slots whatever their size, and no
flag is ever older than that. Memory begins as zeros, and so do the counts: the first launch is
number 1, and the number 0 comes behind two that filled the slots.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpspan.kernels import ptx
from tpspan.kernels.device_reduce import (
    _from_bf16,
    _from_bits,
    _from_f16,
    _part,
    _store_u16,
    _store_u32,
    _to_bits,
)

_ONE = types.uint32(1)
_REFRESH = types.uint32(2)
_REFRESH_MASK = types.uint32((1 << 30) - 1)
_LOW = types.uint64(0xFFFF_FFFF)
_HALF = types.uint64(32)
# The clock is slow to read and ticks in steps: look at it once in this many polls.
_LOOK_MASK = 63
_MOST_RANKS = 8


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _num_words(count: int, nbytes: int, first: int, chunk: int, slot_nbytes: int) -> int:
    """How many pairs of words the block sends: one at least, and in some launches all."""
    if types.uint32(types.uint32(count + _REFRESH) & _REFRESH_MASK) < _REFRESH:
        return slot_nbytes >> 4
    return max(min(((nbytes + 7) >> 3) - first, chunk), 1)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _size(index: int, nbytes: int, first: int, chunk: int) -> int:
    """How many bytes of data the block's pair of words of this index carries: 0 to 8."""
    if index >= chunk:
        return types.int64(0)
    return max(min(nbytes - 8 * (first + index), 8), 0)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _load_piece(address: int, size: int) -> int:
    """Up to eight bytes from anywhere, by aligned words that hold a wanted byte each."""
    piece = types.uint64(0)
    if size > 0:
        shift = address & 7
        piece = ptx.load_word(address - shift)
        if shift != 0:
            piece = piece >> types.uint64(8 * shift)
            if shift + size > 8:
                more = ptx.load_word(address - shift + 8)
                piece = piece | (more << types.uint64(64 - 8 * shift))
    return piece


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _store_piece(address: int, piece: int, size: int) -> None:
    """Up to eight bytes to anywhere, and no other byte."""
    if size == 8 and (address & 7) == 0:
        ptx.store_word(address, piece)
    elif size == 8 and (address & 3) == 0:
        _store_u32(address, types.uint32(piece & _LOW))
        _store_u32(address + 4, types.uint32(piece >> _HALF))
    elif size == 8 and (address & 1) == 0:
        for k in range(4):
            _store_u16(address + 2 * k, _part(piece, k, 16))
    else:
        for k in range(size):
            ptx.store_byte(address + k, types.uint32((piece >> types.uint64(8 * k)) & _LOW))


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _has_come(pair: Any, tag: int) -> bool:
    """Whether both words carry this launch's flag, which ``tag`` has in its upper half."""
    return (pair[0] >> _HALF) == (tag >> _HALF) and (pair[1] >> _HALF) == (tag >> _HALF)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _await_piece(
    address: int, pair: Any, tag: int, deadline: int, late: int, timeout_ns: int
) -> tuple[int, int]:
    """Poll until the eight bytes are there; also when the thread gives up, 0 if it never looked.

    ``pair`` is what a first load gave. Behind its deadline a thread polls a few times more only.
    """
    polls = types.int64(0)
    low = pair[0]
    high = pair[1]
    while not _has_come((low, high), tag):
        polls += 1
        if (polls & _LOOK_MASK) == 0:
            now = ptx.nanoseconds()
            if deadline == 0:
                deadline = now + timeout_ns
            elif now > deadline:
                ptx.store_release(late, _ONE)
                break
        again = ptx.load_pair(address)
        low = again[0]
        high = again[1]
    return (low & _LOW) | (high << _HALF), deadline


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _send_piece(
    piece: int, tag: int, place: int, region_nbytes: int, rank: int, world_size: int
) -> None:
    """Store the same two words at ``place`` of every other rank's region, the right one's first."""
    low = (piece & _LOW) | tag
    high = (piece >> _HALF) | tag
    for distance in range(1, world_size):
        peer = rank + distance
        if peer >= world_size:
            peer -= world_size
        ptx.store_pair(place + peer * region_nbytes, low, high)


def ll_gather(
    target: int,
    source: int,
    nbytes: int,
    chunk: int,
    base: int,
    region_nbytes: int,
    slot_nbytes: int,
    rank: int,
    world_size: int,
    epochs: int,
    status: int,
    timeout_ns: int,
) -> None:
    block = types.int64(cuda.blockIdx.x)
    thread = types.int64(cuda.threadIdx.x)
    step = types.int64(cuda.blockDim.x)
    epoch = epochs + 4 * block
    first = block * chunk
    # Under way while the count is, on which nothing of it depends.
    ahead = _load_piece(source + 8 * (first + thread), _size(thread, nbytes, first, chunk))
    count = types.uint32(ptx.load_count(epoch) + _ONE)
    tag = types.uint64(count) << _HALF
    sender_nbytes = types.int64(cuda.gridDim.x) * slot_nbytes
    slots = base + types.int64(count & _ONE) * world_size * sender_nbytes + block * slot_nbytes
    num_words = _num_words(count, nbytes, first, chunk, slot_nbytes)
    own = target + rank * nbytes
    index = thread
    while index < num_words:
        offset = 8 * (first + index)
        size = _size(index, nbytes, first, chunk)
        piece = ahead if index == thread else _load_piece(source + offset, size)
        place = slots + rank * sender_nbytes + 16 * index
        _send_piece(piece, tag, place, region_nbytes, rank, world_size)
        if own != source:
            _store_piece(own + offset, piece, size)
        index += step
    cuda.syncthreads()  # every thread has read the count
    if thread == 0:
        ptx.store_count(epoch, count)
    deadline = types.int64(0)
    # The words of all peers in one row: threads without a word of one peer wait for another's.
    item = thread
    while item < num_words * (world_size - 1):
        distance = types.int64(types.uint32(item) // types.uint32(num_words))
        index = item - distance * num_words
        peer = rank + 1 + distance
        if peer >= world_size:
            peer -= world_size
        place = slots + rank * region_nbytes + peer * sender_nbytes + 16 * index
        pair = ptx.load_pair(place)
        late = status + 4 * peer
        piece, deadline = _await_piece(place, pair, tag, deadline, late, timeout_ns)
        size = _size(index, nbytes, first, chunk)
        _store_piece(target + peer * nbytes + 8 * (first + index), piece, size)
        item += step


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _divide(total: Any, number: int, divisor: int) -> None:
    """Divide that many sums, correctly rounded."""
    by = types.float32(divisor)
    if (divisor & (divisor - 1)) == 0:  # 1 most often; the product is the same, and sooner there
        by = types.float32(1.0) / by
        for k in range(number):
            total[k] = total[k] * by
    else:
        for k in range(number):
            total[k] = total[k] / by


def _ll_sum(load: Any, pack: Any, itemsize: int) -> Any:
    """A kernel body for elements of 2 or 4 bytes."""
    width = 8 * itemsize
    per_word = 8 // itemsize

    def body(
        target: int,
        source: int,
        nbytes: int,
        chunk: int,
        base: int,
        region_nbytes: int,
        slot_nbytes: int,
        rank: int,
        world_size: int,
        divisor: int,
        epochs: int,
        status: int,
        timeout_ns: int,
    ) -> None:
        block = types.int64(cuda.blockIdx.x)
        thread = types.int64(cuda.threadIdx.x)
        step = types.int64(cuda.blockDim.x)
        epoch = epochs + 4 * block
        first = block * chunk
        # Under way while the count is, on which nothing of it depends.
        ahead = _load_piece(source + 8 * (first + thread), _size(thread, nbytes, first, chunk))
        count = types.uint32(ptx.load_count(epoch) + _ONE)
        tag = types.uint64(count) << _HALF
        sender_nbytes = types.int64(cuda.gridDim.x) * slot_nbytes
        slots = base + types.int64(count & _ONE) * world_size * sender_nbytes + block * slot_nbytes
        num_words = _num_words(count, nbytes, first, chunk, slot_nbytes)
        index = thread
        while index < num_words:
            offset = 8 * (first + index)
            piece = ahead
            if index != thread:
                piece = _load_piece(source + offset, _size(index, nbytes, first, chunk))
            place = slots + rank * sender_nbytes + 16 * index
            _send_piece(piece, tag, place, region_nbytes, rank, world_size)
            index += step
        cuda.syncthreads()  # every thread has read the count
        if thread == 0:
            ptx.store_count(epoch, count)
        deadline = types.int64(0)
        total = cuda.local.array(4, types.float32)
        low = cuda.local.array(_MOST_RANKS, types.uint64)
        high = cuda.local.array(_MOST_RANKS, types.uint64)
        for k in range(4):
            total[k] = types.float32(0.0)
        index = thread
        while index < num_words:
            offset = 8 * (first + index)
            size = _size(index, nbytes, first, chunk)
            place = slots + rank * region_nbytes + 16 * index
            # One look at the words of all ranks at once, then each in turn until it is there. A
            # thread reads and writes the same bytes of source and target, which may be one tensor.
            for peer in range(_MOST_RANKS):
                low[peer] = types.uint64(0)
                high[peer] = types.uint64(0)
                if peer < world_size and peer != rank:
                    pair = ptx.load_pair(place + peer * sender_nbytes)
                    low[peer] = pair[0]
                    high[peer] = pair[1]
            own = ahead if index == thread else _load_piece(source + offset, size)
            for peer in range(_MOST_RANKS):
                if peer < world_size:
                    piece = own
                    if peer != rank:
                        where = place + peer * sender_nbytes
                        pair = (low[peer], high[peer])
                        late = status + 4 * peer
                        piece, deadline = _await_piece(where, pair, tag, deadline, late, timeout_ns)
                    for k in range(per_word):
                        more = load(_part(piece, k, width))
                        # Not 0 + first: that would lose the sign of a zero.
                        total[k] = more if peer == 0 else total[k] + more
            _divide(total, per_word, divisor)
            if size > 0:
                result = pack(total[0], total[1], total[2], total[3])
                _store_piece(target + offset, result, size)
            index += step

    return body


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _pack_f32(first: float, second: float, third: float, fourth: float) -> int:
    """Two fp32 as eight bytes; the last two are not used."""
    return types.uint64(_to_bits(first)) | (types.uint64(_to_bits(second)) << _HALF)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _pack_bf16(first: float, second: float, third: float, fourth: float) -> int:
    low = types.uint64(ptx.pack_bf16(first, second))
    return low | (types.uint64(ptx.pack_bf16(third, fourth)) << _HALF)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _pack_f16(first: float, second: float, third: float, fourth: float) -> int:
    low = types.uint64(ptx.pack_f16(first, second))
    return low | (types.uint64(ptx.pack_f16(third, fourth)) << _HALF)


ll_sum_f32 = _ll_sum(_from_bits, _pack_f32, 4)
ll_sum_bf16 = _ll_sum(_from_bf16, _pack_bf16, 2)
ll_sum_f16 = _ll_sum(_from_f16, _pack_f16, 2)
