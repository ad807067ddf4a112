"""Kernels over plain addresses: signals, copies and sums, on a CUDA stream and on the host.

==============  ===============  ==================================================================
what            written in       why not plain numba
==============  ===============  ==================================================================
post, wait,     numba to PTX     system-scope acquire and release and the clock in nanoseconds are
barrier                          single PTX instructions, which numba's intrinsics carry (ptx.py)
gather_copy,    numba to PTX     16-byte loads and stores, likewise
rotated_copy
pull, sum_*,    numba to PTX     the same, and conversions of two floats at once
fused_*, ll_*
host_post,      numba njit       atomics are LLVM's own, futex and clock the C library's, both
host_wait,                       through numba's intrinsics (atomics.py)
host_barrier
host_gather_    numba njit       memcpy of the C library, likewise
copy, host_
rotated_copy
remap           numba njit       functions of the CUDA driver, called by address, likewise
==============  ===============  ==================================================================

Nothing is left over that would need CUDA C++: with single instructions as intrinsics numba emits
what the C++ compiler would.

Layers, from the bottom: board and chunks are arithmetic; ptx and atomics are single instructions;
device_* and host_* are the kernels; compile turns device kernels into launches; stream_* call them.
The device kernels are imported when they are first compiled, which takes a second.
"""

from tpspan.kernels.board import LINE_NBYTES, counter_address, has_arrived, num_slots
from tpspan.kernels.chunks import CopyTable
from tpspan.kernels.compile import compile_ptx, kernel, kernel_names, prepare
from tpspan.kernels.host_copy import host_gather_copy, host_rotated_copy
from tpspan.kernels.host_signals import host_barrier, host_has_arrived, host_post, host_wait
from tpspan.kernels.stream_copy import gather_copy, rotated_copy
from tpspan.kernels.stream_signals import barrier, post, wait

__all__ = [
    "LINE_NBYTES",
    "CopyTable",
    "barrier",
    "compile_ptx",
    "counter_address",
    "gather_copy",
    "has_arrived",
    "host_barrier",
    "host_gather_copy",
    "host_has_arrived",
    "host_post",
    "host_rotated_copy",
    "host_wait",
    "kernel",
    "kernel_names",
    "num_slots",
    "post",
    "prepare",
    "rotated_copy",
    "wait",
]
