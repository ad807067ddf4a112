"""Who may come to the socket on which descriptors are passed: ranks of this job and nobody else."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import Ranks, rank_environment
from tpspan.errors import PeerError
from tpspan.spans.connections import _has_room, accept, connect

TOKEN = b"sixteen bytes ok"
HELLO = struct.Struct("!16sI")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the names of Unix sockets are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(folder / "0"))
        made.listen(16)
        yield made


def knock(path: Path, hello: bytes | None) -> socket.socket:
    """Come to the socket as anybody could, and say something or nothing."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(path))
    if hello is not None:
        stranger.send(hello)
    return stranger


def in_thread(step: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=step)
    thread.start()
    return thread


def test_the_right_rank_comes_in(listener: socket.socket, folder: Path) -> None:
    deadline = time.monotonic() + 10
    held: list[socket.socket] = []
    thread = in_thread(lambda: held.append(connect(folder / "0", 2, TOKEN, deadline)))
    rank, connection = accept(listener, {1, 2}, TOKEN, deadline)
    thread.join()
    assert rank == 2
    connection.send(b"hello")
    assert held[0].recv(10) == b"hello"
    connection.close()
    held[0].close()


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(HELLO.pack(b"another job's ok", 1), id="wrong token"),
        pytest.param(HELLO.pack(TOKEN, 7), id="no such rank"),
        pytest.param(HELLO.pack(TOKEN, 0), id="not expected"),
        pytest.param(HELLO.pack(TOKEN, 1)[:-1], id="too short"),
        pytest.param(HELLO.pack(TOKEN, 1) + b"x" * 100, id="too long"),
        pytest.param(b"GET / HTTP/1.1", id="other protocol"),
        pytest.param(None, id="silent"),
    ],
)
def test_a_stranger_is_turned_away_and_the_rank_still_comes_in(
    listener: socket.socket, folder: Path, hello: bytes | None
) -> None:
    deadline = time.monotonic() + 10
    stranger = knock(folder / "0", hello)
    held: list[socket.socket] = []
    thread = in_thread(lambda: held.append(connect(folder / "0", 1, TOKEN, deadline)))
    rank, connection = accept(listener, {1}, TOKEN, deadline)
    thread.join()
    assert rank == 1
    stranger.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(10) == b"", "the stranger is told nothing and shut out"
    for each in (stranger, connection, held[0]):
        each.close()


def test_a_rank_with_the_wrong_token_is_told(listener: socket.socket, folder: Path) -> None:
    deadline = time.monotonic() + 1
    errors: list[BaseException] = []

    def come() -> None:
        try:
            connect(folder / "0", 1, b"another job's ok", deadline)
        except PeerError as error:
            errors.append(error)

    thread = in_thread(come)
    with pytest.raises(PeerError, match=r"rank 1: did not connect .* before the deadline"):
        accept(listener, {1}, TOKEN, deadline)
    thread.join()
    assert "refused" in str(errors[0]) or "failed" in str(errors[0])
    assert errors[0].ranks == (0,)  # type: ignore[attr-defined]


def test_strangers_that_keep_coming_do_not_hold_a_rank_for_ever(
    listener: socket.socket, folder: Path
) -> None:
    """Invariant 9: the wait for a rank has a deadline, whoever else comes."""
    stop = threading.Event()

    def pester() -> None:
        while not stop.is_set():
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
            ):
                stranger.settimeout(0)  # nobody takes it out of a full queue after the deadline
                stranger.connect(str(folder / "0"))
                stranger.send(b"x")

    thread = in_thread(pester)
    start = time.monotonic()
    try:
        with pytest.raises(PeerError, match="ranks 1, 3"):
            accept(listener, {3, 1}, TOKEN, time.monotonic() + 0.5)
        assert time.monotonic() - start < 3
    finally:
        stop.set()
        thread.join()


def test_nobody_listens(folder: Path) -> None:
    with pytest.raises(PeerError, match="rank 0: connecting to its socket failed"):
        connect(folder / "0", 1, TOKEN, time.monotonic() + 1)


def test_a_listener_that_says_nothing(listener: socket.socket, folder: Path) -> None:
    """Invariant 9."""
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 0"):
        connect(folder / "0", 1, TOKEN, time.monotonic() + 0.3)
    assert time.monotonic() - start < 3


# Another user's process that knows the token: only root can become one.
AS_NOBODY = """
import os, socket, sys
path, token = sys.argv[1], bytes.fromhex(sys.argv[2])
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setuid(65534)
client.connect(path)
client.settimeout(20)
try:
    client.send(token + (1).to_bytes(4, "big"))
    answer = client.recv(10)
except (BrokenPipeError, ConnectionResetError):
    answer = b""
sys.exit(0 if answer == b"" else 1)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_turned_away_even_with_the_token() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = Path(folder) / "0"
        listener.bind(str(path))
        listener.listen(16)
        path.parent.chmod(0o755)  # as no job's folder is
        path.chmod(0o777)
        turn_away_another_user(listener, path)


def turn_away_another_user(listener: socket.socket, path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", AS_NOBODY, str(path), TOKEN.hex()])
    deadline = time.monotonic() + 20
    held: list[socket.socket] = []

    def come_later() -> None:
        stranger.wait()  # it was accepted and shut out before
        held.append(connect(path, 1, TOKEN, deadline))

    thread = in_thread(come_later)
    rank, connection = accept(listener, {1}, TOKEN, deadline)
    thread.join()
    connection.close()
    held[0].close()
    assert rank == 1
    assert stranger.returncode == 0, "it was given an answer"


@pytest.mark.ranks(1, 3, launchers=("mpirun",))
def test_sockets_are_private_and_gone_before_memory_is_shared(ranks: Ranks) -> None:
    for seen in ranks.run("bodies.sockets:watched"):
        assert seen["modes"] <= {0o700}
        assert seen["left"] == []
        assert seen["connections"] == ranks.size - 1


@pytest.mark.ranks(2, 3, launchers=("torchrun",))
def test_a_foreign_process_on_the_socket_of_a_running_job(ranks: Ranks) -> None:
    ranks.run("bodies.sockets:pestered")


@pytest.mark.parametrize("size", ["16", pytest.param("64", marks=pytest.mark.slow)])
def test_many_ranks_share_one_span(size: str) -> None:
    """Forked from one process, so that they need not each import torch."""
    script = Path(__file__).parent / "many_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), size],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{size} ranks agree" in done.stdout


def test_sockets_go_where_every_rank_can_have_one() -> None:
    parent = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        assert _has_room(str(parent))
        for name in ("x" * 80, "\u20ac" * 24):  # 24 characters, and 72 bytes
            (parent / name).mkdir()
            assert not _has_room(str(parent / name))
        (parent / "file").touch()
        assert not _has_room(str(parent / "file"))
        assert not _has_room(str(parent / "nothing"))
        assert not _has_room(os.path.relpath(parent)), "ranks may stand elsewhere"
    finally:
        shutil.rmtree(parent)
