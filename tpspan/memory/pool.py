"""Blocks kept for reuse: creating memory costs ten times what mapping it does."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

from tpspan.errors import OutOfMemoryError
from tpspan.memory.block import Block
from tpspan.memory.closing import close_each
from tpspan.memory.driver import Driver


@dataclass(frozen=True)
class PoolStats:
    """Counts since the pool was made; ``held_nbytes`` is what lies in it now."""

    num_created: int
    num_reused: int
    held_nbytes: int


class BlockPool:
    """Free blocks of one driver, by size.

    A block comes back only after every rank that mapped it has said so (invariant 6). A reused
    block still holds its last user's bytes.

    Args:
        driver: creates the blocks.
        max_held_nbytes: give blocks beyond this back to the driver instead of keeping them.
    """

    def __init__(self, driver: Driver, *, max_held_nbytes: int = 1 << 30) -> None:
        self.driver = driver
        self.max_held_nbytes = max_held_nbytes
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._lock = threading.Lock()
        self._held_nbytes = 0
        self._num_created = 0
        self._num_reused = 0

    def take(self, nbytes: int) -> Block:
        """Return a block of exactly ``nbytes``, a kept one if there is one.

        Raises:
            OutOfMemoryError: none is left even after all kept blocks were given back.
            DriverError: the size is not whole pages.
        """
        with self._lock:
            if self._free[nbytes]:
                self._held_nbytes -= nbytes
                self._num_reused += 1
                return self._free[nbytes].pop()
        try:
            block = Block.create(self.driver, nbytes)
        except OutOfMemoryError:
            self.trim()
            block = Block.create(self.driver, nbytes)
        with self._lock:
            self._num_created += 1
        return block

    def give(self, block: Block) -> None:
        """Take back a block that nobody maps any more.

        Raises:
            ValueError: the block is mapped, imported, closed, of another driver, or here already.
        """
        is_foreign = block.is_imported or block.driver is not self.driver
        if block.num_mappings or block.is_closed or is_foreign:
            raise ValueError(f"{block!r} cannot go back to this pool")
        with self._lock:
            if block in self._free[block.nbytes]:
                raise ValueError(f"{block!r} is in this pool already")
            if self._held_nbytes + block.nbytes <= self.max_held_nbytes:
                self._held_nbytes += block.nbytes
                self._free[block.nbytes].append(block)
                return
        block.close()

    def trim(self) -> None:
        """Give every kept block back to the driver."""
        with self._lock:
            blocks = [block for kept in self._free.values() for block in kept]
            self._free.clear()
            self._held_nbytes = 0
        close_each(block.close for block in blocks)

    def close(self) -> None:
        """The same as ``trim``: a pool may be used again."""
        self.trim()

    def stats(self) -> PoolStats:
        """Return the counts so far."""
        with self._lock:
            return PoolStats(self._num_created, self._num_reused, self._held_nbytes)
