"""A page or more of every rank, mapped read-write by all: what counters and messages lie in."""

from __future__ import annotations

import contextlib

from tpspan import kernels
from tpspan.memory import Block, Driver, Reservation, Right
from tpspan.spans.exchange import Exchange


class Pages:
    """``world_size`` blocks, the r-th of which is memory of rank r. Collective; all ranks or none.

    Args:
        exchange: passes the pages among the ranks.
        driver: creates and maps them.
        on_host: take host memory that the GPU maps too, so that the CPU may read and write it.
        nbytes: of each rank, whole pages; by default one page.

    Attributes:
        base_address: where the page of rank 0 is mapped in this process.
        page_nbytes: the distance from one rank's page to the next.
    """

    def __init__(
        self,
        exchange: Exchange,
        driver: Driver,
        *,
        on_host: bool = False,
        nbytes: int | None = None,
    ) -> None:
        self.page_nbytes = nbytes or driver.page_nbytes
        sizes = [[self.page_nbytes]] * exchange.world_size
        with contextlib.ExitStack() as undo:

            def create() -> Block:
                made = Block.create(driver, self.page_nbytes, on_host=on_host)
                return undo.enter_context(made)

            def pass_on() -> list[list[Block]]:
                blocks = exchange.all_gather(driver, [own], sizes)
                for rank, (block,) in enumerate(blocks):
                    if rank != exchange.rank:
                        undo.callback(block.close)
                return blocks

            def map_all() -> Reservation:
                reservation = Reservation(driver, exchange.world_size * self.page_nbytes)
                undo.callback(reservation.close_all)
                for rank, (block,) in enumerate(blocks):
                    reservation.map(rank * self.page_nbytes, block)
                reservation.protect(Right.READ_WRITE)
                return reservation

            own = exchange.together("creating pages of counters", create)
            blocks = exchange.together("exchanging pages of counters", pass_on)
            reservation = exchange.together("mapping pages of counters", map_all)
            self._undo = undo.pop_all()
        self.base_address = reservation.address
        self._world_size = exchange.world_size
        self._holders: list[None] = []  # appending and popping is atomic
        self._is_closed = False

    def address_of(self, rank: int) -> int:
        """Where the page of a rank is mapped."""
        return self.base_address + rank * self.page_nbytes

    def counter(self, slot: int, receiver: int, sender: int) -> int:
        """Where the counter of a slot is that ``sender`` writes and ``receiver`` waits on."""
        place = (self.base_address, self.page_nbytes, self._world_size)
        return kernels.counter_address(*place, slot, receiver, sender)

    def hold(self) -> None:
        """Keep the pages mapped until ``let_go``: a signal handler may close them in a call."""
        self._holders.append(None)

    def let_go(self) -> None:
        """The counterpart of ``hold``."""
        self._holders.pop()
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Unmap the pages and drop the blocks; peers that still map this rank's keep reading it."""
        self._is_closed = True
        if not self._holders:
            self._undo.close()
