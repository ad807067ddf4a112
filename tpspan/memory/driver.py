"""The memory driver as the rest of tpspan sees it: addresses and memory as separate things.

Both backends keep the same rules, which are those of CUDA's virtual memory management (CUDA driver
API reference, section "Virtual Memory Management"): sizes and addresses are whole pages, a block is
mapped whole and unmapped whole, a new mapping has no right until ``protect`` gives one.
"""

from __future__ import annotations

import enum
import threading
from typing import Protocol

import torch

PAGE_NBYTES = 2 << 20
"""The page of both backends: CUDA's granularity since Volta, taken over by the host."""

ADDRESS_SPACE_LOCK = threading.RLock()
"""Held around every call that changes the address space of this process (invariant 8)."""


class Right(enum.Enum):
    """What a rank may do through one of its mappings."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read-write"


class Driver(Protocol):
    """The calls a backend must offer; every failure is raised as a ``DriverError`` with advice.

    Handles are opaque integers that stand for physical memory; addresses are those of this process.
    All sizes are bytes and multiples of ``page_nbytes``.
    """

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"host"``."""

    @property
    def device(self) -> torch.device:
        """The device whose kernels use the mappings, and on which blocks are created."""

    @property
    def page_nbytes(self) -> int:
        """The granularity of sizes and addresses."""

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses with nothing behind it; return its first address."""

    def free(self, address: int, nbytes: int) -> None:
        """Give a whole reserved range back; nothing may be mapped in it."""

    def create(self, nbytes: int, on_host: bool = False) -> int:
        """Create memory on the device (or on the NUMA node nearest to it); return a handle."""

    def release(self, handle: int) -> None:
        """Drop the handle; the memory goes when its last mapping and foreign handle have gone."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put the whole memory of ``handle`` at ``address``, with ``Right.NONE``."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo exactly one ``map``; not ordered with streams, so wait for a fence first."""

    def is_mapped(self, address: int) -> bool:
        """Whether a mapping begins at an address."""

    def protect(self, address: int, nbytes: int, right: Right) -> None:
        """Set the right of a range of whole mappings that follow each other without a gap."""

    def exchange(self, first: int, second: int, nbytes: int) -> bool:
        """Let two whole mappings of one size trade memory and rights, page tables included.

        Returns:
            False, and nothing is done, where there is no quicker way than to unmap and map.
        """

    def replace(self, address: int, nbytes: int, handle: int, right: Right) -> bool:
        """Put the memory of ``handle`` where a whole mapping is, with a right.

        On failure the old memory, the new or none is mapped there, perhaps without a right:
        ``is_mapped`` tells.

        Returns:
            False, and nothing is done, where there is no quicker way than to unmap and map.
        """

    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor for the memory; the caller closes it."""

    def import_fd(self, fd: int, nbytes: int) -> int:
        """Return a handle for another process's memory; the descriptor stays the caller's."""

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy between addresses: in order of ``stream`` on CUDA, done on return on the host."""

    def copy_up(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from host memory to the device without its processors, if two bytes or more."""

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes where blocks are created."""

    def is_capturing(self, stream: int) -> bool:
        """Say whether the stream is being captured into a graph."""
