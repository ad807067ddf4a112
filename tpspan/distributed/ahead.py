"""Large calls in parts, each staged while the part before is read.

Every rank has a GPU of its own, so copies on one stream and reads across the link on another go on
at the same time. A part is staged on a stream beside the current one; the current one waits for it,
meets the other ranks, and reads.

Why no byte is overwritten while it is read (invariant 6), although a part is staged a step earlier
than in ``Buffers``: parts use two buffers in turn, and part i + 1 is staged only behind the meeting
of part i. A peer's stream comes to that meeting behind its reads of part i - 1, which lay where
part i + 1 is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpspan.distributed.buffers import Buffers

# Larger parts meet less often, smaller ones let the first read begin sooner. A meeting takes 5 µs,
# in which 2 MiB cross the link.
_SMALLEST_NBYTES, _LARGEST_NBYTES = 8 << 20, 32 << 20
_FEWEST_PARTS = 4
LARGE_NBYTES = 2 * _SMALLEST_NBYTES
"""From here on a call is worth cutting into parts."""

Stage = Callable[[int, int, int], int]
Use = Callable[[int, int, int], None]


def part_nbytes(nbytes: int) -> int:
    """The size of the parts that a call of so many bytes is cut into, a multiple of 256."""
    size = -(-nbytes // _FEWEST_PARTS // 256) * 256
    return min(max(size, _SMALLEST_NBYTES), _LARGEST_NBYTES)


class StagedAhead:
    """Calls of one group whose parts are staged ahead.

    Args:
        buffers: of the group; not those in host memory.
        device: of this rank.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self._buffers = buffers
        self._stream = torch.cuda.Stream(device)

    def run(
        self,
        parts: Sequence[tuple[int, int]],
        stage: Stage,
        use: Use,
        beside: Callable[[int], None] | None = None,
    ) -> None:
        """Stage and use every part, behind everything on the current stream; not in a capture.

        Args:
            parts: (offset, nbytes) each.
            stage: called with a part and the stream to stage it on, by ``Buffers.stage``, whose
                address it returns.
            use: called with that address and the part when the current stream may read it there.
            beside: called once with the stream that stages, for what may be done meanwhile.
        """
        current, side, buffers = torch.cuda.current_stream(), self._stream, self._buffers
        side.wait_stream(current)
        first = stage(*parts[0], side.cuda_stream)
        for index, part in enumerate(parts):
            current.wait_stream(side)
            buffers.meet(current.cuda_stream)
            now = first
            if index + 1 < len(parts):
                side.wait_stream(current)
                first = stage(*parts[index + 1], side.cuda_stream)
            use(now, *part)
            if index == 0 and beside is not None:
                beside(side.cuda_stream)
        current.wait_stream(side)
