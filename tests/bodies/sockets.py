"""What can be seen of, and done to, the sockets while ranks connect."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bodies.common import fill, holds, meet
from tpspan.launch.world import World
from tpspan.spans import Span
from tpspan.spans.exchange import Exchange


def sockets() -> Iterator[Path]:
    """The listeners of ranks; the harness gives every group a folder of its own."""
    with contextlib.suppress(FileNotFoundError):  # removed while we look
        yield from Path(os.environ["XDG_RUNTIME_DIR"]).glob("tpspan-*/*")


def watched(world: World) -> dict[str, Any]:
    """Look at the folder while the ranks connect, and after."""
    modes: set[int] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for path in sockets():
                with contextlib.suppress(FileNotFoundError):
                    modes.add(stat.S_IMODE(path.parent.stat().st_mode))
            time.sleep(1e-3)

    watcher = threading.Thread(target=look)
    watcher.start()
    exchange = Exchange(world)
    world.control.barrier()
    left = [str(path) for path in sockets()]
    stop.set()
    watcher.join()
    connections = len(exchange._peers)
    world.control.barrier()
    exchange.close()
    return {"modes": modes, "left": left, "connections": connections}


def pestered(world: World) -> None:
    """A process without the token knocks at every socket, many times, while spans are made."""
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            for path in sockets():
                with (
                    contextlib.suppress(OSError),
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
                ):
                    stranger.settimeout(0)
                    stranger.connect(str(path))
                    stranger.send(b"let me in, I am rank 1")

    stranger = threading.Thread(target=knock)
    if world.rank == 0:
        stranger.start()
    try:
        for _ in range(5):
            inner = world.subset(range(world.world_size))
            with Span.allocate(inner, (world.world_size, 100), torch.uint8) as span:
                fill(span)
                assert holds(span)
                meet(span)
            inner.close()
    finally:
        stop.set()
        if world.rank == 0:
            stranger.join()
