"""The words in host memory by which the streams of ranks that share a GPU wait for each other.

Each pair of ranks has, for every slot, a flag that is 0 or 1 and a counter; both lie in the page of
the rank that waits. At the end of each page stands what this rank was told of ranks that were late.
"""

from __future__ import annotations

import ctypes

from tpspan.launch.world import World
from tpspan.spans.pages import Pages

FREE, SET = 0, 1
_COUNTER_AT = 8  # beside the flag of the same pair of ranks


class StreamWords:
    """Where the words are, and what they hold.

    Args:
        pages: one of host memory for each rank.
        world: the ranks.

    Attributes:
        rank, world_size: this rank, and how many there are.
        peers: the others, from the right neighbour on around.
        distances: how far on a rank writes in each round of a barrier.
    """

    def __init__(self, pages: Pages, world: World) -> None:
        self._pages = pages
        self.rank, self.world_size = world.rank, world.world_size
        self.peers = [(world.rank + k) % world.world_size for k in range(1, world.world_size)]
        self.distances = [1 << k for k in range((world.world_size - 1).bit_length())]
        ctypes.memset(pages.address_of(self.rank), 0, pages.page_nbytes)
        self._own_marks = memoryview(self._marks(self.rank)).cast("B")
        self._no_marks = bytes(len(self._own_marks))

    def flag(self, slot: int, receiver: int, sender: int) -> int:
        """Address of the flag that ``sender`` sets and ``receiver`` clears."""
        return self._pages.counter(slot, receiver, sender)

    def counter(self, slot: int, receiver: int, sender: int) -> int:
        """Address of the counter that ``sender`` writes and ``receiver`` waits for."""
        size = self.world_size
        return self._pages.counter(slot, receiver % size, sender % size) + _COUNTER_AT

    def arrived(self, slot: int, rank: int) -> int:
        """The number of the last barrier to which a rank's stream has come."""
        return word(self.counter(slot, rank + 1, rank)).value

    def tell(self, missing: set[int]) -> None:
        """Tell all ranks, this one included, whom this rank has missed."""
        for rank in range(self.world_size):
            for peer in missing:
                self._marks(rank)[peer] = 1
            self._marks(rank)[self.world_size + self.rank] = 1

    def told(self) -> tuple[set[int], set[int]]:
        """Who was missed, and who has said so, as far as this rank was told."""
        marks = self._marks(self.rank)
        missed, said = marks[: self.world_size], marks[self.world_size :]
        return ({r for r, m in enumerate(missed) if m}, {r for r, m in enumerate(said) if m})

    def is_well(self) -> bool:
        """Whether nobody was missed; a tenth of a µs, since every barrier asks."""
        return self._own_marks == self._no_marks

    def _marks(self, rank: int) -> ctypes.Array[ctypes.c_uint8]:
        num = 2 * self.world_size
        address = self._pages.address_of(rank) + self._pages.page_nbytes - num
        return (ctypes.c_uint8 * num).from_address(address)


def word(address: int) -> ctypes.c_uint32:
    """What lies at an address, to be read and written."""
    return ctypes.c_uint32.from_address(address)
