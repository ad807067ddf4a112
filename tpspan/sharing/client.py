"""A connection of this process to the keeper: requests, their answers, and news.

The keeper tells the end of a process by its connections, so every publication and every attachment
has one of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tpspan.errors import (
    KeeperError,
    NameTakenError,
    UnknownNameError,
    VersionGoneError,
)
from tpspan.sharing import wire
from tpspan.sharing.starting import TIMEOUT_S, connect

_RETRY_S = 0.02


class Lost(Exception):
    """The keeper has ended, or was killed, before it answered."""


class LayoutDiffers(Exception):
    """A name holds tensors of another layout.

    Attributes:
        layout: that of the name.
        device: where its tensors lie.
    """

    def __init__(self, layout: bytes, device: str) -> None:
        self.layout, self.device = layout, device
        super().__init__()


class NoAnswer(KeeperError):
    """The keeper lives and does not answer in time; it may do what it was asked for later."""


class MissingBlocks(KeeperError):
    """A version names blocks that the keeper does not have, or not yet."""


class Unsettled(UnknownNameError):
    """A name is unknown to a keeper that follows one that was killed: it may come in a moment.

    Attributes:
        left_s: how long publishers have left to come.
    """

    def __init__(self, text: str, left_s: float) -> None:
        self.left_s = left_s
        super().__init__(text)


class Answer(NamedTuple):
    """What the keeper answered, the bytes beside it, and its descriptors, each the taker's."""

    message: dict[str, Any]
    data: bytes
    fds: Iterator[int]


class Connection:
    """One connection; any thread may use it.

    Attributes:
        newest: number and token of the newest version, as the keeper has told last; a number of 0
            if it has told of none, or that the name was removed.
        number: of connections so far, so that a new one is noticed.
    """

    def __init__(self) -> None:
        self.newest = (0, "")
        self.number = 0
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._is_greeted = False
        self._left: list[socket.socket] = []
        self._num_waiting = 0
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as this process knows."""
        return self._socket is not None

    def open(self) -> None:
        """Connect, if there is no connection; starts a keeper if there is none.

        Raises:
            KeeperError: it does not start or answer, or this connection was closed for good.
        """
        with self._lock:
            if self._closed:
                raise KeeperError("this connection was closed")
            if self._socket is None:
                self._socket = connect(greet=False)  # the first request greets
                self._is_greeted = False
                self.number += 1

    @contextlib.contextmanager
    def request(
        self,
        message: dict[str, Any],
        data: bytes = b"",
        num_fds: int = 0,
        fds: Iterable[int] = (),
        *,
        number: int | None = None,
    ) -> Iterator[Answer]:
        """Ask, and have the answer for a ``with`` block; what is left of its descriptors is closed.

        Args:
            message, data, num_fds, fds: as for ``wire.send``.
            number: of the connection on which this makes sense.

        Raises:
            Lost: the keeper has ended; this connection is new at its next use. Or another thread
                has found that, and it is new by now.
            TpspanError: what the keeper refused, as the error that it is.
        """
        with self._lock:
            if number is not None and (self._socket is None or number != self.number):
                raise Lost("the connection has ended")
            self.open()
            assert self._socket is not None
            answered = False
            try:
                self._socket.settimeout(TIMEOUT_S)
                if not self._is_greeted:
                    message = {**message, "protocol": wire.PROTOCOL}
                with contextlib.suppress(ConnectionError):  # it may have said why and hung up
                    wire.send(self._socket, message, data, num_fds, fds)
                answer, data, count = self._receive(self._socket)
                answered = self._is_greeted = True
                if "error" in answer:
                    raise _error(answer, data)
                following = wire.receive_fds(self._socket, count)
                try:
                    yield Answer(answer, data, following)
                finally:
                    for fd in following:  # the next answer begins behind them
                        os.close(fd)
            except BlockingIOError as error:
                raise KeeperError(
                    f"this process has no file descriptor left for published memory: {error}. "
                    "Raise the limit (ulimit -n) or use larger blocks"
                ) from None
            except TimeoutError:
                self._disconnect()
                raise NoAnswer(f"the keeper does not answer within {TIMEOUT_S:g} s") from None
            except (OSError, wire.WireError) as error:
                self._disconnect()
                raise Lost(str(error)) from None
            except BaseException:
                if not answered:  # a message was cut short: nothing can follow it
                    self._disconnect()
                raise

    def ask(
        self, message: dict[str, Any], data: bytes = b"", *, number: int | None = None
    ) -> dict[str, Any]:
        """The answer to a request without descriptors; raises as ``request`` does."""
        with self.request(message, data, number=number) as answer:
            return answer.message

    def say(self, message: dict[str, Any]) -> None:
        """Tell the keeper something that it does not answer."""
        with self._lock:
            if self._socket is None:
                return
            try:
                wire.send(self._socket, message)
            except BaseException as error:
                self._disconnect()  # it may have been cut short
                if not isinstance(error, OSError):
                    raise

    def wait(self, timeout_s: float) -> None:
        """Wait for news, at most so long.

        Raises:
            Lost: the keeper has ended; this connection is new at its next use.
            KeeperError: there is none, and none can be started.
        """
        with self._lock:
            self.open()
            connection = self._socket
            assert connection is not None
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            self._num_waiting += 1
        try:
            ready = poll.poll(max(timeout_s, 0.0) * 1e3)
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._close_left()
        with self._lock:
            if not ready or self._socket is not connection:
                return
            # Whoever asked in between has taken the news: look again.
            if not poll.poll(0):
                return
            try:
                connection.settimeout(TIMEOUT_S)
                self._note(*wire.receive(connection))
            except BaseException as error:
                self._disconnect()  # nothing can follow what was cut short
                if isinstance(error, OSError | wire.WireError):
                    raise Lost(str(error)) from None
                raise

    def close(self) -> None:
        """Disconnect for good; idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _receive(self, connection: socket.socket) -> tuple[dict[str, Any], bytes, int]:
        while True:
            received = wire.receive(connection)
            if not _is_news(received[0]):
                return received
            self._note(*received)

    def _note(self, message: dict[str, Any], data: bytes, num_fds: int) -> None:
        if _is_news(message):
            number, token = message["newest"]
            self.newest = (number, token)

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # wakes a thread that waits for news
                self._socket.shutdown(socket.SHUT_RDWR)
            self._left.append(self._socket)
            self._socket = None
            self._close_left()

    def _close_left(self) -> None:
        # A thread that waits looks at a number, which must not be that of something else by then.
        if not self._num_waiting:
            for left in self._left:
                left.close()
            self._left.clear()


def keep_trying(step: Callable[[], Any]) -> Any:
    """Do a step again if the keeper was killed before or in it.

    A publisher that lives brings its name back to the next keeper: a name that a keeper just
    started after a kill does not know is asked for again for a while.

    Raises:
        As the step; KeeperError if keepers end again and again.
    """
    for attempt in range(1_000_000):
        try:
            return step()
        except Lost as error:
            if attempt > 10:
                raise KeeperError(f"keepers end again and again: {error}") from None
        except Unsettled as error:
            if error.left_s <= 0:
                raise UnknownNameError(str(error)) from None
            time.sleep(_RETRY_S)
    raise AssertionError("unreachable")


def _is_news(message: dict[str, Any]) -> bool:
    """Whether the keeper says it unasked: the newest version, and nothing else."""
    return message.keys() == {"newest"}


def _error(answer: dict[str, Any], data: bytes) -> Exception:
    kind, text, details = answer["error"], answer["text"], answer["details"]
    if kind == "unknown":
        return Unsettled(text, details.get("settling_s", 0.0))
    if kind == "taken":
        return NameTakenError(text, details["pid"])
    if kind in ("gone", "early"):
        return VersionGoneError(text)
    if kind == "layout":
        return LayoutDiffers(data, details["device"])
    if kind == "missing":
        return MissingBlocks(text)
    if kind == "lost":
        return UnknownNameError(text)
    if kind == "name":
        return ValueError(text)
    return KeeperError(text)


def ask_once(message: dict[str, Any]) -> dict[str, Any]:
    """A single request on a connection of its own; raises as ``Connection.request`` does."""
    connection = Connection()
    try:
        answer: dict[str, Any] = keep_trying(lambda: connection.ask(message))
        return answer
    finally:
        connection.close()
