"""Publishers, readers and keepers that are killed: what stays, and what goes on."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tpspan
from bodies.sharing import PAGE, tensors
from sharing_processes import (
    ON_EACH_DEVICE,
    Actor,
    Failed,
    has_ended,
    keeper_pid,
    listing,
    own_keeper,
    stop_keeper,
    wait_until,
)
from tpspan.errors import PublicationMismatch, UnknownNameError
from tpspan.sharing.client import ask_once
from tpspan.sharing.place import VARIABLE, find_place
from tpspan.sharing.starting import keeper_command


@pytest.fixture(autouse=True)
def keeper() -> Iterator[str]:
    with own_keeper() as directory:
        yield directory


def entry(name: str) -> dict[str, Any]:
    return next(each for each in listing() or () if each["name"] == name)


@ON_EACH_DEVICE
def test_a_publisher_is_killed_and_another_takes_over(device: str) -> None:
    """Invariant 11."""
    with Actor() as first, Actor() as reader, Actor() as second, Actor() as late:
        first.do("publish", "x", 1, device=device)
        first.do("next_version", 2)
        reader.do("attach", "x")
        with pytest.raises(
            Failed, match=f"NameTakenError: 'x' is published by process {first.pid}"
        ):
            second.do("publish", "x", 3, device=device)
        first.do("write", 99)
        first.kill()
        assert wait_until(lambda: not entry("x")["publisher_alive"]) < 1.0
        assert reader.do("value_of") == 2, "what was not committed is nowhere"
        assert reader.do("update") == (False, 2)
        assert late.do("attach", "x") == 2
        assert late.do("value_of") == 2
        with pytest.raises(
            Failed, match="PublicationMismatch: 'x' holds other tensors.*tpspan rm x"
        ):
            second.do("publish", "x", 3, device=device, num_blocks=2)
        assert second.do("publish", "x", 3, device=device) == 3, "numbers go on"
        assert entry("x")["publisher"] == second.pid
        for each in (reader, late):
            assert each.do("update") == (True, 3)
            assert each.do("value_of") == 3
        assert second.do("next_version", 4) == 4
        for each in (reader, late):
            each.do("detach")
        second.do("unpublish")


@ON_EACH_DEVICE
def test_a_successor_stores_only_what_differs(device: str) -> None:
    with Actor() as first:
        first.do("publish", "x", 1, device=device, num_blocks=6)
        first.kill()
    wait_until(lambda: not entry("x")["publisher_alive"])
    before = entry("x")["held_bytes"]
    given = tensors(1, device, 6)
    given["w2"].fill_(5)
    p = tpspan.publish(given, "x", block_nbytes=PAGE, read_only=True)
    assert p.version == 2
    assert int(entry("x")["held_bytes"]) - int(before) <= 2 * PAGE
    assert p._working.open == ()
    with tpspan.attach("x") as a:
        assert [int(a[name][0]) for name in ("w1", "w2", "w3")] == [1, 5, 1]
    stop_keeper()  # what was imported can be brought to the next keeper as well
    with tpspan.attach("x") as a:
        assert [int(a[name][0]) for name in ("w1", "w2", "w3")] == [1, 5, 1]
    p.close(remove=True)


def test_a_successor_without_values_gets_the_last_ones() -> None:
    with Actor() as first:
        first.do("publish_model", "m", 3)
        expected = first.do("sums")
        first.kill()
    wait_until(lambda: not entry("m")["publisher_alive"])
    with Actor() as second:
        assert second.do("publish_model", "m", 3, device="meta") == 1
        assert second.do("sums") == expected
        assert second.do("commit") == 2
        second.do("unpublish")


@ON_EACH_DEVICE
def test_a_reader_is_killed(device: str) -> None:
    with Actor() as publisher, Actor() as reader, Actor() as forked:
        publisher.do("publish", "x", 1, device=device)
        for each in (reader, forked):
            each.do("attach", "x")
        (version,) = entry("x")["versions"]
        assert sorted(version["readers"]) == sorted([reader.pid, forked.pid])
        reader.kill()
        forked.kill()
        assert wait_until(lambda: not entry("x")["versions"][0]["readers"]) < 1.0
        assert publisher.do("next_version", 2) == 2
        publisher.do("unpublish")


def test_a_child_that_inherits_the_connection_does_not_keep_a_dead_publisher_alive() -> None:
    with Actor() as publisher:
        publisher.do("publish", "x")
        child = publisher.do("fork")
        publisher.kill()
    try:
        assert wait_until(lambda: not entry("x")["publisher_alive"]) < 1.0
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    tpspan.remove("x")


@ON_EACH_DEVICE
def test_the_keeper_is_killed_and_nobody_notices(device: str) -> None:
    with Actor() as publisher, Actor() as reader, Actor() as late:
        publisher.do("publish", "x", 1, device=device)
        publisher.do("next_version", 2)
        reader.do("attach", "x")
        old = keeper_pid()
        stop_keeper()
        assert reader.do("value_of") == 2
        start = time.monotonic()
        assert late.do("attach", "x") == 2
        assert time.monotonic() - start < 2.0
        assert late.do("value_of") == 2
        assert keeper_pid() != old
        assert reader.do("update") == (False, 2)
        assert publisher.do("next_version", 3) == 3
        for each in (reader, late):
            assert each.do("wait_and_flip", 3)[1] == 3
        wait_until(lambda: len(entry("x")["versions"][-1]["readers"]) == 2)
        stop_keeper()
        assert publisher.do("next_version", 4) == 4, "numbers go on"
        assert reader.do("wait_and_flip", 4)[1] == 4
        for each in (reader, late):
            each.do("detach")
        publisher.do("unpublish")


def test_keeper_and_publisher_are_killed() -> None:
    """Who has it mapped keeps it; the name is gone, and that is said."""
    with Actor() as publisher, Actor() as reader:
        publisher.do("publish", "x", 1)
        reader.do("attach", "x")
        publisher.kill()
        stop_keeper()
        assert reader.do("value_of") == 1
        with pytest.raises(Failed, match="UnknownNameError: nothing is published as 'x'"):
            reader.do("update")
        assert reader.do("value_of") == 1
        with Actor() as other:
            assert other.do("publish", "x", 5) == 1
            assert reader.do("value_of") == 1
            assert other.do("next_version", 6) == 2
            assert reader.do("update") == (True, 2), "a layout that fits"
            assert reader.do("value_of") == 6
            other.do("unpublish")
        reader.do("detach")


def test_keepers_are_killed_while_versions_are_made_and_read() -> None:
    with Actor() as publisher, Actor() as reader:
        publisher.do("publish", "x", 1)
        reader.do("attach", "x")
        reader.tell("flip_until", 80)
        publisher.tell("commit_many", 2, 80)
        done = threading.Event()

        def kill() -> None:
            while not done.wait(0.3):
                stop_keeper()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            publisher.hear()
        finally:
            done.set()
            killer.join()
        assert reader.hear() >= 1
        assert reader.do("value_of") == 80
        reader.do("detach")
        publisher.do("unpublish")


def test_everything_is_killed_and_nothing_is_left(keeper: str) -> None:
    for _ in range(2):
        actors = [Actor() for _ in range(3)]
        actors[0].do("publish", "x", 1, num_blocks=8)
        for each in actors[1:]:
            each.do("attach", "x")
        stop_keeper()
        for each in actors:
            each.kill()
    assert listing() in (None, [])
    assert_nothing_is_held(keeper)
    assert_only_locks_are_left(keeper)


def assert_only_locks_are_left(keeper: str) -> None:
    """No keeper runs, and no socket is there. One that was killed leaves its own to the next."""
    pid = int(ask_once({"op": "list"})["keeper"]["pid"])
    wait_until(lambda: has_ended(pid))  # to ask it would keep it
    # Whoever was killed may have been starting one.
    wait_until(lambda: set(os.listdir(keeper)) <= {"log", "start"})


def assert_nothing_is_held(keeper: str) -> None:
    """No process that was started for a test lives on, and none holds memory of it; every block is
    a file, and has gone with the last process that held it. Others on this machine are left out."""
    wait_until(lambda: not list(_keepers(keeper)))
    assert multiprocessing.active_children() == []
    assert _blocks() == []


def _keepers(directory: str) -> Iterator[int]:
    """Keepers of a directory, whether or not they can be reached.

    Other processes were started with the same environment, such as Python's own helpers.
    """
    command = "\0".join(keeper_command()).encode()
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (found / "environ").read_bytes().split(b"\0")
            if f"{VARIABLE}={directory}".encode() not in variables:
                continue
            if (found / "cmdline").read_bytes().startswith(command):
                yield int(found.name)


def _blocks() -> list[str]:
    """The blocks that this process has open or mapped."""
    gc.collect()
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd" in os.readlink(each):
                found.append(str(each))
    return found


@pytest.mark.parametrize("seconds", [3, pytest.param(600, marks=pytest.mark.slow)])
def test_anything_at_any_time(keeper: str, seconds: int) -> None:
    """Random publishing, committing, attaching, flipping and killing, and files of the keeper taken
    away; versions are whole and nothing is left: no descriptor, block, file or process."""
    dice = random.Random(seconds)
    num_actors = 5 if seconds < 60 else 12
    names = ["a", "b", "c"]
    end = time.monotonic() + seconds
    actors: list[Actor] = []
    counts = dict.fromkeys(("update_one", "commit_one"), 0)

    def has_seen_enough() -> bool:
        return counts["update_one"] > 20 and counts["commit_one"] > 10

    def begin() -> None:
        actor = Actor()
        actor.do("snapshot", "cpu")
        actor.tell("roam", dice.random(), dice.uniform(0.5, 4.0), names, "cpu")
        actors.append(actor)

    # Actors that are killed say nothing of what they did, and a busy machine takes longer.
    while time.monotonic() < end or not has_seen_enough() and time.monotonic() < end + 100:
        while len(actors) < num_actors:
            begin()
        time.sleep(0.05)
        for actor in tuple(actors):
            if actor._connection.poll():
                for what, count in actor.hear().items():
                    counts[what] = counts.get(what, 0) + count
                assert actor.do("leaked") == {}
                assert actor.end() == 0
                actors.remove(actor)
            elif dice.random() < 0.01:
                actor.kill()
                actors.remove(actor)
        if dice.random() < 0.02:
            stop_keeper()
        if dice.random() < 0.02:
            with contextlib.suppress(OSError):
                os.unlink(dice.choice((find_place().socket, find_place().log)))
    for actor in actors:
        actor.kill()
    for each in listing() or ():
        tpspan.remove(str(each["name"]), force=True)
    assert has_seen_enough(), counts
    assert_only_locks_are_left(keeper)
    assert_nothing_is_held(keeper)


def test_what_is_left_of_a_publisher_that_never_committed() -> None:
    with Actor() as first:
        first.do("publish_model", "m", 0, device="meta")
        assert entry("m")["versions"] == []
        first.kill()
    wait_until(lambda: listing() == [])
    with pytest.raises(UnknownNameError):
        tpspan.attach("m")


def test_the_device_must_be_the_same() -> None:
    with tpspan.publish({"x": torch.zeros(3)}, "x"):
        pass
    with pytest.raises(PublicationMismatch, match="x is .3,. torch.float64 and was"):
        tpspan.publish({"x": torch.zeros(3, dtype=torch.float64)}, "x")
    tpspan.remove("x")
