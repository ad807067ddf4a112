"""Processes that publish and attach for a test, and can be killed; and a keeper of the test's own.

They are forked from a server that has torch imported and nothing else done, so that one costs
milliseconds and CUDA works in it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from tpspan.sharing import starting
from tpspan.sharing.client import ask_once
from tpspan.sharing.place import VARIABLE
from tpspan.sharing.registration import Registration
from tpspan.sharing.starting import connect

# Keepers that tests start wait as others do, only not so long, for somebody who needs them.
_PROGRAM = starting._PROGRAM.replace(
    "from tpspan",
    "from tpspan.sharing import serving; serving.GRACE_S, serving.RESEED_S = 0.3, 1.5; from tpspan",
    1,
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "tpspan.sharing.modules", "bodies.sharing"])

ON_EACH_DEVICE = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="host"),
        pytest.param(
            "cuda",
            id="cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
            ],
        ),
    ],
)


class Failed(AssertionError):
    """What a process was told to do has raised."""


class Actor:
    """A process that does what it is told, with functions of ``bodies.sharing`` on its own state.

    Attributes:
        pid: the process.
    """

    def __init__(self) -> None:
        ours, theirs = _CONTEXT.Pipe()
        self._connection = ours
        self._process = _CONTEXT.Process(
            target=serve, args=(theirs, os.environ[VARIABLE]), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid or 0)

    def tell(self, step: str, *args: Any, **kwargs: Any) -> None:
        """Begin a step; ``hear`` has its value."""
        self._connection.send((step, args, kwargs))

    def hear(self, timeout_s: float = 60.0) -> Any:
        """The value of the step that was begun first."""
        assert self._connection.poll(timeout_s), "no answer in time"
        value, error = self._connection.recv()
        if error is not None:
            raise Failed(error)
        return value

    def do(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Do a step and return its value."""
        self.tell(step, *args, **kwargs)
        return self.hear()

    def kill(self) -> None:
        """Kill it, as it stands."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def end(self) -> int | None:
        """Let it end by itself; returns its exit code."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(20.0)
        if self._process.is_alive():
            self.kill()
            raise AssertionError("did not end")
        self._connection.close()
        return self._process.exitcode

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self.kill()


def serve(connection: Connection, keeper_dir: str) -> None:
    """What an actor runs."""
    os.environ[VARIABLE] = keeper_dir
    starting._PROGRAM = _PROGRAM
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: collections need not walk it
    bodies = importlib.import_module("bodies.sharing")
    state: dict[str, Any] = {}
    while True:
        try:
            told = connection.recv()
        except EOFError:
            os._exit(1)
        if told is None:
            return
        step, args, kwargs = told
        answer: tuple[Any, str | None]
        try:
            answer = getattr(bodies, step)(state, *args, **kwargs), None
        except BaseException as error:
            answer = None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        connection.send(answer)


@contextlib.contextmanager
def own_keeper() -> Iterator[str]:
    """A directory for a keeper of its own; at the end nothing may be published or connected."""
    directory = tempfile.mkdtemp(prefix="tpspan-test-", dir="/tmp")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = directory
    made: weakref.WeakSet[Registration] = weakref.WeakSet()
    claim = Registration.claim

    def note_and_claim(registration: Registration) -> None:
        made.add(registration)
        claim(registration)

    patch = pytest.MonkeyPatch()
    patch.setattr(Registration, "claim", note_and_claim)
    patch.setattr(starting, "_PROGRAM", _PROGRAM)
    try:
        yield directory
        if (seen := listing()) is not None:
            assert [each["name"] for each in seen] == []
    finally:
        for each in tuple(made):  # a failed test's publishers would start the next keeper
            each.close()
        patch.undo()
        stop_keeper(signal.SIGTERM)
        log = Path(directory, "log")
        said = log.read_text() if log.exists() else ""
        shutil.rmtree(directory)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    assert not said, said


def listing() -> list[dict[str, Any]] | None:
    """What is published, or None if there is no keeper."""
    connection = connect(start=False)
    if connection is None:
        return None
    connection.close()
    names: list[dict[str, Any]] = ask_once({"op": "list"})["names"]
    return names


def keeper_pid() -> int | None:
    """The process of the keeper, or None."""
    connection = connect(start=False)
    if connection is None:
        return None
    connection.close()
    return int(ask_once({"op": "list"})["keeper"]["pid"])


def stop_keeper(number: int = signal.SIGKILL) -> None:
    """End the keeper and wait until it has ended."""
    pid = keeper_pid()
    if pid is None:
        return
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, number)
    with open(process, "rb") as ended:
        wait_until(lambda: has_ended(pid))
        del ended


def has_ended(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_until(condition: Any, timeout_s: float = 10.0) -> float:
    """Wait until something is so; returns how long that took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError("it did not come to be in time")
        time.sleep(0.002)
    return time.monotonic() - start
