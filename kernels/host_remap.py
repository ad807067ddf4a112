"""A remap as one call that gives the GIL up once: numba njit.

The CUDA binding gives it up at each of three calls, and then waits for the thread that launches
kernels, which takes it in between. In a channel at work a remap of 64 MiB took 150 µs that way and
takes 100 now, of 1 GiB 288 and 151; alone they take 44 and 80.

Source: CUDA driver API reference, section "Virtual Memory Management". All arguments of the three
functions are 64 bits wide.
"""

from __future__ import annotations

from tpspan.kernels import atomics


@atomics.compiled(f"UniTuple(int32, 2)({', '.join(['int64'] * 8)})")
def remap(
    unmap: int,
    map_: int,
    set_access: int,
    address: int,
    nbytes: int,
    handle: int,
    access: int,
    num_access: int,
) -> tuple[int, int]:
    """Put other memory where some is mapped, with access to it.

    Args:
        unmap, map_, set_access: addresses of ``cuMemUnmap``, ``cuMemMap`` and ``cuMemSetAccess``.
        address, nbytes: of the mapping.
        handle: memory of that size.
        access, num_access: where ``CUmemAccessDesc`` lie, and how many.

    Returns:
        How many of the three were done, and what the one that was not returned, or 0.
    """
    code = atomics.call(unmap, (address, nbytes))
    if code != 0:
        return 0, code
    code = atomics.call(map_, (address, nbytes, 0, handle, 0))
    if code != 0:
        return 1, code
    code = atomics.call(set_access, (address, nbytes, access, num_access))
    if code != 0:
        return 2, code
    return 3, 0
