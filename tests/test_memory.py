"""The contract of a memory driver, the same on every backend."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from drivers import ON_EACH_DRIVER, is_readable, is_writable, open_descriptors
from tpspan.errors import DriverError, OutOfMemoryError
from tpspan.kernels import host_remap
from tpspan.memory import PAGE_NBYTES, Driver, Right
from tpspan.memory.host import HostDriver

PAGE = PAGE_NBYTES
MakeDriver = Callable[[], Driver]


@contextmanager
def mapped(driver: Driver, num_pages: int = 2) -> Iterator[tuple[int, int]]:
    """One block of some pages in the middle of a reservation with a free page on both sides."""
    nbytes = num_pages * PAGE
    base = driver.reserve(nbytes + 2 * PAGE)
    handle = driver.create(nbytes)
    driver.map(base + PAGE, nbytes, handle)
    yield base + PAGE, handle
    driver.unmap(base + PAGE, nbytes)
    driver.release(handle)
    driver.free(base, nbytes + 2 * PAGE)


def refusal(step: Callable[..., object], *args: Any) -> DriverError:
    """What a step is refused with; every refusal says what to do."""
    with pytest.raises(DriverError) as caught:
        step(*args)
    error = caught.value
    assert error.advice, error
    assert error.code_name in str(error)
    assert error.call in str(error)
    assert error.advice in str(error)
    return error


@ON_EACH_DRIVER
@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE - 1, PAGE + 4096])
def test_sizes_are_whole_pages(make_driver: MakeDriver, nbytes: int) -> None:
    driver = make_driver()
    error = refusal(lambda: driver.create(nbytes))
    assert error.arguments["nbytes"] == nbytes
    assert str(PAGE) in error.advice
    error = refusal(lambda: driver.reserve(nbytes))
    assert error.arguments["nbytes"] == nbytes


@ON_EACH_DRIVER
def test_a_block_is_mapped_whole_into_free_addresses(make_driver: MakeDriver) -> None:
    """One page has one place: invariant 1."""
    driver = make_driver()
    with mapped(driver) as (address, handle):
        other = driver.create(PAGE)
        for step in (
            lambda: driver.map(address - PAGE, PAGE, handle),  # a part of it
            lambda: driver.map(address - PAGE, 2 * PAGE, handle),  # over another mapping
            lambda: driver.map(address, PAGE, other),
            lambda: driver.map(address + PAGE, PAGE, other),
            lambda: driver.map(address - 4096, PAGE, other),  # not on a page
        ):
            assert refusal(step).code_name == "CUDA_ERROR_INVALID_VALUE"
        driver.map(address - PAGE, PAGE, other)  # it was none of the block's fault
        driver.unmap(address - PAGE, PAGE)
        driver.release(other)


@ON_EACH_DRIVER
def test_a_block_is_unmapped_whole(make_driver: MakeDriver) -> None:
    """Invariant 1: whole blocks only."""
    driver = make_driver()
    with mapped(driver) as (address, _):
        for at, nbytes in ((address, PAGE), (address + PAGE, PAGE), (address - PAGE, PAGE)):
            error = refusal(driver.unmap, at, nbytes)
            assert "whole" in error.advice
        driver.protect(address, 2 * PAGE, Right.READ_WRITE)


@ON_EACH_DRIVER
def test_rights_are_given_where_blocks_are(make_driver: MakeDriver) -> None:
    driver = make_driver()
    with mapped(driver) as (address, _):
        for at, nbytes in (
            (address - PAGE, 2 * PAGE),
            (address - PAGE, 4 * PAGE),
            (address + PAGE, 2 * PAGE),
        ):
            error = refusal(driver.protect, at, nbytes, Right.READ_WRITE)
            assert "mapped" in error.advice


@ON_EACH_DRIVER
def test_a_released_block_cannot_be_used(make_driver: MakeDriver) -> None:
    driver = make_driver()
    handle = driver.create(PAGE)
    base = driver.reserve(PAGE)
    driver.release(handle)
    for step in (
        lambda: driver.release(handle),
        lambda: driver.map(base, PAGE, handle),
        lambda: driver.export_fd(handle),
    ):
        error = refusal(step)
        assert error.code_name == "CUDA_ERROR_INVALID_HANDLE"
        assert "released" in error.advice
    driver.free(base, PAGE)


@ON_EACH_DRIVER
def test_memory_lives_as_long_as_its_mapping(make_driver: MakeDriver) -> None:
    driver = make_driver()
    handle, base = driver.create(PAGE), driver.reserve(PAGE)
    driver.map(base, PAGE, handle)
    driver.release(handle)
    driver.protect(base, PAGE, Right.READ_WRITE)
    driver.copy(base, base + 64, 8)
    if driver.name == "cuda":
        torch.cuda.synchronize()
    driver.unmap(base, PAGE)
    driver.free(base, PAGE)


@ON_EACH_DRIVER
def test_addresses_are_freed_whole_and_empty(make_driver: MakeDriver) -> None:
    driver = make_driver()
    if driver.name == "cuda":
        pytest.skip("CUDA frees a range with mappings in it; Reservation refuses there")
    with mapped(driver) as (address, _):
        refusal(lambda: driver.free(address - PAGE, 4 * PAGE))
        refusal(lambda: driver.free(address - PAGE, PAGE))
        refusal(lambda: driver.free(address, 3 * PAGE))


@ON_EACH_DRIVER
def test_mappings_trade_their_memory_where_that_is_quick(make_driver: MakeDriver) -> None:
    """Invariant 1: whole mappings of one size, and each block stays at one place."""
    driver = make_driver()
    base = driver.reserve(5 * PAGE)
    first, second, other = base, base + 2 * PAGE, base + 4 * PAGE
    handles = [driver.create(2 * PAGE), driver.create(2 * PAGE), driver.create(PAGE)]
    for address, handle in zip((first, second, other), handles, strict=True):
        nbytes = PAGE if address == other else 2 * PAGE
        driver.map(address, nbytes, handle)
        driver.protect(address, nbytes, Right.READ_WRITE)
    if driver.name == "cuda":
        assert not driver.exchange(first, second, 2 * PAGE)
    else:
        for address, value in ((first, 1), (second, 2), (other, 3)):
            ctypes.memset(address, value, PAGE)
        driver.protect(second, 2 * PAGE, Right.READ)
        descriptors = len(list(open_descriptors()))
        for turn in range(1, 4):
            assert driver.exchange(first, second, 2 * PAGE)
            seen = [ctypes.string_at(each + PAGE - 1, 1)[0] for each in (first, second, other)]
            assert seen == ([2, 1, 3] if turn % 2 else [1, 2, 3])
            assert is_writable(second if turn % 2 else first), "the right goes along"
            assert not is_writable(first if turn % 2 else second)
            ctypes.memset(second if turn % 2 else first, 1, PAGE)
        assert len(list(open_descriptors())) == descriptors
        for wrong in [(first, other, 2 * PAGE), (first, first, 2 * PAGE), (first, second, PAGE)]:
            refusal(driver.exchange, *wrong)
    for address, handle in zip((first, second, other), handles, strict=True):
        driver.unmap(address, PAGE if address == other else 2 * PAGE)
        assert not is_readable(address)
        driver.release(handle)
    driver.free(base, 5 * PAGE)


@ON_EACH_DRIVER
def test_a_mapping_gets_other_memory_in_one_step(make_driver: MakeDriver) -> None:
    """Invariants 1 and 5: where there is no such step nothing is done."""
    driver = make_driver()
    spare = driver.create(2 * PAGE)
    with mapped(driver) as (address, handle):
        driver.protect(address, 2 * PAGE, Right.READ_WRITE)
        if driver.name != "cuda":
            assert not driver.replace(address, 2 * PAGE, spare, Right.READ_WRITE)
        else:
            assert not driver.replace(address, 2 * PAGE, spare, Right.READ_WRITE)
            vars(driver)["remap"] = host_remap.remap
            word = torch.zeros(1, dtype=torch.int32).pin_memory()
            for turn in range(6):
                other = (spare, handle)[turn % 2]
                write_word(driver, word, address, 10 + turn)
                assert driver.replace(address, 2 * PAGE, other, Right.READ_WRITE)
                if turn:
                    assert read_word(driver, word, address) == 9 + turn
            refusal(driver.replace, address, PAGE, spare, Right.READ_WRITE)
            assert read_word(driver, word, address) == 14
    driver.release(spare)


def read_word(driver: Driver, word: torch.Tensor, address: int) -> int:
    driver.copy(word.data_ptr(), address, 4)
    torch.cuda.synchronize(driver.device)
    return int(word)


def write_word(driver: Driver, word: torch.Tensor, address: int, value: int) -> None:
    word.fill_(value)
    driver.copy(address, word.data_ptr(), 4)
    torch.cuda.synchronize(driver.device)


@ON_EACH_DRIVER
def test_a_foreign_descriptor_is_refused(make_driver: MakeDriver) -> None:
    driver = make_driver()
    file = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(file, PAGE)
    before = set(open_descriptors())
    refusal(lambda: driver.import_fd(file, PAGE))
    os.close(file)
    assert refusal(lambda: driver.import_fd(file, PAGE)).code_name != "CUDA_SUCCESS"
    assert set(open_descriptors()) == before - {file}


@ON_EACH_DRIVER
def test_an_exported_block_is_the_same_memory(make_driver: MakeDriver) -> None:
    driver = make_driver()
    with mapped(driver) as (address, handle):
        driver.protect(address, 2 * PAGE, Right.READ_WRITE)
        fd = driver.export_fd(handle)
        twin = driver.import_fd(fd, 2 * PAGE)
        os.close(fd)
        base = driver.reserve(2 * PAGE)
        driver.map(base, 2 * PAGE, twin)
        driver.protect(base, 2 * PAGE, Right.READ)
        if driver.name == "host":
            ctypes.memset(address, 7, 2 * PAGE)
            assert ctypes.string_at(base, 2 * PAGE) == b"\x07" * (2 * PAGE)
        driver.unmap(base, 2 * PAGE)
        driver.free(base, 2 * PAGE)
        driver.release(twin)


@ON_EACH_DRIVER
def test_few_bytes_come_up_from_the_host(make_driver: MakeDriver) -> None:
    driver = make_driver()
    for nbytes in (0, 1, 2, 3, 17, 1000, 1021, 1024, 1025, 4096):
        source = torch.arange(nbytes + 2).to(torch.uint8)
        target = torch.full((nbytes + 2,), 255, dtype=torch.uint8, device=driver.device)
        if target.is_cuda:
            source = source.pin_memory()
        stream = torch.cuda.current_stream().cuda_stream if target.is_cuda else 0
        driver.copy_up(target.data_ptr() + 1, source.data_ptr() + 1, nbytes, stream)
        expected = [255, *source[1 : nbytes + 1].tolist(), 255]
        assert target.tolist() == expected, nbytes


def test_an_import_of_another_size_is_refused() -> None:
    driver = HostDriver()
    handle = driver.create(PAGE)
    fd = driver.export_fd(handle)
    assert "descriptor" in refusal(lambda: driver.import_fd(fd, 2 * PAGE)).advice
    os.close(fd)
    driver.release(handle)


def test_the_host_backend_allows_exactly_the_right() -> None:
    """As strict as CUDA: nothing is allowed before a right is given, nor after unmapping."""
    driver = HostDriver()
    base, handle = driver.reserve(PAGE), driver.create(PAGE)

    def allowed() -> tuple[bool, bool]:
        return is_readable(base), is_writable(base)

    assert allowed() == (False, False)
    driver.map(base, PAGE, handle)
    assert allowed() == (False, False)
    for right, expected in (
        (Right.READ_WRITE, (True, True)),
        (Right.READ, (True, False)),
        (Right.NONE, (False, False)),
        (Right.READ_WRITE, (True, True)),
    ):
        driver.protect(base, PAGE, right)
        assert allowed() == expected
    driver.unmap(base, PAGE)
    assert allowed() == (False, False)
    driver.release(handle)
    driver.free(base, PAGE)


def test_host_addresses_are_aligned_to_pages_and_do_not_overlap() -> None:
    driver = HostDriver()
    bases = [driver.reserve(3 * PAGE) for _ in range(20)]
    assert all(base % PAGE == 0 for base in bases)
    assert all(b - a >= 3 * PAGE for a, b in zip(sorted(bases), sorted(bases)[1:], strict=False))
    for base in bases:
        driver.free(base, 3 * PAGE)
    refusal(lambda: driver.free(bases[0], 3 * PAGE))


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 47, 1 << 62, 1 << 64, 1 << 70])
def test_more_addresses_than_there_are(nbytes: int) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        driver = HostDriver()
        for _ in range(4):  # the smallest of the sizes fits once
            driver.reserve(nbytes)
    assert caught.value.requested_nbytes == nbytes
    if nbytes == 1 << 46:
        driver.free(driver._reserved._starts[0], nbytes)


def test_no_descriptor_left() -> None:
    driver = HostDriver()
    before = set(open_descriptors())
    handle = driver.create(PAGE)
    fd = driver.export_fd(handle)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1, hard))
    taken = []
    try:
        with pytest.raises(OSError):
            while True:  # below the limit there may be free numbers
                taken.append(os.dup(0))
        errors = [
            refusal(lambda: driver.create(PAGE)),
            refusal(lambda: driver.export_fd(handle)),
            refusal(lambda: driver.import_fd(fd, PAGE)),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    assert {error.code_name for error in errors} == {"EMFILE"}
    assert all("ulimit -n" in error.advice for error in errors)
    os.close(fd)
    driver.release(handle)
    assert set(open_descriptors()) == before


def test_out_of_memory_says_how_much_there_was() -> None:
    driver = HostDriver()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = set(open_descriptors())
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, hard))
    try:
        driver.release(driver.create(8 * PAGE))
        with pytest.raises(OutOfMemoryError) as caught:
            driver.create(9 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.requested_nbytes == 9 * PAGE
    assert error.free_nbytes > 0
    assert error.used_nbytes > 0
    assert "more ranks" in error.advice
    assert set(open_descriptors()) == before


def test_memory_info_is_of_this_machine() -> None:
    free, total = HostDriver().memory_info()
    assert 0 < free <= total
