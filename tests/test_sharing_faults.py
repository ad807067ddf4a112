"""Every driver call failing in turn: a version comes whole or not at all, and nothing is lost."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tpspan
from bodies.common import failure
from bodies.sharing import PAGE, tensors
from faulty import FaultyDriver
from harness import leaks
from sharing_processes import ON_EACH_DEVICE, keeper_pid, own_keeper, wait_until
from tpspan.errors import DriverError, KeeperError, OutOfMemoryError, UnknownNameError
from tpspan.memory import Driver
from tpspan.sharing import client, starting
from tpspan.sharing.local import local
from tpspan.sharing.mapped import Mapped
from tpspan.sharing.memory import OwnMemory


@pytest.fixture(autouse=True)
def keeper() -> Iterator[str]:
    gc.collect()
    gc.freeze()  # so that a collection after every failure need not walk all that was imported
    try:
        with own_keeper() as directory:
            yield directory
    finally:
        gc.unfreeze()


def each_failing(driver: Driver, step: Callable[[], object], check: Callable[[], None]) -> int:
    """Do a step with its first driver call failing, then its second, until it succeeds."""
    nth = 1
    while True:
        with FaultyDriver(driver) as watch:
            watch.fail(nth)
            fall_behind(driver)
            error = failure(step)
            assert watch.unlocked == [], "invariant 8"
            if not watch.num_failed:
                assert error is None, error
                return nth - 1
            # A block that could not be closed is closed later.
            assert error is None or "INJECTED" in str(error), error
            del error
            gc.collect()  # frames that hold tensors
            watch.heal()
            check()
            nth += 1


def fall_behind(driver: Driver) -> None:
    """Keep the device busy: what is put on its stream is not done when the next call fails."""
    if driver.name == "cuda":
        torch.cuda._sleep(20_000_000)  # type: ignore[attr-defined]


def value(attached: Any) -> int:
    (found,) = {int(attached[n].min()) for n in attached} | {
        int(attached[n].max()) for n in attached
    }
    return found


@ON_EACH_DEVICE
def test_publishing(device: str) -> None:
    driver = local(device).driver
    made: list[Any] = []
    given = tensors(1, device, 1)
    before = leaks.take()

    def nothing_is_there() -> None:
        with pytest.raises(UnknownNameError):
            tpspan.attach("x")
        assert leaks.settle(before)[1] == {}

    count = each_failing(
        driver,
        lambda: made.append(tpspan.publish(given, "x", block_nbytes=PAGE)),
        nothing_is_there,
    )
    assert count >= 9
    made.pop().close(remove=True)


def test_invariant_5_what_fails_waits_before_it_unmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of a GPU would go on; without one, nothing but the order shows it."""
    order: list[object] = []
    settle, close = OwnMemory.settle, Mapped.close

    def settled(self: OwnMemory) -> None:
        order.append("settled")
        settle(self)

    def closed(self: Mapped, **options: Any) -> None:
        order.append(self)
        close(self, **options)

    monkeypatch.setattr(OwnMemory, "settle", settled)
    monkeypatch.setattr(Mapped, "close", closed)
    given = tensors(1, "cpu", 1)
    firsts: set[object] = set()

    def only_after_waiting() -> None:
        firsts.add("settled" if order[:1] == ["settled"] else "closed" if order else "nothing")
        order.clear()

    made: list[Any] = []

    def publish() -> None:
        made.append(tpspan.publish(given, "x", block_nbytes=PAGE))

    assert each_failing(local("cpu").driver, publish, only_after_waiting) >= 9
    assert firsts == {"settled", "nothing"}, "unmapped before it was waited for"
    made.pop().close(remove=True)


@ON_EACH_DEVICE
@pytest.mark.parametrize("read_only", [False, True])
def test_committing(device: str, read_only: bool) -> None:
    driver = local(device).driver
    p = tpspan.publish(tensors(1, device, 2), "x", block_nbytes=PAGE, read_only=read_only)
    wanted = 2

    def write_and_commit() -> None:
        p.thaw()
        for tensor in p.values():
            tensor.fill_(wanted)
        p.commit()

    def last_version_is_whole() -> None:
        with tpspan.attach("x") as a:
            assert value(a) in (1, wanted)
            assert value(a) == wanted or a.version == 1

    count = each_failing(driver, write_and_commit, last_version_is_whole)
    assert count > 6
    with tpspan.attach("x") as a:
        assert value(a) == 2
    p.close(remove=True)


@ON_EACH_DEVICE
def test_attaching_and_flipping(device: str) -> None:
    driver = local(device).driver
    p = tpspan.publish(tensors(1, device, 2), "x", block_nbytes=PAGE)
    made: list[Any] = []
    before = leaks.take()

    def nothing_is_left() -> None:
        assert leaks.settle(before)[1] == {}

    count = each_failing(driver, lambda: made.append(tpspan.attach("x")), nothing_is_left)
    assert count >= 1 + 2 + 2 + 1
    a = made.pop()
    for tensor in p.values():
        tensor.fill_(2)
    del tensor
    p.commit()

    def one_is_whole() -> None:
        assert value(a) == a.version

    assert each_failing(driver, a.update, one_is_whole) >= 2 + 2 + 2 + 1
    assert (value(a), a.version) == (2, 2)
    a.close()
    p.close(remove=True)


@ON_EACH_DEVICE
def test_memory_is_full_during_a_commit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = local(device)
    p = tpspan.publish(tensors(1, device), "x", block_nbytes=PAGE, keep=3)
    for number in (2, 3):
        p["w0"].fill_(number)
        assert p.commit() == number
    assert len(tpspan.published()[0]["versions"]) == 3
    p["w0"].fill_(4)
    calls: list[int] = []
    create = place.driver.create

    def full(nbytes: int, on_host: bool = False) -> int:
        calls.append(nbytes)
        raise OutOfMemoryError("create", 2, "FULL", requested_nbytes=nbytes)

    monkeypatch.setattr(place.driver, "create", full)
    with pytest.raises(OutOfMemoryError):
        p.commit()
    assert len(calls) == 2, "once more, without the older versions"
    (seen,) = tpspan.published()
    assert [each["version"] for each in seen["versions"]] == [3]
    with tpspan.attach("x") as a:
        assert int(a["w0"][0]) == 3
        monkeypatch.setattr(place.driver, "create", create)
        assert p.commit() == 4, "what was written is still there"
        assert a.update()
        assert int(a["w0"][0]) == 4
    monkeypatch.undo()
    if device == "cpu":  # Linux would kill somebody later
        monkeypatch.setattr(place.driver, "memory_info", lambda: (PAGE - 1, 1 << 30))
        p["w0"].fill_(5)
        with pytest.raises(OutOfMemoryError, match="Not enough memory"):
            p.commit()
        monkeypatch.undo()
    p.close(remove=True)


def test_the_keeper_cannot_be_reached_during_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    p = tpspan.publish(tensors(1), "x", block_nbytes=PAGE)
    before = leaks.take()
    p["w0"].fill_(2)

    def refuse(*_: object) -> int:
        raise KeeperError("no")

    monkeypatch.setattr(p._registration, "commit", refuse)
    for _ in range(3):
        with pytest.raises(KeeperError):
            p.commit()
    assert leaks.settle(before)[1] == {}
    assert p._registration.connection.ask({"op": "list"})["keeper"]["blocks"] == 3
    monkeypatch.undo()
    assert p.commit() == 2
    with tpspan.attach("x") as a:
        assert int(a["w0"][0]) == 2
    p.close(remove=True)


def stop_at_commit(p: tpspan.Publication, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stop the keeper when the publication asks for a version, and from then on wait for nothing;
    returns what lets the keeper go on."""
    pid = keeper_pid()
    assert pid is not None
    ask = p._registration.connection.ask

    def stop_and_ask(message: dict[str, Any], data: bytes = b"", **options: Any) -> Any:
        if message["op"] == "commit":
            os.kill(pid, signal.SIGSTOP)
            patch.setattr(client, "TIMEOUT_S", 0.05)
        return ask(message, data, **options)

    patch.setattr(p._registration.connection, "ask", stop_and_ask)
    return lambda: os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("read_only", [False, True])
def test_the_keeper_takes_a_version_after_the_publisher_has_waited_long_enough(
    monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    options: Any = {"block_nbytes": PAGE, "keep": 1, "read_only": read_only}
    p = tpspan.publish(tensors(1), "x", **options)
    go_on = stop_at_commit(p, monkeypatch)
    connect = starting.connect

    def go_on_and_connect(**options: Any) -> Any:
        go_on()
        monkeypatch.undo()
        return connect(**options)

    monkeypatch.setattr(client, "connect", go_on_and_connect)
    write(p, 2)
    assert p.commit() == 2
    assert p.version == 2
    (seen,) = tpspan.published()
    assert [each["version"] for each in seen["versions"]] == [2]
    assert p._registration.connection.ask({"op": "list"})["keeper"]["blocks"] == 3
    with tpspan.attach("x") as a:
        assert value(a) == 2
        write(p, 3, "w1")
        assert p.commit() == 3, "what has not changed is known to the keeper"
        assert a.update()
        assert int(a["w1"][0]) == 3
    p.close(remove=True)


@pytest.mark.parametrize("read_only", [False, True])
def test_the_keeper_does_not_say_what_became_of_a_version(
    monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    options: Any = {"block_nbytes": PAGE, "keep": 1, "read_only": read_only}
    p = tpspan.publish(tensors(1), "x", **options)
    a = tpspan.attach("x")
    go_on = stop_at_commit(p, monkeypatch)
    write(p, 2)
    with pytest.raises(KeeperError, match="not known whether the keeper took version 2 of 'x'"):
        p.commit()
    assert p.version == 2
    if read_only:
        assert p._working.open == (), "readers may have it: it is written no more"
    monkeypatch.undo()
    go_on()
    wait_until(lambda: a.newest() == 2)
    assert a.update()
    assert value(a) == 2
    write(p, 3)
    assert p.commit() == 3
    assert a.update()
    assert value(a) == 3
    a.close()
    p.close(remove=True)


def test_a_version_whose_answer_is_lost_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p = tpspan.publish(tensors(1), "x", block_nbytes=PAGE)
    ask = p._registration.connection.ask

    def lose(message: dict[str, Any], data: bytes = b"", **options: Any) -> Any:
        answer = ask(message, data, **options)
        if message["op"] == "commit":
            monkeypatch.undo()
            with p._registration.connection._lock:
                p._registration.connection._disconnect()
            raise client.Lost("injected")
        return answer

    monkeypatch.setattr(p._registration.connection, "ask", lose)
    write(p, 2)
    assert p.commit() == 2
    (seen,) = tpspan.published()
    assert [each["version"] for each in seen["versions"]] == [1, 2]
    with tpspan.attach("x") as a:
        assert value(a) == 2
    p.close(remove=True)


def write(publication: tpspan.Publication, number: int, *names: str) -> None:
    publication.thaw(*names)
    for name in names or tuple(publication):
        publication[name].fill_(number)


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpspan.sharing import local as place

    p = tpspan.publish({"x": torch.ones(3)}, "x")
    description = p._registration._description
    p.close(remove=True)
    monkeypatch.setitem(description, "device", "cuda:0123")
    monkeypatch.setattr(place, "cuda_device_count", lambda: 0)
    with pytest.raises(DriverError, match="lies on a GPU, and this process sees none"):
        place.local_for("cuda:0123")


def test_memory_of_the_host_is_mapped_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpspan.sharing import replica

    class Gpu:
        backend, device = "cuda", torch.device("cuda:0")

    with tpspan.publish({"x": torch.ones(3)}, "x") as p:
        monkeypatch.setattr(replica, "local", lambda _: Gpu())
        with pytest.raises(ValueError, match="cannot be mapped for cuda:0: attach with replicate"):
            tpspan.attach("x", device="cuda:0")
        p.close(remove=True)
