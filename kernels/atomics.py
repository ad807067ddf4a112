"""Atomic words, futexes, the clock, memcpy and calls for numba's njit, over plain addresses.

LLVM's own atomics, so that the order of memory is right on ARM too. The C functions are called by
name: code that holds a ctypes pointer could not be cached on disk.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tpspan.errors import TpspanError

_FUTEX_CALL_NUMBERS = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "ppc64le": 221,
    "s390x": 238,
    "loongarch64": 98,
}
_MACHINE = platform.machine()
if _MACHINE not in _FUTEX_CALL_NUMBERS:
    raise TpspanError(f"the number of the futex system call is not known for {_MACHINE}")
_FUTEX_CALL_NUMBER = _FUTEX_CALL_NUMBERS[_MACHINE]
# Without FUTEX_PRIVATE_FLAG: the words lie in memory that processes share.
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = (1 << 31) - 1
_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000
_YIELD_HINT = 1

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_POINTER = _I32.as_pointer()
_TIME = ir.LiteralStructType([_I64, _I64])  # struct timespec on 64-bit machines

Emit = Callable[[Any, Any, Any, Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile a function now, without the GIL, and keep the result on disk where that can be."""

    def decorate(function: Function) -> Function:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # no folder to write to, neither beside the file nor at home
            return njit(signature, nogil=True)(function)

    return decorate


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


@intrinsic  # type: ignore[misc]
def load_acquire(typing: Any, address: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "acquire", 4)

    return types.uint32(types.int64), emit


@intrinsic  # type: ignore[misc]
def store_release(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), emit


@intrinsic  # type: ignore[misc]
def add(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    """Add to a word, in the one order that all threads agree on; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return types.uint32(types.int64, types.uint32), emit


@intrinsic  # type: ignore[misc]
def fence(typing: Any) -> tuple[Any, Emit]:
    """Between a store and a load of different words: neither release nor acquire orders those."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic  # type: ignore[misc]
def pause(typing: Any) -> tuple[Any, Emit]:
    """What a spinning core should do between two looks."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _MACHINE == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        elif _MACHINE == "aarch64":
            kind = ir.FunctionType(ir.VoidType(), [_I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.Constant(_I32, _YIELD_HINT)])
        return context.get_dummy_value()

    return types.void(), emit


def _system_call(builder: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    return builder.call(function, arguments)


@intrinsic  # type: ignore[misc]
def futex_wait(typing: Any, address: Any, seen: Any, timeout_ns: Any) -> tuple[Any, Emit]:
    """Sleep while the word is what was seen; may return early, so the caller looks again."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, seen_value, nanoseconds = arguments
        time = cgutils.alloca_once(builder, _TIME)
        unit = ir.Constant(_I64, _NANOSECONDS)
        parts = (builder.sdiv(nanoseconds, unit), builder.srem(nanoseconds, unit))
        for index, part in enumerate(parts):
            builder.store(part, cgutils.gep_inbounds(builder, time, 0, index))
        _system_call(
            builder,
            ir.Constant(_I64, _FUTEX_CALL_NUMBER),
            word,
            ir.Constant(_I64, _FUTEX_WAIT),
            builder.zext(seen_value, _I64),
            builder.ptrtoint(time, _I64),
            ir.Constant(_I64, 0),
            ir.Constant(_I64, 0),
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32, types.int64), emit


@intrinsic  # type: ignore[misc]
def futex_wake_all(typing: Any, address: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        operands = (_FUTEX_WAKE, _EVERYBODY, 0, 0, 0)
        number = ir.Constant(_I64, _FUTEX_CALL_NUMBER)
        rest = [ir.Constant(_I64, operand) for operand in operands]
        _system_call(builder, number, arguments[0], *rest)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic  # type: ignore[misc]
def nanoseconds(typing: Any) -> tuple[Any, Emit]:
    """CLOCK_MONOTONIC."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        time = cgutils.alloca_once(builder, _TIME)
        kind = ir.FunctionType(_I32, [_I32, _TIME.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(_I32, _CLOCK_MONOTONIC), time])
        seconds, rest = (
            builder.load(cgutils.gep_inbounds(builder, time, 0, index)) for index in range(2)
        )
        return builder.add(builder.mul(seconds, ir.Constant(_I64, _NANOSECONDS)), rest)

    return types.int64(), emit


@intrinsic  # type: ignore[misc]
def copy_bytes(typing: Any, target: Any, source: Any, nbytes: Any) -> tuple[Any, Emit]:
    """memcpy: the ranges must not overlap."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte, [byte, byte, _I64])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcpy")
        target_value, source_value, size = arguments
        pointers = [builder.inttoptr(value, byte) for value in (target_value, source_value)]
        builder.call(function, [*pointers, size])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic  # type: ignore[misc]
def load_int64(typing: Any, address: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _I64.as_pointer()))

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[misc]
def store_int64(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic  # type: ignore[misc]
def call(typing: Any, function: Any, operands: Any) -> tuple[Any, Emit]:
    """Call a C function at an address with a tuple of 64-bit integers; it returns an int."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, packed = arguments
        values = [builder.extract_value(packed, index) for index in range(len(operands))]
        kind = ir.FunctionType(_I32, [_I64] * len(values))
        return builder.call(builder.inttoptr(address, kind.as_pointer()), values)

    return types.int32(types.int64, operands), emit
