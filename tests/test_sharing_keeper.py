"""The keeper: how it starts and ends, whom it serves, and what its table allows."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tpspan
from bodies.sharing import PAGE, tensors
from sharing_processes import Actor, keeper_pid, own_keeper, stop_keeper, wait_until
from tpspan.errors import KeeperError, NameTakenError, UnknownNameError
from tpspan.sharing import client, serving, starting, wire
from tpspan.sharing.client import Connection, ask_once
from tpspan.sharing.place import VARIABLE, Place, find_place
from tpspan.sharing.registry import Client, Refused, Registry


@pytest.fixture
def keeper() -> Iterator[str]:
    with own_keeper() as directory:
        yield directory


def test_it_starts_quickly_and_is_small(keeper: str) -> None:
    start = time.perf_counter()
    ask_once({"op": "list"})
    took_s = time.perf_counter() - start
    assert took_s < 1.0  # 0.06 s on an idle machine
    pid = keeper_pid()
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert int(kib) < 20 << 10, "an interpreter alone has 9 MiB"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "cuda" not in maps


def test_it_imports_neither_torch_nor_anything_installed() -> None:
    program = "import tpspan.sharing.keeper, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not {"torch", "numpy", "cuda", "typer", "rich"} & loaded
    assert loaded - set(sys.stdlib_module_names) <= {"tpspan", "__main__"}


def test_it_ends_when_it_holds_nothing(keeper: str) -> None:
    with tpspan.publish(tensors(1, num_blocks=1), "x"):
        pid = keeper_pid()
    tpspan.remove("x")
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert sorted(os.listdir(keeper)) == ["log", "start"]
    assert keeper_pid() is None
    assert tpspan.published() == []
    assert keeper_pid() is None, "a listing starts no keeper"


@contextlib.contextmanager
def kept_here(ends_by_itself: bool) -> Iterator[threading.Thread]:
    """A keeper on a thread of this process, which waits for nobody."""
    place = find_place()
    lock = place.lock()
    assert lock is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "GRACE_S", 0.05)
        made = serving.Keeper(place, lock, ends_by_itself=ends_by_itself, follows_a_kill=False)
        thread = threading.Thread(target=made.serve)
        thread.start()
        try:
            yield thread
        finally:
            if thread.is_alive():
                made.stop()
            thread.join()


LOOKS_S = 0.6  # a keeper looks four times a second whether anybody needs it


def test_it_stays_while_somebody_is_connected_or_a_name_is_held(keeper: str) -> None:
    with kept_here(ends_by_itself=True) as thread:
        connection = Connection()
        connection.ask({"op": "list"})
        thread.join(LOOKS_S)
        assert thread.is_alive(), "somebody is connected"
        with tpspan.publish(tensors(1, num_blocks=1), "x"):
            connection.close()
        thread.join(LOOKS_S)
        assert thread.is_alive(), "a name is held"
        tpspan.remove("x")
        thread.join(5.0)
        assert not thread.is_alive()


def test_many_starters_start_one(keeper: str) -> None:
    program = (
        "from tpspan.sharing.client import Connection; c = Connection(); "
        "print(c.ask({'op': 'list'})['keeper']['pid'], flush=True); input()"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    with ThreadPoolExecutor() as pool:  # and threads of one process
        pids = set(pool.map(lambda _: keeper_after_start(), range(6)))
    for starter in starters:
        assert starter.stdout is not None
        pids.add(int(starter.stdout.readline()))
        starter.communicate("\n")
        assert starter.returncode == 0
    assert len(pids) == 1


def keeper_after_start() -> int:
    return int(ask_once({"op": "list"})["keeper"]["pid"])


def test_its_directory_must_be_private(
    keeper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.chmod(keeper, 0o750)
    with pytest.raises(KeeperError, match="can be entered by other users"):
        tpspan.published()
    os.chmod(keeper, 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(KeeperError, match="belongs to user 0, and this is user 4711"):
        tpspan.publish(tensors(1), "x")
    monkeypatch.undo()
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(KeeperError, match="is no directory"):
        find_place()
    monkeypatch.setenv(VARIABLE, "/tmp/" + "x" * 100)
    with pytest.raises(KeeperError, match="too long"):
        find_place()
    monkeypatch.setenv(VARIABLE, "/proc/nothing")
    with pytest.raises(KeeperError, match="cannot be made"):
        find_place()
    monkeypatch.setenv(VARIABLE, keeper)


def test_where_its_directory_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    monkeypatch.setattr(os, "mkdir", lambda *_: None)
    monkeypatch.setattr(os, "lstat", lambda _: os.stat(tmp_path))
    tmp_path.chmod(0o700)
    assert find_place().directory == "/tmp/tpspan"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert find_place().directory == f"/tmp/tpspan-{os.geteuid()}"


def test_a_keeper_of_another_user_is_refused(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_once({"op": "list"})
    monkeypatch.setattr(wire, "credentials", lambda _: (1, 4711))
    with pytest.raises(KeeperError, match="is one of user 4711"):
        tpspan.attach("x")
    monkeypatch.undo()


def test_it_answers_nonsense_and_goes_on(keeper: str) -> None:
    connection = Connection()
    nonsense: list[tuple[dict[str, object], str]] = [
        ({"op": "dance"}, "knows no request 'dance'"),
        ({"op": "claim"}, "without sense"),
        ({"op": "attach", "name": 3, "have": 5}, "without sense"),
        ({"op": "hello", "protocol": 99}, "protocol"),
    ]
    for message, said in nonsense:
        with pytest.raises(KeeperError, match=said):
            connection.ask(message)
    for raw in (b"\xff" * 64, wire.HEADER.pack(1 << 31, 0, 0), wire.HEADER.pack(4, 0, 0) + b"nope"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(find_place().socket)
            stranger.sendall(raw)
            stranger.settimeout(5.0)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b"", "it hangs up"
    for silent in (
        {"op": "reads"},
        {"op": "reads", "name": "x", "version": "y"},
        {"op": "watches"},
    ):
        connection.say(silent)
    assert connection.ask({"op": "list"})["names"] == []
    with tpspan.publish(tensors(1, num_blocks=1), "x") as publication:
        request = {"op": "attach", "name": "x", "have": [], "reads": "", "places": [99, -1]}
        assert connection.ask(request)["sent"] == [], "blocks that are not there"
        publication.close(remove=True)
    connection.close()


def test_attaching_asks_once(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    send = wire.send

    def note(connection: socket.socket, message: dict[str, Any], *more: Any) -> None:
        asked.append(message["op"])
        send(connection, message, *more)

    with tpspan.publish(tensors(1), "x") as p:
        monkeypatch.setattr(wire, "send", note)
        with tpspan.attach("x") as first, tpspan.attach("x") as second:
            assert asked == ["attach", "attach"]
            p["value"].fill_(2)
            p.commit()
            assert first["value"] == second["value"] == 1
            with tpspan.attach("x", version=1) as old, tpspan.attach("x") as new:
                assert (old.version, old.newest(), int(old["value"])) == (1, 2, 1)
                assert (new.version, new.newest(), int(new["value"])) == (2, 2, 2)
        p.close(remove=True)


def test_another_protocol_is_refused_with_the_first_request(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_once({"op": "list"})
    monkeypatch.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
    with pytest.raises(KeeperError, match="end the programs of the older version"):
        tpspan.attach("x")
    monkeypatch.undo()


def test_names(keeper: str) -> None:
    for name in ("", " x", "a\nb", "x" * 201):
        with pytest.raises(ValueError, match="is no name"):
            tpspan.publish(tensors(1, num_blocks=1), name)
    for step in (tpspan.attach, tpspan.remove):
        with pytest.raises(UnknownNameError, match="nothing is published as 'x'"):
            step("x")
    with tpspan.publish(tensors(1, num_blocks=1), "näme/with: signs"):
        with pytest.raises(NameTakenError, match=f"by process {os.getpid()}, which is alive") as e:
            tpspan.publish(tensors(1, num_blocks=1), "näme/with: signs")
        assert e.value.pid == os.getpid()
        with pytest.raises(NameTakenError, match="or remove the name by force"):
            ask_once({"op": "remove", "name": "näme/with: signs", "force": False})
    tpspan.remove("näme/with: signs")
    with pytest.raises(ValueError, match="version=0"):
        tpspan.attach("x", version=0)
    with pytest.raises(ValueError, match="keep=0"):
        tpspan.publish({}, "x", keep=0)
    with pytest.raises(TypeError, match="cannot publish a int"):
        tpspan.publish(3, "x")
    with pytest.raises(ValueError, match="multiple of the page"):
        tpspan.publish({}, "x", block_nbytes=5)
    with pytest.raises(ValueError, match="cpu and cuda devices"):
        tpspan.publish({}, "x", device="meta")


def test_removed_by_force_under_a_living_publisher(keeper: str) -> None:
    p = tpspan.publish(tensors(1), "x")
    a = tpspan.attach("x")
    with Actor() as other:
        with pytest.raises(AssertionError, match=f"process {os.getpid()}, which is alive"):
            other.do("publish", "x")
        tpspan.remove("x", force=True)
        with pytest.raises(UnknownNameError, match="was removed, or is published by another"):
            p.commit()
        with pytest.raises(UnknownNameError):
            a.update()
        with pytest.raises(UnknownNameError):
            a.wait_for(2, timeout_s=5.0)
        assert int(a["w0"][0]) == 1
        other.do("publish", "x", 5)
        with pytest.raises(UnknownNameError, match="published by another"):
            p.commit()
        p.close(remove=True)  # it is not ours any more
        assert a.update()
        assert int(a["w0"][0]) == 5, "of the same layout: it fits"
        other.do("unpublish")
        other.do("publish", "x", 6, num_blocks=5)
        with pytest.raises(tpspan.PublicationMismatch, match="holds other tensors now"):
            a.update()
        assert int(a["w0"][0]) == 5
        a.close()
        other.do("unpublish")


def test_out_of_descriptors(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper says so, whatever it was that needed one, and goes on with what it has."""
    p = tpspan.publish(tensors(1), "x", block_nbytes=PAGE)
    pid = keeper_pid()
    assert pid is not None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (22, hard))
    for tensor in p.values():
        tensor.fill_(2)
    del tensor
    said = r"out of file descriptors: its limit is 22, and it holds \d+ blocks of . names"
    with pytest.raises(KeeperError, match=said):
        tpspan.publish(tensors(1, num_blocks=20), "y", block_nbytes=PAGE)
    assert [each["name"] for each in tpspan.published()] == ["x"]
    idle = []
    with pytest.raises(KeeperError, match=said):  # no room for a connection
        for _ in range(20):
            idle.append(Connection())
            idle[-1].ask({"op": "list"})
    for each in idle:
        each.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert p.commit() == 2
    with tpspan.attach("x") as a:
        assert int(a["w2"][7]) == 2
    p.close(remove=True)


def test_a_client_out_of_descriptors(keeper: str) -> None:
    p = tpspan.publish(tensors(1, num_blocks=66), "x", block_nbytes=PAGE, read_only=True)
    with Actor() as other:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (50, hard))
        with pytest.raises(AssertionError, match=r"KeeperError: this process has no|EMFI"):
            other.do("attach", "x")
        resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert other.do("attach", "x") == 1
        assert other.do("value_of") == 1
        other.do("detach")
    p.close(remove=True)


def test_a_stopped_reader_holds_nobody_up(keeper: str) -> None:
    with Actor() as publisher, Actor() as reader:
        publisher.do("publish", "x", 1)
        reader.do("attach", "x")
        reader.signal(signal.SIGSTOP)
        for value in range(2, 40):
            assert publisher.do("next_version", value) == value
        (seen,) = tpspan.published()
        assert [each["version"] for each in seen["versions"]] == [38, 39]
        assert list(seen["readers_of_gone_versions"]) == ["1"]
        reader.signal(signal.SIGCONT)
        assert reader.do("value_of") == 1
        assert reader.do("update") == (True, 39)
        assert reader.do("value_of") == 39
        publisher.do("unpublish")


def test_in_the_foreground_it_stays(keeper: str) -> None:
    process = subprocess.Popen(starting.keeper_command("serve"), env=dict(os.environ))
    wait_until(lambda: keeper_pid() is not None)
    assert keeper_pid() == process.pid
    second = subprocess.run(
        starting.keeper_command("serve"), env=dict(os.environ), timeout=20, check=False
    )
    assert second.returncode == 0, "one is enough"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5.0) == 0
    with kept_here(ends_by_itself=False) as thread:
        thread.join(LOOKS_S)
        assert thread.is_alive()


def test_a_keeper_that_cannot_start_says_why(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(KeeperError, match="could not be started.*nowhere"):
        tpspan.attach("x")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(KeeperError, match="no sys.executable"):
        tpspan.attach("x")
    monkeypatch.undo()
    monkeypatch.setattr(starting, "_PROGRAM", "raise SystemExit('no luck')")
    with pytest.raises(KeeperError, match="could not be started: no luck"):
        tpspan.attach("x")


def test_a_keeper_that_does_not_answer(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_once({"op": "list"})
    pid = keeper_pid()
    assert pid is not None
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeeperError, match="does not answer within 0.2 s"):
            tpspan.attach("x")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_table_keeps_versions_and_refuses_what_makes_none() -> None:
    registry, alice, bob = Registry(), Client(1), Client(2)
    registry.clients |= {alice, bob}
    fds = [os.memfd_create("x") for _ in range(4)]
    registry.claim(alice, "n", {"device": "cpu"}, b"layout", keep=2, publisher="a")
    with pytest.raises(Refused, match="nothing is published"):
        registry.find("n", None)
    registry.deposit(alice, ["a", "b"], [1, 1], fds[:2])
    with pytest.raises(Refused, match="1 blocks of 'n' have not been deposited"):
        registry.commit(alice, "n", ["a", "c"], b"", token="1")
    with pytest.raises(Refused, match="published by another process"):
        registry.commit(bob, "n", ["a", "b"], b"", token="1")
    assert registry.commit(alice, "n", ["a", "b"], b"", token="1").number == 1
    assert alice.deposited == {}
    registry.deposit(bob, ["c"], [1], fds[2:3])  # another rank's
    assert registry.commit(alice, "n", ["a", "c"], b"", token="2").number == 2
    registry.deposit(alice, ["d"], [1], fds[3:])
    assert registry.num_blocks == 4
    registry.withdraw(alice, ["d", "unknown"])
    assert registry.num_blocks == 3
    assert registry.commit(alice, "n", ["a", "c"], b"", token="3").number == 3
    assert registry.num_blocks == 2, "b went with version 1"
    assert not Path(f"/proc/self/fd/{fds[1]}").exists()
    with pytest.raises(Refused, match="is published by process 1"):
        registry.claim(bob, "n", {"device": "cpu"}, b"layout", keep=2, publisher="b")
    registry.leave(alice)
    with pytest.raises(Refused, match="other tensors"):
        registry.claim(bob, "n", {"device": "cpu"}, b"another", keep=1, publisher="b")
    newest = registry.claim(bob, "n", {"device": "cpu"}, b"layout", keep=1, publisher="b").newest
    assert newest is not None
    assert newest.number == 3
    version = registry.commit(bob, "n", ["a", "c"], b"", token="4", number=9)
    assert version.number == 9, "of another keeper's count"
    del version
    assert list(registry.publications["n"].versions) == [9]
    del newest
    registry.remove(bob, "n", force=False)
    registry.leave(bob)
    assert registry.is_empty
    assert not any(Path(f"/proc/self/fd/{fd}").exists() for fd in fds)


def test_descriptors_do_not_leak_from_messages(keeper: str) -> None:
    """Refused, superfluous and cut-off deposits: the keeper closes what it does not keep."""
    with tpspan.publish({"x": torch.zeros(3)}, "x") as p:
        pid = keeper_pid()

        def held() -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        connection = Connection()
        with pytest.raises(KeeperError):  # from its answer on the keeper has this connection
            connection.ask({"op": "dance"})
        before = held()
        for message in ({"op": "dance"}, {"op": "deposit", "blocks": ["a"], "sizes": [1, 2]}):
            for _ in range(5):
                fds = (os.memfd_create("x") for _ in range(70))
                with (
                    pytest.raises(KeeperError),
                    connection.request(message, b"", 70, fds),
                ):
                    pass
        assert held() == before
        connection.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(find_place().socket)
            fd = os.memfd_create("x")
            socket.send_fds(stranger, [wire.HEADER.pack(1000, 0, 1)[:5]], [fd])
            os.close(fd)
        wait_until(lambda: held() == before - 1)
        p.close(remove=True)
    stop_keeper(signal.SIGTERM)


def test_a_keeper_whose_files_are_taken_away_is_found_again(keeper: str) -> None:
    """Cleaners of /tmp take old sockets and locks away; nobody need be connected."""
    with tpspan.publish(tensors(1, num_blocks=1), "x"):
        pid = keeper_pid()
        for gone in (["keeper"], ["keeper", "start", "log"]):
            for name in gone:
                os.unlink(Path(keeper, name))
            assert version_of("x") == 1, "whoever comes meanwhile waits for it"
            assert keeper_pid() == pid
    os.unlink(find_place().socket)  # now nobody is connected
    wait_until(find_place_is_served)
    shutil.rmtree(keeper)
    wait_until(find_place_is_served)
    assert keeper_pid() == pid
    assert version_of("x") == 1
    tpspan.remove("x")


def find_place_is_served() -> bool:
    return Path(find_place().socket).exists()


def version_of(name: str) -> int:
    with tpspan.attach(name) as attached:
        return attached.version


def test_a_keeper_in_whose_place_another_has_come_gives_it_everything(keeper: str) -> None:
    with Actor() as publisher, Actor() as reader:
        publisher.do("publish", "living", 1, keep=3)
        publisher.do("next_version", 2)
        for name in ("left", "taken"):
            tpspan.publish(tensors(5, num_blocks=2), name, block_nbytes=PAGE).close()
        reader.do("attach", "living", version=1)
        old = keeper_pid()
        assert old is not None
        os.kill(old, signal.SIGSTOP)
        shutil.rmtree(keeper)
        with tpspan.publish(tensors(7, num_blocks=2), "taken", block_nbytes=PAGE) as p:
            assert keeper_pid() != old
            os.kill(old, signal.SIGCONT)
            wait_until(lambda: not Path(f"/proc/{old}").exists())
            seen = {each["name"]: each for each in tpspan.published()}
            assert sorted(seen) == ["left", "living", "taken"]
            assert [each["version"] for each in seen["living"]["versions"]] == [1, 2]
            for name, value in (("left", 5), ("taken", 7)):
                with tpspan.attach(name) as a:
                    assert int(a["value"]) == value
            assert publisher.do("next_version", 3) == 3
            assert reader.do("update") == (True, 3)
            assert reader.do("value_of") == 3
            p.close(remove=True)
        reader.do("detach")
        publisher.do("unpublish")
    tpspan.remove("left")


def test_a_keeper_whose_place_is_gone_for_good_ends(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LOST_S", 0.3)
    place = Place(os.path.join(keeper, "inner"))
    place.make()
    lock = place.lock()
    assert lock is not None
    served = serving.Keeper(place, lock, ends_by_itself=True, follows_a_kill=False)
    client = Client(1)
    served.registry.claim(client, "x", {"device": "cpu"}, b"", keep=1, publisher="")
    shutil.rmtree(place.directory)
    os.symlink("/nowhere", place.directory)
    served.serve()
    assert Path(place.directory).is_symlink(), "it has not been touched"
    os.unlink(place.directory)


def test_a_publisher_that_comes_by_another_connection_displaces_the_first() -> None:
    registry, before, after, other = Registry(), Client(1), Client(1), Client(2)
    registry.clients |= {before, after, other}
    made = registry.claim(before, "n", {"device": "cpu"}, b"", keep=1, publisher="p")
    registry.commit(before, "n", [], b"", token="1")
    with pytest.raises(Refused, match="which is alive"):
        registry.claim(other, "n", {"device": "cpu"}, b"", keep=1, publisher="q")
    assert registry.claim(after, "n", {"device": "cpu"}, b"", keep=1, publisher="p") is made
    with pytest.raises(Refused, match="by another process now"):
        registry.commit(before, "n", [], b"", token="2")
    registry.leave(before)
    assert made.owner is after
    assert made.newest is not None
    assert (made.newest.number, made.newest.token) == (1, "1")
    registry.leave(after)
    assert made.owner is None
