"""Addresses without memory, and the mappings that put blocks behind them."""

from __future__ import annotations

import contextlib
import warnings
from typing import Self

from tpspan.errors import ClosedError, DriverError, InUseError
from tpspan.memory.block import Block
from tpspan.memory.closing import close_each
from tpspan.memory.driver import ADDRESS_SPACE_LOCK, Driver, Right


class Mapping:
    """A block at an offset of a reservation, with a right. Made by ``Reservation.map``.

    Attributes:
        reservation, offset_bytes, block: what is mapped where.
    """

    def __init__(self, reservation: Reservation, offset_bytes: int, block: Block) -> None:
        self.reservation = reservation
        self.offset_bytes = offset_bytes
        self.block = block
        self._right = Right.NONE
        self._is_closed = False

    @property
    def address(self) -> int:
        """The first address in this process."""
        return self.reservation.address + self.offset_bytes

    @property
    def nbytes(self) -> int:
        """The size of the block."""
        return self.block.nbytes

    @property
    def right(self) -> Right:
        """What may be done through this mapping."""
        return self._right

    @property
    def is_closed(self) -> bool:
        """Whether the block has been unmapped."""
        return self._is_closed

    def protect(self, right: Right) -> None:
        """Change the right of this mapping alone; others of the same block keep theirs."""
        self.reservation.protect(right, self.offset_bytes, self.nbytes)

    def close(self) -> None:
        """Unmap the block; the caller has waited for everything that uses it (invariant 5)."""
        if self._is_closed:
            return
        with ADDRESS_SPACE_LOCK:
            self.block.driver.unmap(self.address, self.nbytes)
            self._forget()

    def _forget(self) -> None:
        self._is_closed = True
        self.block._num_mappings -= 1
        del self.reservation._mappings[self.offset_bytes]

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self._right.value
        return f"<Mapping at {self.offset_bytes}, {self.nbytes} bytes, {state}>"


class Reservation:
    """A contiguous range of this process's addresses.

    Args:
        driver: the driver whose blocks will be mapped.
        nbytes: the size, a positive multiple of the driver's page.

    Raises:
        DriverError: the size is not whole pages, or no such range is free.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self._mappings: dict[int, Mapping] = {}
        self._address: int | None = None
        with ADDRESS_SPACE_LOCK:
            self._address = driver.reserve(nbytes)

    @property
    def address(self) -> int:
        """The first address; it is this process's own and must not travel to other ranks."""
        if self._address is None:
            raise ClosedError(f"reservation of {self.nbytes} bytes was closed")
        return self._address

    @property
    def is_closed(self) -> bool:
        """Whether the addresses have been given back."""
        return self._address is None

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """The live mappings, by offset."""
        return tuple(self._mappings[offset] for offset in sorted(self._mappings))

    def map(self, offset_bytes: int, block: Block) -> Mapping:
        """Map a whole block at an offset, without any right yet.

        Raises:
            ValueError: the place does not lie inside the reservation.
            DriverError: the place is not whole pages, or is taken.
            ClosedError: the block or the reservation was closed.
        """
        self._check_inside(f"a block of {block.nbytes} bytes", offset_bytes, block.nbytes)
        with ADDRESS_SPACE_LOCK:
            self.driver.map(self.address + offset_bytes, block.nbytes, block.handle)
            mapping = Mapping(self, offset_bytes, block)
            self._mappings[offset_bytes] = mapping
            block._num_mappings += 1
        return mapping

    def protect(self, right: Right, offset_bytes: int = 0, nbytes: int | None = None) -> None:
        """Set the right of the mappings that fill a range exactly, in one call of the driver.

        Raises:
            ValueError: the range does not lie inside the reservation.
            DriverError: the range is not filled by whole mappings, or the driver refused.
        """
        nbytes = self.nbytes - offset_bytes if nbytes is None else nbytes
        self._check_inside(f"a range of {nbytes} bytes", offset_bytes, nbytes)
        with ADDRESS_SPACE_LOCK:
            self.driver.protect(self.address + offset_bytes, nbytes, right)
            at = offset_bytes
            while at < offset_bytes + nbytes:
                mapping = self._mappings[at]
                mapping._right = right
                at += mapping.nbytes

    def exchange(self, first: Mapping, second: Mapping) -> bool:
        """Let two mappings of one size trade their blocks, and their rights.

        Returns:
            False, and nothing was done, if the driver has no quick way to do that.

        Raises:
            DriverError: the sizes differ, or the driver refused.
        """
        with ADDRESS_SPACE_LOCK:
            if not self.driver.exchange(first.address, second.address, first.nbytes):
                return False
            first.block, second.block = second.block, first.block
            first._right, second._right = second._right, first._right
        return True

    def replace(self, mapping: Mapping, block: Block) -> bool:
        """Put another block of the same size behind a mapping's address, with its right.

        If the driver refuses, the mapping is closed, as far as the driver lets it.

        Returns:
            False, and nothing was done, if the driver has no quick way to do that.

        Raises:
            ValueError: the sizes differ.
            DriverError: the driver refused.
            ClosedError: the block was closed.
        """
        if block.nbytes != mapping.nbytes:
            raise ValueError(f"{block.nbytes} bytes do not fit a mapping of {mapping.nbytes} bytes")
        with ADDRESS_SPACE_LOCK:
            address, nbytes, right = mapping.address, mapping.nbytes, mapping.right
            try:
                if not self.driver.replace(address, nbytes, block.handle, right):
                    return False
            except DriverError:
                if not self.driver.is_mapped(address):
                    mapping._forget()
                with contextlib.suppress(DriverError):
                    mapping.close()
                raise
            mapping.block._num_mappings -= 1
            mapping.block = block
            block._num_mappings += 1
        return True

    def close(self) -> None:
        """Give the addresses back; once is enough, twice does nothing.

        Raises:
            InUseError: blocks are still mapped here.
        """
        if self._address is None:
            return
        if self._mappings:
            raise InUseError(f"{len(self._mappings)} blocks are still mapped in the reservation")
        with ADDRESS_SPACE_LOCK:
            self.driver.free(self._address, self.nbytes)
        self._address = None

    def close_all(self) -> None:
        """Close every mapping, then the reservation; all are tried, the first failure is raised."""
        close_each([*(mapping.close for mapping in self.mappings), self.close])

    def _check_inside(self, what: str, offset_bytes: int, nbytes: int) -> None:
        # The driver would not notice: the addresses around may be another reservation's.
        if not 0 <= offset_bytes <= self.nbytes - nbytes:
            raise ValueError(
                f"{what} at offset {offset_bytes} does not lie inside a reservation of "
                f"{self.nbytes} bytes"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close_all()

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:  # invariant 10: no driver call from here
            warnings.warn(
                f"unclosed reservation of {self.nbytes} bytes", ResourceWarning, stacklevel=2
            )
