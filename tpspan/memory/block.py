"""Physical memory: the thing that is owned, exported, imported and mapped whole."""

from __future__ import annotations

import warnings
from typing import Self

from tpspan.errors import ClosedError, InUseError
from tpspan.memory.driver import ADDRESS_SPACE_LOCK, Driver


class Block:
    """One piece of physical memory, of this process or imported from another.

    The memory itself lives until every process has closed its block and its mappings: a block
    outlives its creator as long as anybody holds it (invariant 11).

    Attributes:
        driver: the driver that made it.
        nbytes: its size, whole pages.
        is_imported: another process created the memory.
    """

    def __init__(self, driver: Driver, handle: int, nbytes: int, *, is_imported: bool) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.is_imported = is_imported
        self._handle: int | None = handle
        self._num_mappings = 0

    @classmethod
    def create(cls, driver: Driver, nbytes: int, *, on_host: bool = False) -> Block:
        """Create memory of ``nbytes``, a multiple of the page; its content is undefined.

        Args:
            driver: the driver of the device that shall hold it.
            nbytes: the size.
            on_host: take host memory that the GPU can map, on the NUMA node nearest to it.

        Raises:
            OutOfMemoryError: the device has not enough memory left.
            DriverError: the size is not whole pages, or the driver refused.
        """
        with ADDRESS_SPACE_LOCK:
            handle = driver.create(nbytes, on_host)
        return cls(driver, handle, nbytes, is_imported=False)

    @classmethod
    def from_fd(cls, driver: Driver, fd: int, nbytes: int) -> Block:
        """Import another process's memory; the descriptor stays the caller's to close.

        Raises:
            DriverError: the descriptor is not one of a block of ``nbytes``.
        """
        with ADDRESS_SPACE_LOCK:
            handle = driver.import_fd(fd, nbytes)
        return cls(driver, handle, nbytes, is_imported=True)

    @property
    def handle(self) -> int:
        """The driver's handle."""
        if self._handle is None:
            raise ClosedError(f"block of {self.nbytes} bytes was closed")
        return self._handle

    @property
    def num_mappings(self) -> int:
        """In how many places of this process's address space it is mapped."""
        return self._num_mappings

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._handle is None

    def export(self) -> int:
        """Return a new file descriptor for the memory; the caller closes it."""
        with ADDRESS_SPACE_LOCK:
            return self.driver.export_fd(self.handle)

    def close(self) -> None:
        """Give this process's hold on the memory back; once is enough, twice does nothing.

        Raises:
            InUseError: it is still mapped.
        """
        if self._handle is None:
            return
        if self._num_mappings:
            raise InUseError(
                f"block of {self.nbytes} bytes is still mapped in {self._num_mappings} places: "
                "close its mappings first"
            )
        with ADDRESS_SPACE_LOCK:
            self.driver.release(self._handle)
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:  # invariant 10: no driver call from here
            warnings.warn(f"unclosed block of {self.nbytes} bytes", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else f"mapped {self._num_mappings} times"
        kind = "imported" if self.is_imported else "own"
        return f"<Block {kind}, {self.nbytes} bytes, {state}>"
