"""Where a counter of a signal board lies: pure arithmetic, shared by device and host kernels.

Rank r's part is one page at ``base + r * page_nbytes``. A counter has a line of 64 bytes to itself:

======  ==========================================================================================
offset  32-bit word
======  ==========================================================================================
0       the count; written by its sender only
4       host only: how many waiters sleep on the count
8       host only, in rank 0's line of itself: the bell that a host barrier of this slot sleeps on
12      host only, beside the bell: how many ranks sleep on it
======  ==========================================================================================

The line of a rank's own counter is never counted by a barrier, so rank 0's own line is free to
carry the bell, and no further memory has to be reserved.

Where streams wait themselves the lines hold other words: see ``tpspan.spans.stream_words``.
"""

from __future__ import annotations

LINE_NBYTES = 64
COUNT_MASK = 0xFFFF_FFFF


def counter_address(
    base: int, page_nbytes: int, world_size: int, slot: int, receiver: int, sender: int
) -> int:
    """Address of the counter of ``slot`` that ``sender`` writes in ``receiver``'s part."""
    return base + receiver * page_nbytes + (slot * world_size + sender) * LINE_NBYTES


def num_slots(page_nbytes: int, world_size: int) -> int:
    """How many slots a rank's page has room for."""
    return page_nbytes // (world_size * LINE_NBYTES)


def has_arrived(count: int, expected: int) -> bool:
    """Cyclic comparison of two 32-bit counts: right across the wrap from 2**32 - 1 to 0."""
    return (count - expected) & COUNT_MASK < 0x8000_0000
