"""Memory of one process: blocks, addresses, and the mappings between them.

Stands on ``tpspan.errors`` alone. The CUDA driver is in ``tpspan.memory.cuda``, the host driver in
``tpspan.memory.host``; everything else here works on either.
"""

from tpspan.memory.block import Block
from tpspan.memory.driver import ADDRESS_SPACE_LOCK, PAGE_NBYTES, Driver, Right
from tpspan.memory.pool import BlockPool, PoolStats
from tpspan.memory.reservation import Mapping, Reservation

__all__ = [
    "ADDRESS_SPACE_LOCK",
    "PAGE_NBYTES",
    "Block",
    "BlockPool",
    "Driver",
    "Mapping",
    "PoolStats",
    "Reservation",
    "Right",
]
