"""Messages between the keeper and its clients: JSON, bytes beside it, and descriptors.

A message is a header, its JSON, its bytes, and then one byte for every 64 descriptors, which travel
with it (``SCM_RIGHTS``). Descriptors come last and in small batches so that a client can import and
close each batch before the next: its limit of open files does not bound what it can attach.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

BATCH = 64
"""Descriptors in one batch; Linux allows 253 (SCM_MAX_FD)."""

PROTOCOL = 2
"""Changes when an older keeper would not understand a newer client."""

HEADER = struct.Struct("!III")  # bytes of the JSON, bytes beside it, descriptors
MAX_NBYTES = 1 << 28
_CREDENTIALS = struct.Struct("iII")


class WireError(Exception):
    """The other side is gone, or does not speak this protocol."""


def encode(message: dict[str, Any], data: bytes = b"", num_fds: int = 0) -> bytes:
    """The bytes of a message, without those that carry descriptors."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(text), len(data), num_fds) + text + data


def num_batches(num_fds: int) -> int:
    """How many batches so many descriptors make."""
    return -(-num_fds // BATCH)


def send(
    connection: socket.socket,
    message: dict[str, Any],
    data: bytes = b"",
    num_fds: int = 0,
    fds: Iterable[int] = (),
) -> None:
    """Send a message and its descriptors, which are closed batch by batch as they are sent.

    Raises:
        OSError: the other side is gone or does not take it in time.
    """
    connection.sendall(encode(message, data, num_fds))
    following = iter(fds)
    for first in range(0, num_fds, BATCH):
        batch: list[int] = []
        try:
            batch.extend(next(following) for _ in range(min(BATCH, num_fds - first)))
            socket.send_fds(connection, [b"\0"], batch)
        finally:
            for fd in batch:
                os.close(fd)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, int]:
    """Receive a message; ``receive_fds`` has to be run through for its descriptors.

    Returns:
        The message, the bytes beside it, and the number of descriptors that follow.

    Raises:
        WireError: the other side is gone or says something else.
        OSError: nothing came in time.
    """
    sizes = HEADER.unpack(_exactly(connection, HEADER.size))
    if max(sizes) > MAX_NBYTES:
        raise WireError("a message of impossible size")
    text = _exactly(connection, sizes[0])
    data = _exactly(connection, sizes[1])
    return parse(text), data, sizes[2]


def receive_fds(connection: socket.socket, num_fds: int) -> Iterator[int]:
    """The descriptors that follow a message, each of them the caller's to close.

    Descriptors that are not taken are closed; the batches are read to their end.

    Raises:
        WireError: the other side is gone.
        BlockingIOError: this process has no descriptor left, so that some were lost.
    """
    lost = 0
    for first in range(0, num_fds, BATCH):
        expected = min(BATCH, num_fds - first)
        mark, fds, _, _ = socket.recv_fds(connection, 1, expected, socket.MSG_CMSG_CLOEXEC)
        if not mark:
            raise WireError("the connection has ended")
        lost += expected - len(fds)
        try:
            while fds and not lost:
                yield fds.pop(0)
        finally:
            for fd in fds:
                os.close(fd)
    if lost:
        raise BlockingIOError(f"{lost} of {num_fds} descriptors were lost")


def parse(text: bytes) -> dict[str, Any]:
    """A message from its JSON.

    Raises:
        WireError: it is no message.
    """
    try:
        message = json.loads(text)
    except ValueError:
        raise WireError("not a message") from None
    if not isinstance(message, dict):
        raise WireError("not a message")
    return message


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them (``SO_PEERCRED``)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    # No byte more: the next ones may carry descriptors, which a plain recv would drop.
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(min(nbytes - len(parts), 1 << 20))
        if not part:
            raise WireError("the connection has ended")
        parts += part
    return bytes(parts)
