"""Bodies that misbehave in every way the harness has to notice."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import tempfile
import threading
import time
import warnings
from typing import Any

import pytest

_kept: list[object] = []


def identify(world: Any, greeting: str) -> tuple[str, int, int, str, int]:
    return greeting, world.rank, world.world_size, world.backend, os.getpid()


def raise_on(world: Any, rank: int) -> None:
    if world.rank == rank:
        raise ValueError(f"on purpose on rank {rank}")


def wait_for_failed_peer(world: Any, rank: int) -> None:
    """One rank raises while the others wait for it without a deadline of their own."""
    raise_on(world, rank)
    threading.Event().wait()


def hang_on(world: Any, rank: int) -> None:
    if world.rank == rank:
        time.sleep(1000)


def die_on(world: Any, rank: int, then_wait_s: float = 0.0) -> int:
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(then_wait_s)
    return int(world.rank)


def skip(world: Any) -> None:
    pytest.skip("asked to")


def leak_descriptor(world: Any) -> None:
    os.dup(0)


def leak_memfd_mapping(world: Any, rank: int) -> None:
    """The descriptor is closed, the mapping stays."""
    if world.rank == rank:
        descriptor = os.memfd_create("leaked")
        os.ftruncate(descriptor, 1 << 21)
        _kept.append(mmap.mmap(descriptor, 1 << 21))
        os.close(descriptor)


def leak_thread(world: Any) -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True, name="leaked").start()


def leak_socket_file(world: Any) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(tempfile.mktemp(prefix="left-"))


def keep_once(world: Any) -> None:
    """What a library does that keeps something from its first use on: no leak."""
    if not any(isinstance(kept, str) for kept in _kept):
        _kept.extend(["kept", os.dup(0)])


def warn_of_resource(world: Any) -> None:
    warnings.warn("a span was not closed", ResourceWarning, stacklevel=1)


def fail_in_finalizer(world: Any) -> None:
    class Bad:
        def __del__(self) -> None:
            raise RuntimeError("raised in a finalizer")

    Bad()


def return_lambda(world: Any) -> object:
    return lambda: None
