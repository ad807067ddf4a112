"""Copying a gathered range into ordinary memory: by kernel or copy engine, peers in rotation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from tpspan import kernels
from tpspan.memory import Driver
from tpspan.spans.layout import Layout, Run

_KERNEL_MAX_NBYTES = 256 << 20
_ENGINE_MAX_PIECES = 32


def check_out(
    out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a target that a plain copy of bytes would not fill rightly.

    Raises:
        ValueError: wrong dtype, device, number of elements, or not contiguous.
    """
    numel = math.prod(shape)
    if out.dtype != dtype or out.numel() != numel:
        raise ValueError(
            f"out must have {numel} elements of {dtype}, not {out.numel()} of {out.dtype}"
        )
    if out.device != device:
        raise ValueError(f"out must be on {device}, not on {out.device}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")


def rotated(layout: Layout, rank: int) -> list[Run]:
    """The pieces of a whole span in the order in which ``rank`` copies them.

    The right neighbour's first, then on around, its own last: at any time the ranks read from
    different owners.
    """
    pieces = list(layout.pieces())
    owners = [(rank + k) % layout.world_size for k in range(1, layout.world_size + 1)]
    num_changes = sum(a.owner != b.owner for a, b in itertools.pairwise(pieces))
    if num_changes < layout.world_size:
        turn = {owner: index for index, owner in enumerate(owners)}
        return sorted(pieces, key=lambda piece: (turn[piece.owner], piece.offset_bytes))
    # Owners alternate: keep the order of addresses, and begin behind an own piece.
    first = next((i for i, piece in enumerate(pieces) if piece.owner == owners[0]), 0)
    return pieces[first:] + pieces[:first]


def copy_to(
    driver: Driver,
    pieces: Sequence[Run],
    address: int,
    out: torch.Tensor,
    stream: int,
    *,
    is_local: bool,
) -> None:
    """Copy the whole span at ``address`` into ``out``, on a stream of a GPU.

    By copy engine where that is few copies of memory on one GPU, or of much memory: it takes no
    multiprocessor and is then at least as fast. By kernel otherwise: over a link a kernel starts
    sooner, and many small copies cost 3 µs each.

    Args:
        pieces: from ``rotated``.
        is_local: all of the memory is this GPU's own.
    """
    if not pieces:
        return
    target, nbytes = out.data_ptr(), out.nbytes
    by_engine = is_local and len(pieces) <= _ENGINE_MAX_PIECES
    if not by_engine and nbytes <= _KERNEL_MAX_NBYTES:
        start = pieces[0].offset_bytes
        kernels.rotated_copy(target, address, nbytes, start, device=out.device.index, stream=stream)
        return
    for piece in pieces:
        at = piece.offset_bytes
        driver.copy(target + at, address + at, piece.nbytes, stream)
