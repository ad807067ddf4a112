"""The bodies of the device kernels pull and the sums, in numba over plain addresses.

A thread takes 16 bytes of every source at a time, adds them in the order of the ranks in fp32, and
rounds once. The elements behind the last whole 16 bytes are taken one by one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

from tpspan.kernels import ptx
from tpspan.kernels.device_copy import _copy_chunk

_MASK_16 = 0xFFFF
_MASK_32 = 0xFFFF_FFFF
_NOT_SIGN = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_BF16_NAN = 0x7FC0
_I32 = ir.IntType(32)
_F32 = ir.FloatType()


@intrinsic  # type: ignore[misc]
def _load_u32(typing: Any, address: Any) -> Any:
    return ptx._load("ld.global.u32 $0, [$1];", types.uint32, _I32, "r")


@intrinsic  # type: ignore[misc]
def _store_u32(typing: Any, address: Any, value: Any) -> Any:
    return ptx._store("st.global.u32 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def _load_u16(typing: Any, address: Any) -> Any:
    """A 16-bit load into a 32-bit register, which PTX allows."""
    return ptx._load("ld.global.u16 $0, [$1];", types.uint32, _I32, "r")


@intrinsic  # type: ignore[misc]
def _store_u16(typing: Any, address: Any, value: Any) -> Any:
    return ptx._store("st.global.u16 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def _from_f16(typing: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        text = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }"
        return ptx._call(builder, _F32, text, "=f,r", arguments)

    return types.float32(types.uint32), emit


@intrinsic  # type: ignore[misc]
def _to_f16(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        text = "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }"
        return ptx._call(builder, _I32, text, "=r,f", arguments)

    return types.uint32(types.float32), emit


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _from_bits(bits: int) -> float:
    return libdevice.int_as_float(types.int32(bits))


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _to_bits(value: float) -> int:
    return types.uint32(libdevice.float_as_int(value))


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _from_bf16(bits: int) -> float:
    return libdevice.int_as_float(types.int32(types.uint32(bits) << types.uint32(16)))


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _to_bf16(value: float) -> int:
    """To the nearest, ties to even; a NaN stays one."""
    bits = types.uint32(libdevice.float_as_int(value))
    odd = types.uint32((bits >> types.uint32(16)) & types.uint32(1))
    rounded = types.uint32(bits + types.uint32(0x7FFF) + odd) >> types.uint32(16)
    if types.uint32(bits & types.uint32(_NOT_SIGN)) > types.uint32(_INFINITY):
        return types.uint32(_BF16_NAN)
    return types.uint32(rounded)


@cuda.jit(device=True, inline="always")  # type: ignore[misc]
def _part(word: int, index: int, width: int) -> int:
    mask = types.uint64(_MASK_16) if width == 16 else types.uint64(_MASK_32)
    return types.uint32((word >> types.uint64(index * width)) & mask)


def _vector_sum(load: Any, store: Any, load_one: Any, store_one: Any, itemsize: int) -> Any:
    """A kernel body for elements of 2 or 4 bytes."""
    width = 8 * itemsize
    per_word = 8 // itemsize

    def body(
        target: int,
        second: int,
        source: int,
        stride: int,
        own: int,
        numel: int,
        rank: int,
        world_size: int,
        divisor: int,
    ) -> None:
        thread = types.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        step = types.int64(cuda.gridDim.x) * cuda.blockDim.x
        by = types.float32(divisor)
        nbytes = numel * itemsize
        whole = nbytes & ~15
        total = cuda.local.array(8, types.float32)
        offset = 16 * thread
        while offset < whole:
            for k in range(2 * per_word):
                total[k] = types.float32(0.0)
            for peer in range(world_size):
                address = own if peer == rank else source + peer * stride
                vector = ptx.load_vector(address + offset)
                for k in range(per_word):
                    low = load(_part(vector[0], k, width))
                    high = load(_part(vector[1], k, width))
                    # Not 0 + first: that would lose the sign of a zero.
                    total[k] = low if peer == 0 else total[k] + low
                    total[per_word + k] = high if peer == 0 else total[per_word + k] + high
            low_word = types.uint64(0)
            high_word = types.uint64(0)
            for k in range(per_word):
                shift = types.uint64(k * width)
                low_word |= types.uint64(store(total[k] / by)) << shift
                high_word |= types.uint64(store(total[per_word + k] / by)) << shift
            ptx.store_vector(target + offset, low_word, high_word)
            if second != 0:
                ptx.store_vector(second + offset, low_word, high_word)
            offset += 16 * step
        offset = whole + itemsize * thread
        while offset < nbytes:
            one = types.float32(0.0)
            for peer in range(world_size):
                address = own if peer == rank else source + peer * stride
                more = load(load_one(address + offset))
                one = more if peer == 0 else one + more
            bits = types.uint32(store(one / by))
            store_one(target + offset, bits)
            if second != 0:
                store_one(second + offset, bits)
            offset += itemsize * step

    return body


sum_f32 = _vector_sum(_from_bits, _to_bits, _load_u32, _store_u32, 4)
sum_bf16 = _vector_sum(_from_bf16, _to_bf16, _load_u16, _store_u16, 2)
sum_f16 = _vector_sum(_from_f16, _to_f16, _load_u16, _store_u16, 2)


def pull(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    piece_nbytes: int,
    nbytes: int,
    rank: int,
    world_size: int,
    num_pieces: int,
    chunk_nbytes: int,
) -> None:
    per_piece = (piece_nbytes + chunk_nbytes - 1) // chunk_nbytes
    chunk = types.int64(cuda.blockIdx.x)
    while chunk < num_pieces * per_piece:
        peer = (rank + 1 + chunk // per_piece) % world_size
        offset = (chunk % per_piece) * chunk_nbytes
        size = min(piece_nbytes, nbytes - peer * piece_nbytes) - offset
        if size > 0:
            _copy_chunk(
                target + peer * target_stride + offset,
                source + peer * source_stride + offset,
                min(size, chunk_nbytes),
            )
        chunk += cuda.gridDim.x
