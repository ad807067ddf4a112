"""Large calls in parts, which cross the link one right behind the other.

Every rank has a GPU of its own, so copies within a GPU and reads across the link go on at the same
time. The current stream only reads: part i as soon as it has read part i - 1. A stream beside it
stages part i, waits until this rank has read part i - 2, and there the ranks meet over part i. All
that happens while part i - 1 is being read, so the current stream finds the meeting done. While the
first part is staged nothing is read: that part is small, and stays on the current stream.

Why no byte is overwritten while it is read (invariant 6). The parts of a call lie in four places in
turn: the two halves of the buffer that was not used last, then the halves of the other one.

- Part i lies where part i - 4 did, and is staged behind meeting i - 1. A peer came there behind its
  reads of part i - 3, so it has read part i - 4.
- Parts 0 and 1 lie in the buffer that any step may write next. Parts 2 and 3 lie where the step
  before may still be read, and are staged behind meeting 0, to which a peer came behind that step.
- The last meeting says that all parts but the last two have been read. The next step writes the
  buffer that was not used last, before it meets anybody: so the last two parts must be the halves
  of one buffer, and the number of parts is even.

What is read is what was staged for it: a rank comes to a part's meeting behind having staged it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from tpspan.distributed.buffers import Buffers

# To be read of all peers together. The first part is staged while nothing crosses the link, 16 MiB
# in 8 µs. Reading it takes 43 µs, enough to stage the second and to meet over it (5 µs). From then
# on parts grow, up to half a buffer: each costs a meeting and some launches whatever its size. Two
# ranks gather 256 MiB in 436 µs, 446 if it is 8 MiB.
_FIRST_NBYTES = 16 << 20
_ALIGNMENT = 256
LARGE_NBYTES = 2 * _FIRST_NBYTES
"""From here on a call is worth cutting into parts: two ranks gather 64 MiB in 127 µs, 134 if a
kernel pulls, but 32 MiB in 80 instead of 71."""

Step = Callable[[int, int, int, int], None]
"""Called with rank 0's address of a part, its offset and size in bytes, and the stream to use."""


def cut(nbytes: int, most_nbytes: int, first_nbytes: int) -> list[tuple[int, int]]:
    """An even number of parts (offset, nbytes) that grow, two by two, and are alike from then on.

    Args:
        nbytes: of the call.
        most_nbytes: of a part, a multiple of 256; so are all offsets.
        first_nbytes: of the first part, as long as the call is so large that parts grow.
    """
    size = max(min(first_nbytes, most_nbytes) // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)
    least = 2 * size  # for two parts that are not worth less than the first
    borders = [0]
    while size < most_nbytes and nbytes - borders[-1] >= 2 * size + least:
        borders += [borders[-1] + size, borders[-1] + 2 * size]
        size = min(2 * size, most_nbytes)
    start, left = borders[-1], nbytes - borders[-1]
    num = 2 * max(-(-left // (2 * most_nbytes)), 1)
    for k in range(1, num + 1):
        border = start + -(-left * k // num // _ALIGNMENT) * _ALIGNMENT
        borders.append(min(border, nbytes))
    return [(begin, end - begin) for begin, end in pairwise(borders)]


class StagedAhead:
    """Calls of one group whose parts are staged ahead. Collective to call.

    Args:
        buffers: of the group; not those in host memory.
        device: of this rank.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self._buffers = buffers
        self._side = torch.cuda.Stream(device)
        self._used = (torch.cuda.Event(), torch.cuda.Event())  # of the last two parts

    def run(
        self,
        nbytes: int,
        stage: Step,
        use: Step,
        beside: Callable[[int, int, int], None] | None = None,
        num_pieces: int = 1,
    ) -> None:
        """Stage and use every part, behind everything on the current stream; not in a capture.

        Args:
            nbytes: of the call, the same on all ranks.
            stage: writes this rank's bytes of a part.
            use: reads what the ranks have staged of it.
            beside: called once for each part with its offset, its size and the stream that stages,
                for what may be done meanwhile; it should take no longer than to stage the part.
            num_pieces: how many pieces of a part's size, rounded up to 256, are staged for it.
        """
        buffers, side, used = self._buffers, self._side, self._used
        current = torch.cuda.current_stream()
        buffers.fit(max(nbytes * num_pieces // 2, LARGE_NBYTES))
        most = buffers.nbytes // 2 // num_pieces // _ALIGNMENT * _ALIGNMENT
        first = _FIRST_NBYTES // max(buffers.world_size - 1, 1)
        parts = cut(nbytes, most, first)

        place = buffers.take()
        stage(place, *parts[0], current.cuda_stream)
        buffers.meet(current.cuda_stream)
        side.wait_stream(current)
        for index, part in enumerate(parts):
            if index:
                if index >= 2:
                    side.wait_event(used[index % 2])  # recorded two parts ago
                buffers.meet(side.cuda_stream)
                current.wait_stream(side)
            use(place, *part, current.cuda_stream)
            used[index % 2].record(current)
            if index + 1 < len(parts):
                place = buffers.take(half=(index + 1) % 2)
                stage(place, *parts[index + 1], side.cuda_stream)
            # Not behind the first, whose time is short.
            if beside is not None and index:
                beside(*parts[index - 1], side.cuda_stream)
        if beside is not None:
            beside(*parts[-1], side.cuda_stream)
            current.wait_stream(side)
