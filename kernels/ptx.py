"""Single PTX instructions as numba intrinsics; addresses are plain 64-bit integers.

numba itself has no system-scope acquire and release, no 16-byte loads and no clock in
nanoseconds, but its intrinsics may carry inline PTX. Importing this file imports numba's CUDA
compiler, about a second: only compiling a kernel does so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_VOID = ir.VoidType()

Emit = Callable[[Any, Any, Any, Any], Any]


def _call(builder: Any, result: Any, text: str, constraints: str, arguments: Any) -> Any:
    kinds = [argument.type for argument in arguments]
    code = ir.InlineAsm(ir.FunctionType(result, kinds), text, constraints, side_effect=True)
    return builder.call(code, list(arguments))


def _load(text: str, numba_type: Any, llvm_type: Any, letter: str) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, llvm_type, text, f"={letter},l,~{{memory}}", arguments)

    return numba_type(types.int64), emit


def _store(text: str, numba_type: Any, letter: str) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, _VOID, text, f"l,{letter},~{{memory}}", arguments)
        return context.get_dummy_value()

    return types.void(types.int64, numba_type), emit


def _load_two(text: str) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.LiteralStructType([_I64, _I64])
        loaded = _call(builder, pair, text, "=l,=l,l,~{memory}", arguments)
        words = [builder.extract_value(loaded, index) for index in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.int64), emit


def _store_two(text: str) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, _VOID, text, "l,l,l,~{memory}", arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.uint64), emit


def _pack(text: str) -> tuple[Any, Emit]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _I32, text, "=r,f,f", arguments)

    return types.uint32(types.float32, types.float32), emit


@intrinsic  # type: ignore[misc]
def load_count(typing: Any, address: Any) -> tuple[Any, Emit]:
    """A count of this rank's own, which only kernels of one stream touch."""
    return _load("ld.relaxed.gpu.global.u32 $0, [$1];", types.uint32, _I32, "r")


@intrinsic  # type: ignore[misc]
def store_count(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    """The counterpart of load_count."""
    return _store("st.relaxed.gpu.global.u32 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def load_acquire(typing: Any, address: Any) -> tuple[Any, Emit]:
    """A counter that another GPU or the host releases."""
    return _load("ld.acquire.sys.global.u32 $0, [$1];", types.uint32, _I32, "r")


@intrinsic  # type: ignore[misc]
def store_release(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    """A counter that another GPU or the host acquires."""
    return _store("st.release.sys.global.u32 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def store_relaxed(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    """A counter that another GPU acquires; behind a fence_system it releases all before."""
    return _store("st.relaxed.sys.global.u32 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def load_pair(typing: Any, address: Any) -> tuple[Any, Emit]:
    """Two words at sixteen aligned bytes that another GPU may be writing; each is whole."""
    return _load_two("ld.relaxed.sys.global.v2.u64 {$0, $1}, [$2];")


@intrinsic  # type: ignore[misc]
def store_pair(typing: Any, address: Any, low: Any, high: Any) -> tuple[Any, Emit]:
    """Two words at sixteen aligned bytes that another GPU may be reading; each arrives whole."""
    return _store_two("st.relaxed.sys.global.v2.u64 [$0], {$1, $2};")


@intrinsic  # type: ignore[misc]
def load_int64(typing: Any, address: Any) -> tuple[Any, Emit]:
    """A word of a table that nobody writes during the kernel."""
    return _load("ld.global.nc.u64 $0, [$1];", types.int64, _I64, "l")


@intrinsic  # type: ignore[misc]
def load_word(typing: Any, address: Any) -> tuple[Any, Emit]:
    """Eight aligned bytes of data."""
    return _load("ld.global.u64 $0, [$1];", types.uint64, _I64, "l")


@intrinsic  # type: ignore[misc]
def store_word(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    """Eight aligned bytes of data."""
    return _store("st.global.u64 [$0], $1;", types.uint64, "l")


@intrinsic  # type: ignore[misc]
def load_byte(typing: Any, address: Any) -> tuple[Any, Emit]:
    return _load("ld.global.u8 $0, [$1];", types.uint32, _I32, "r")


@intrinsic  # type: ignore[misc]
def store_byte(typing: Any, address: Any, value: Any) -> tuple[Any, Emit]:
    return _store("st.global.u8 [$0], $1;", types.uint32, "r")


@intrinsic  # type: ignore[misc]
def load_vector(typing: Any, address: Any) -> tuple[Any, Emit]:
    """Sixteen aligned bytes as two words; they pass once, so they do not stay in L1."""

    return _load_two("ld.global.L1::no_allocate.v2.u64 {$0, $1}, [$2];")


@intrinsic  # type: ignore[misc]
def load_vector_if(typing: Any, address: Any, is_wanted: Any) -> tuple[Any, Emit]:
    """The same, or zeros and no access. Without a branch: loads behind it need not wait."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        text = (
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u64 $0, 0; mov.u64 $1, 0; "
            "@p ld.global.L1::no_allocate.v2.u64 {$0, $1}, [$2]; }"
        )
        pair = ir.LiteralStructType([_I64, _I64])
        # Both results are written before the address is read: "&" keeps them apart from it.
        loaded = _call(builder, pair, text, "=&l,=&l,l,r,~{memory}", arguments)
        words = [builder.extract_value(loaded, index) for index in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.int64, types.uint32), emit


@intrinsic  # type: ignore[misc]
def store_vector(typing: Any, address: Any, low: Any, high: Any) -> tuple[Any, Emit]:
    """Two words as sixteen aligned bytes."""
    return _store_two("st.global.v2.u64 [$0], {$1, $2};")


@intrinsic  # type: ignore[misc]
def pack_bf16(typing: Any, low: Any, high: Any) -> tuple[Any, Emit]:
    """Two fp32 rounded to bf16, to the nearest, ties to even: one instruction from sm_80 on."""
    return _pack("cvt.rn.bf16x2.f32 $0, $2, $1;")


@intrinsic  # type: ignore[misc]
def pack_f16(typing: Any, low: Any, high: Any) -> tuple[Any, Emit]:
    """Two fp32 rounded to fp16, likewise."""
    return _pack("cvt.rn.f16x2.f32 $0, $2, $1;")


@intrinsic  # type: ignore[misc]
def fence_system(typing: Any) -> tuple[Any, Emit]:
    """Order everything before with everything after, as all GPUs and the host see it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, _VOID, "fence.acq_rel.sys;", "~{memory}", arguments)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic  # type: ignore[misc]
def nanoseconds(typing: Any) -> tuple[Any, Emit]:
    """The GPU's global clock. It may tick as seldom as once a microsecond."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _I64, "mov.u64 $0, %globaltimer;", "=l", arguments)

    return types.int64(), emit
