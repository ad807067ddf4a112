"""What ``async_op=True`` returns, and the thread that carries out such calls on the host.

A group's calls happen in the order in which they were made, on every rank: the thread takes them
one after another, and a call that does not ask for a work waits for those before it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future, collect_all

from tpspan.errors import ClosedError, PeerError

_FOREVER = timedelta(0)
_LOOK_S = 1.0  # how often who waits looks whether a callback holds the thread up


class HostWork(Work):  # type: ignore[misc]
    """A call that the group's thread carries out, or one that is complete already.

    Args:
        tensors: the outputs.
        worker: what will carry it out; None if it is complete, or about to be.
        is_done: it is complete.
    """

    def __init__(
        self, tensors: list[torch.Tensor], worker: Worker | None = None, *, is_done: bool = False
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._worker = worker
        self._error: BaseException | None = None
        self._future: Any = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if is_done:
            self._done.set()

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Hold the caller until the outputs are complete.

        Raises:
            TimeoutError: they were not within the timeout; the call goes on.
            PeerError: the group's thread is held up by a callback that does not end.
            BaseException: what the call raised.
        """
        if not self._done.is_set() and self._worker is not None:
            self._worker.hold(self, timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What the call raised, if it has ended."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs, once complete."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """A future of the outputs; callbacks run in the thread that completes it."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._done.is_set():
                    self._complete()
            return self._future

    def run(self, call: Callable[[], object]) -> bool:
        """Carry the call out, in the thread that is to do it.

        Returns:
            Whether somebody has a future of it, which ``tell`` then completes.
        """
        try:
            call()
        except BaseException as error:
            self._error = error.with_traceback(None)
        with self._lock:
            self._done.set()
            return self._future is not None

    def tell(self) -> None:
        """Complete the future: its callbacks run here and now."""
        with contextlib.suppress(Exception):  # of a callback: torch has logged it
            self._complete()

    def _complete(self) -> None:
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._tensors)


class Worker:
    """One thread that carries out calls in order; it starts with the first.

    The callbacks of a call's future run in it as well, before the next call, and may make calls:
    these are carried out at once. So they have the same place in the order on every rank, whether
    the callback was given before its call was complete, and runs here, or after, and ran there.

    Args:
        rank: this rank, for errors.
        timeout_s: how long a callback may hold up those who wait; a call has its own deadline.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[HostWork, Callable[[], object]]] = deque()
        self._is_busy = self._is_ending = False
        self._thread: threading.Thread | None = None
        self._ident = 0  # of the thread
        self._is_drained = True  # as far as whoever submits knows
        self._callback_since: float | None = None

    def is_this_thread(self) -> bool:
        """Whether the caller is a callback that runs in the worker's thread."""
        return self._ident != 0 and threading.get_ident() == self._ident

    def at_once(
        self, tensors: list[torch.Tensor], call: Callable[[], object], async_op: bool
    ) -> HostWork | None:
        """Carry out a call that a callback makes, in the worker's thread."""
        self._callback_since = None
        try:
            if not async_op:
                call()
                return None
            work = HostWork(tensors)
            work.run(call)
            return work
        finally:
            self._callback_since = time.monotonic()

    def submit(self, tensors: list[torch.Tensor], call: Callable[[], object]) -> HostWork:
        """Carry out a call after all those before; return at once."""
        work = HostWork(tensors, self)
        with self._changed:
            self._waiting.append((work, call))
            self._is_busy, self._is_drained = True, False
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="tpspan-collectives", daemon=True
            )
            self._thread.start()
        return work

    def drain(self) -> None:
        """Hold the caller until all calls and their callbacks are done.

        What the calls raised is their works' to tell.

        Raises:
            PeerError: a callback does not end.
        """
        if self._is_drained:
            return
        with self._changed:
            while self._is_busy:
                self._changed.wait(_LOOK_S)
                self._check()
            self._is_drained = True

    def hold(self, work: HostWork, timeout: timedelta) -> None:
        """Hold the caller until a call is complete.

        Raises:
            TimeoutError: it was not within the timeout, if that is not zero.
            PeerError: a callback does not end.
        """
        if self.is_this_thread():  # a callback waits for a later call: nobody else can make it
            while self._waiting and not work.is_completed():
                self._carry_out(*self._waiting.popleft())
        limit_s = timeout.total_seconds() or math.inf
        deadline = time.monotonic() + limit_s
        while not work._done.wait(min(limit_s, _LOOK_S)):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the collective call was not complete within {timeout}")
            self._check()

    def close(self) -> None:
        """End the thread after the calls that it has; one that a callback holds up is left."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None and not self.is_this_thread():
            with contextlib.suppress(PeerError, ClosedError):
                while self._thread.is_alive():
                    self._thread.join(_LOOK_S)
                    self._check()

    def _check(self) -> None:
        since = self._callback_since
        if since is not None and time.monotonic() > since + self._timeout_s:
            raise PeerError(
                [self._rank], f"a callback of a future did not end within {self._timeout_s:g} s"
            )
        if self._thread is not None and not self._thread.is_alive() and self._waiting:
            raise ClosedError("the thread that makes this call has ended, as in a forked process")

    def _serve(self) -> None:
        self._ident = threading.get_ident()
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_busy = False
                    self._changed.notify_all()
                    while not self._waiting and not self._is_ending:
                        self._changed.wait()
                if not self._waiting:
                    return
                item = self._waiting.popleft()
            self._carry_out(*item)
            del item  # an idle thread keeps no tensor

    def _carry_out(self, work: HostWork, call: Callable[[], object]) -> None:
        outer, self._callback_since = self._callback_since, None
        if work.run(call):
            self._callback_since = time.monotonic()
            work.tell()
        self._callback_since = outer and time.monotonic()


class StreamWork(Work):  # type: ignore[misc]
    """A call on a side stream; waiting makes the current stream wait, not the host."""

    def __init__(
        self, tensors: list[torch.Tensor], stream: torch.cuda.Stream, event: torch.cuda.Event
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._stream = stream
        self._event = event
        self._future: Any = None

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Hold the current stream until the outputs are complete."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the outputs are complete."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """As ``is_completed``: a failure shows at the group's next call."""
        return self.is_completed()

    def exception(self) -> BaseException | None:
        """Nothing: a failure shows at the group's next call."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The outputs; the current stream waits for them."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """A future of the outputs that is complete as far as the host is concerned."""
        if self._future is None:
            with torch.cuda.stream(self._stream):
                self._future = Future(devices=[self._stream.device])
                self._future.set_result(self._tensors)
        return self._future


class JoinedWork(Work):  # type: ignore[misc]
    """Several calls as one: complete when all of them are, and failed by the first that failed.

    Args:
        works: of the calls, at least one, in the order in which they were made.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = tuple(works)
        self._future: Any = None

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for each as itself does, all of them even if one has failed.

        Raises:
            BaseException: what the first of those that failed raises.
        """
        failed: BaseException | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Hold the current stream until all outputs are complete."""
        for work in self._works:
            work.block_current_stream()

    def is_completed(self) -> bool:
        """Whether all have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """What the first of those that failed raised; None if none has."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        """The outputs of all, once complete."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of the outputs of all."""
        if self._future is None:
            every = collect_all([work.get_future() for work in self._works])
            self._future = every.then(
                lambda done: [tensor for one in done.value() for tensor in one.value()]
            )
        return self._future
