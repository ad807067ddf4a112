"""A client of the keeper and its socket: nothing here ever waits for the client.

Only the standard library is imported here: the keeper starts without torch.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

from tpspan.sharing import wire
from tpspan.sharing.registry import Block, Client

_RECEIVE_NBYTES = 1 << 16

Received = tuple[dict[str, Any], bytes, list[int], bool]


class Peer(Client):
    """A client and its socket: what has arrived, and what it has not read yet."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        super().__init__(pid)
        self.connection = connection
        self.news: tuple[int, str] | None = None
        self._arrived = bytearray()
        self._fds: list[int] = []
        self._truncated = False
        # Blocks in the queue hold their descriptors open until they are sent.
        self._queue: deque[tuple[bytes, tuple[Block, ...]]] = deque()

    @property
    def wants_to_send(self) -> bool:
        """Whether something waits until the client reads."""
        return bool(self._queue) or self.news is not None

    def receive(self) -> list[Received]:
        """Take what has arrived: messages, the bytes and descriptors with each, and whether some
        descriptors were lost.

        Raises:
            WireError: the client is gone, or does not speak this protocol.
        """
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            part, fds, seen, _ = socket.recv_fds(
                self.connection, _RECEIVE_NBYTES, wire.BATCH, flags
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise wire.WireError(str(error)) from None
        self._fds += fds
        self._truncated |= bool(seen & socket.MSG_CTRUNC)
        if not part:
            raise wire.WireError("the connection has ended")
        self._arrived += part
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Received | None:
        size = wire.HEADER.size
        if len(self._arrived) < size:
            return None
        num_text, num_data, num_fds = wire.HEADER.unpack(self._arrived[:size])
        if max(num_text, num_data, num_fds) > wire.MAX_NBYTES:
            raise wire.WireError("a message of impossible size")
        end = size + num_text + num_data
        whole = end + wire.num_batches(num_fds)
        if len(self._arrived) < whole:
            return None
        message = wire.parse(bytes(self._arrived[size : size + num_text]))
        data = bytes(self._arrived[size + num_text : end])
        del self._arrived[:whole]
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        lost = self._truncated or len(fds) < num_fds
        self._truncated = False
        return message, data, fds, lost

    def answer(self, encoded: bytes, blocks: tuple[Block, ...]) -> None:
        """Put an answer into the queue."""
        self._queue.append((encoded, ()))
        for first in range(0, len(blocks), wire.BATCH):
            self._queue.append((b"\0", blocks[first : first + wire.BATCH]))

    def send(self) -> None:
        """Send what the client takes now.

        Raises:
            WireError: the client is gone.
        """
        try:
            while self.wants_to_send:
                if not self._queue and self.news is not None:
                    self._queue.append((wire.encode({"newest": self.news}), ()))
                    self.news = None
                part, blocks = self._queue[0]
                if blocks:
                    sent = socket.send_fds(self.connection, [part], [block.fd for block in blocks])
                else:
                    sent = self.connection.send(part)
                if sent < len(part):
                    self._queue[0] = (part[sent:], ())
                else:
                    self._queue.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise wire.WireError(str(error)) from None

    def close(self) -> None:
        """Close the connection and what came through it."""
        self.connection.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._queue.clear()
