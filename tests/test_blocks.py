"""Blocks, reservations, mappings and the pool: one owner each, and what they say when misused."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable

import pytest

from drivers import ON_EACH_DRIVER
from faulty import NOTHING, FaultyDriver, Held
from tpspan.errors import ClosedError, DriverError, InUseError, OutOfMemoryError
from tpspan.memory import PAGE_NBYTES, Block, BlockPool, Driver, Reservation, Right
from tpspan.memory.host import HostDriver

PAGE = PAGE_NBYTES
MakeDriver = Callable[[], Driver]


@ON_EACH_DRIVER
def test_states_from_the_first_call_to_the_last(make_driver: MakeDriver) -> None:
    driver = make_driver()
    with FaultyDriver(driver) as watch:
        block = Block.create(driver, 2 * PAGE)
        assert (block.nbytes, block.is_imported, block.is_closed) == (2 * PAGE, False, False)
        assert watch.held == Held(handles=1)
        reservation = Reservation(driver, 4 * PAGE)
        assert (reservation.nbytes, reservation.mappings, reservation.is_closed) == (
            4 * PAGE,
            (),
            False,
        )
        mapping = reservation.map(PAGE, block)
        assert mapping.address == reservation.address + PAGE
        assert (mapping.right, mapping.is_closed, block.num_mappings) == (Right.NONE, False, 1)
        rights = [mapping.right]
        mapping.protect(Right.READ_WRITE)
        rights.append(mapping.right)
        reservation.protect(Right.READ, PAGE, 2 * PAGE)
        rights.append(mapping.right)
        assert rights == [Right.NONE, Right.READ_WRITE, Right.READ]
        assert reservation.mappings == (mapping,)
        assert watch.held == Held(1, 1, 1)

        with pytest.raises(InUseError, match="still mapped in 1 places"):
            block.close()
        with pytest.raises(InUseError, match="1 blocks are still mapped"):
            reservation.close()
        assert watch.held == Held(1, 1, 1)

        for close in (mapping.close, reservation.close, block.close):
            close()
            num_calls = len(watch.calls)
            close()
            assert len(watch.calls) == num_calls, "closing again calls nobody"
        assert (mapping.is_closed, reservation.is_closed, block.is_closed) == (True, True, True)
        assert block.num_mappings == 0
        assert watch.held == NOTHING
        with pytest.raises(ClosedError, match="reservation"):
            reservation.map(0, block)
        with pytest.raises(ClosedError, match="block"):
            block.export()
        with Reservation(driver, 2 * PAGE) as another, pytest.raises(ClosedError, match="block"):
            another.map(0, block)
        assert watch.held == NOTHING


@ON_EACH_DRIVER
def test_one_block_in_two_places_with_two_rights(make_driver: MakeDriver) -> None:
    driver = make_driver()
    with Block.create(driver, PAGE) as block, Reservation(driver, 2 * PAGE) as reservation:
        first, second = reservation.map(0, block), reservation.map(PAGE, block)
        assert block.num_mappings == 2
        first.protect(Right.READ_WRITE)
        second.protect(Right.READ)
        assert (first.right, second.right) == (Right.READ_WRITE, Right.READ)
        reservation.protect(Right.READ)
        assert (first.right, second.right) == (Right.READ, Right.READ)


@ON_EACH_DRIVER
@pytest.mark.parametrize("offset", [-PAGE, PAGE, 2 * PAGE, 1 << 60])
def test_nothing_is_done_outside_the_reservation(make_driver: MakeDriver, offset: int) -> None:
    """The addresses next to it may be another reservation's, where the driver would agree."""
    driver = make_driver()
    with (
        Block.create(driver, 2 * PAGE) as block,
        Reservation(driver, 2 * PAGE) as reservation,
        FaultyDriver(driver) as watch,
    ):
        with pytest.raises(ValueError, match="does not lie inside"):
            reservation.map(offset, block)
        with pytest.raises(ValueError, match="does not lie inside"):
            reservation.protect(Right.READ, offset, 2 * PAGE)
        assert watch.calls == []
        assert block.num_mappings == 0


@ON_EACH_DRIVER
def test_finalizers_warn_and_call_no_driver(make_driver: MakeDriver) -> None:
    """Invariant 10: whatever is dropped unclosed is told, not freed by the collector."""
    driver = make_driver()
    with FaultyDriver(driver) as watch:
        block, reservation = Block.create(driver, PAGE), Reservation(driver, 2 * PAGE)
        handle, address = block.handle, reservation.address
        num_calls = len(watch.calls)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            del block, reservation
            gc.collect()
        assert len(watch.calls) == num_calls
        assert {(warning.category, str(warning.message)) for warning in heard} == {
            (ResourceWarning, f"unclosed block of {PAGE} bytes"),
            (ResourceWarning, f"unclosed reservation of {2 * PAGE} bytes"),
        }
        assert watch.held == Held(1, 0, 1)
    driver.release(handle)
    driver.free(address, 2 * PAGE)


def test_an_object_whose_making_failed_does_not_warn() -> None:
    driver = HostDriver()
    for make in (lambda: Block.create(driver, 5), lambda: Reservation(driver, 5)):
        with pytest.raises(DriverError):
            make()
    gc.collect()


@ON_EACH_DRIVER
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_close_all_tries_all_and_raises_the_first(make_driver: MakeDriver, nth: int) -> None:
    driver = make_driver()
    blocks = [Block.create(driver, PAGE) for _ in range(3)]
    reservation = Reservation(driver, 3 * PAGE)
    for index, block in enumerate(blocks):
        reservation.map(index * PAGE, block)
    with FaultyDriver(driver) as watch:
        watch.fail(nth)
        with pytest.raises(DriverError, match="INJECTED"):
            reservation.close_all()
        assert watch.num_failed == 1
        assert sum(block.num_mappings for block in blocks) == (nth <= 3)
        assert not reservation.is_closed
        reservation.close_all()
        assert watch.held == Held(mappings=-3, reservations=-1)
    for block in blocks:
        block.close()


@ON_EACH_DRIVER
def test_a_failed_call_changes_nothing(make_driver: MakeDriver) -> None:
    driver = make_driver()
    block, reservation = Block.create(driver, PAGE), Reservation(driver, PAGE)
    with FaultyDriver(driver) as watch:

        def failing(step: Callable[[], object]) -> None:
            watch.fail(1)
            with pytest.raises(DriverError, match="INJECTED"):
                step()

        failing(lambda: reservation.map(0, block))
        assert (reservation.mappings, block.num_mappings) == ((), 0)
        mapping = reservation.map(0, block)
        failing(lambda: mapping.protect(Right.READ_WRITE))
        assert mapping.right is Right.NONE
        failing(mapping.close)
        assert (mapping.is_closed, block.num_mappings) == (False, 1)
        mapping.close()
        failing(block.close)
        assert not block.is_closed
        failing(reservation.close)
        assert not reservation.is_closed
        block.close()
        reservation.close()


@ON_EACH_DRIVER
def test_the_pool_makes_a_block_once(make_driver: MakeDriver) -> None:
    driver = make_driver()
    pool = BlockPool(driver, max_held_nbytes=3 * PAGE)
    with FaultyDriver(driver) as watch:
        small, large = pool.take(PAGE), pool.take(2 * PAGE)
        assert pool.stats().num_created == 2
        pool.give(small)
        pool.give(large)
        assert (pool.stats().num_reused, pool.stats().held_nbytes) == (0, 3 * PAGE)
        assert pool.take(2 * PAGE) is large
        assert pool.take(PAGE) is small
        assert pool.stats().num_reused == 2
        assert pool.stats().held_nbytes == 0
        third = pool.take(PAGE)
        for block in (small, large, third):
            pool.give(block)
        assert third.is_closed, "there was no room left for it"
        assert watch.held == Held(handles=2)
        pool.close()
        assert (watch.held, pool.stats().held_nbytes) == (NOTHING, 0)
        again = pool.take(PAGE)  # a closed pool may be used again
        again.close()
        assert pool.stats().num_created == 4


@ON_EACH_DRIVER
def test_the_pool_takes_only_what_is_free(make_driver: MakeDriver) -> None:
    """Invariant 6: what is mapped, or somebody else's, is not handed out again."""
    driver = make_driver()
    pool = BlockPool(driver)
    block, closed = pool.take(PAGE), pool.take(PAGE)
    closed.close()
    foreign = Block.create(HostDriver(), PAGE)
    fd = block.export()
    imported = Block.from_fd(driver, fd, PAGE)
    os.close(fd)
    with Reservation(driver, PAGE) as reservation:
        reservation.map(0, block)
        for refused in (block, closed, foreign, imported):
            with pytest.raises(ValueError, match="cannot go back"):
                pool.give(refused)
    pool.give(block)
    with pytest.raises(ValueError, match="already"):
        pool.give(block)
    assert pool.stats().held_nbytes == PAGE
    pool.close()
    foreign.close()
    imported.close()


def test_the_pool_gives_kept_blocks_back_before_memory_runs_out() -> None:
    driver = HostDriver()
    pool = BlockPool(driver)
    pool.give(pool.take(PAGE))
    create, refused = driver.create, []

    def once(nbytes: int, on_host: bool = False) -> int:
        if pool.stats().held_nbytes:
            refused.append(nbytes)
            raise OutOfMemoryError("memfd_create", 12, "ENOMEM", requested_nbytes=nbytes)
        return create(nbytes, on_host)

    driver.create = once  # type: ignore[method-assign]
    block = pool.take(2 * PAGE)
    assert refused == [2 * PAGE]
    assert pool.stats().held_nbytes == 0
    block.close()


@ON_EACH_DRIVER
def test_one_thread_at_a_time_changes_the_address_space(make_driver: MakeDriver) -> None:
    """Invariant 8: every such call is made under the one lock of the process."""
    driver = make_driver()
    pool = BlockPool(driver)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                block = pool.take(PAGE)
                fd = block.export()
                twin = Block.from_fd(driver, fd, PAGE)
                os.close(fd)
                with Reservation(driver, 2 * PAGE) as reservation:
                    reservation.map(0, block)
                    reservation.map(PAGE, twin).protect(Right.READ_WRITE)
                twin.close()
                pool.give(block)
        except BaseException as error:
            errors.append(error)

    with FaultyDriver(driver) as watch:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pool.close()
        assert errors == []
        assert watch.unlocked == []
        assert watch.concurrent == []
        assert watch.held == NOTHING
        assert len(watch.named("map")) == 160
