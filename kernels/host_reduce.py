"""Sums over several sources on the host, numba njit: what the 16-bit floats need is done in fp32.

Every sum adds the sources in the order in which they are given, element by element, so that ranks
that add the same sources get the same bits. Work goes through blocks that stay in the first cache:
the compiler then makes vector code of each pass, whatever the number of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from tpspan.kernels import atomics

_BLOCK = 4096
_SIGNATURE = "void(int64, int64, int64, int64, int64, float64)"
_BF16_NAN = 0x7FC0
_NOT_SIGN = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_HALF = 0x7FFF

Emit = Callable[[Any, Any, Any, Any], Any]


def _pointer_intrinsic(dtype: Any) -> Any:
    @intrinsic  # type: ignore[misc]
    def pointer(typing: Any, address: Any) -> tuple[Any, Emit]:
        kind = types.CPointer(dtype)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), emit

    return pointer


_f32 = _pointer_intrinsic(types.float32)
_f64 = _pointer_intrinsic(types.float64)
_u16 = _pointer_intrinsic(types.uint16)


@intrinsic  # type: ignore[misc]
def _bits_of(typing: Any, value: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@intrinsic  # type: ignore[misc]
def _float_of(typing: Any, bits: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), emit


@intrinsic  # type: ignore[misc]
def _from_f16(typing: Any, bits: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic  # type: ignore[misc]
def _to_f16(typing: Any, value: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), emit


@njit(inline="always")  # type: ignore[misc]
def _from_bf16(bits: int) -> float:
    return _float_of(types.uint32(types.uint32(bits) << types.uint32(16)))


@njit(inline="always")  # type: ignore[misc]
def _to_bf16(value: float) -> int:
    """To the nearest, ties to even, as torch rounds; a NaN stays one."""
    bits = _bits_of(value)
    odd = types.uint32((bits >> types.uint32(16)) & types.uint32(1))
    rounded = types.uint32(bits + types.uint32(_HALF) + odd) >> types.uint32(16)
    is_nan = types.uint32(bits & types.uint32(_NOT_SIGN)) > types.uint32(_INFINITY)
    return types.uint16(types.uint32(_BF16_NAN) if is_nan else rounded)


@njit(inline="always")  # type: ignore[misc]
def _same(value: float) -> float:
    return value


def _summing(pointer: Any, load: Any, store: Any, dtype: Any) -> Any:
    """A sum in ``dtype``, which is what the elements are stored in, or wider."""
    zero = numpy.dtype(dtype)

    def body(
        target: int, second: int, table: int, num_sources: int, numel: int, divisor: float
    ) -> None:
        out = carray(pointer(target), numel)
        total = numpy.empty(_BLOCK, zero)
        at = 0
        while at < numel:
            size = min(_BLOCK, numel - at)
            first = carray(pointer(atomics.load_int64(table)), numel)[at : at + size]
            for i in range(size):
                total[i] = load(first[i])
            for source in range(1, num_sources):
                address = atomics.load_int64(table + 8 * source)
                more = carray(pointer(address), numel)[at : at + size]
                for i in range(size):
                    total[i] += load(more[i])
            if divisor != 1.0:
                by = dtype(divisor)
                for i in range(size):
                    total[i] /= by
            part = out[at : at + size]
            for i in range(size):
                part[i] = store(total[i])
            if second != 0:
                itemsize = out.itemsize
                atomics.copy_bytes(second + at * itemsize, target + at * itemsize, size * itemsize)
            at += size

    return body


_blocks_f32 = njit(nogil=True)(_summing(_f32, _same, _same, numpy.float32))
_blocks_f64 = njit(nogil=True)(_summing(_f64, _same, _same, numpy.float64))
_blocks_bf16 = njit(nogil=True)(_summing(_u16, _from_bf16, _to_bf16, numpy.float32))
_blocks_f16 = njit(nogil=True)(_summing(_u16, _from_f16, _to_f16, numpy.float32))


@atomics.compiled(_SIGNATURE)
def _sum_f32(
    target: int, second: int, table: int, num_sources: int, numel: int, divisor: float
) -> None:
    _blocks_f32(target, second, table, num_sources, numel, divisor)


@atomics.compiled(_SIGNATURE)
def _sum_f64(
    target: int, second: int, table: int, num_sources: int, numel: int, divisor: float
) -> None:
    _blocks_f64(target, second, table, num_sources, numel, divisor)


@atomics.compiled(_SIGNATURE)
def _sum_bf16(
    target: int, second: int, table: int, num_sources: int, numel: int, divisor: float
) -> None:
    _blocks_bf16(target, second, table, num_sources, numel, divisor)


@atomics.compiled(_SIGNATURE)
def _sum_f16(
    target: int, second: int, table: int, num_sources: int, numel: int, divisor: float
) -> None:
    _blocks_f16(target, second, table, num_sources, numel, divisor)


_SUMS = {"float32": _sum_f32, "float64": _sum_f64, "bfloat16": _sum_bf16, "float16": _sum_f16}
HOST_SUM_DTYPES = tuple(_SUMS)


def host_sum(
    dtype: str,
    target: int,
    table: int,
    num_sources: int,
    numel: int,
    divisor: float = 1.0,
    second: int = 0,
) -> None:
    """Add sources element by element, in their order, and divide the sum.

    Args:
        dtype: one of ``HOST_SUM_DTYPES``; the 16-bit ones are added in fp32 and rounded once.
        target: address of the result; it may be one of the sources.
        table: address of the sources' addresses, 64 bits each.
        divisor: 1 for a sum, the number of sources for their mean.
        second: address of a second copy of the result; 0 for none.
    """
    _SUMS[dtype](target, second, table, num_sources, numel, divisor)
