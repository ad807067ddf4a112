"""What ``async_op=True`` returns, and the thread that carries out such calls on the host.

A group's calls happen in the order in which they were made, on every rank: the thread takes them
one after another, and a call that does not ask for a work waits for those before it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future, collect_all

_FOREVER = timedelta(0)


class HostWork(Work):  # type: ignore[misc]
    """A call that the group's thread carries out, or one that is complete already."""

    def __init__(self, tensors: list[torch.Tensor], *, is_done: bool = False) -> None:
        super().__init__()
        self._tensors = tensors
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
            BaseException: what the call raised.
        """
        if not self._done.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"the collective call was not complete within {timeout}")
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

    def run(self, call: Callable[[], object]) -> None:
        """Carry the call out, in the thread that is to do it."""
        try:
            call()
        except BaseException as error:
            self._error = error.with_traceback(None)
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete()

    def _complete(self) -> None:
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._tensors)


class Worker:
    """One thread that carries out calls in order; it starts with the first."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[HostWork, Callable[[], object]] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: HostWork | None = None

    def submit(self, tensors: list[torch.Tensor], call: Callable[[], object]) -> HostWork:
        """Carry out a call after all those before; return at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="tpspan-collectives", daemon=True
            )
            self._thread.start()
        work = HostWork(tensors)
        self._last = work
        self._queue.put((work, call))
        return work

    def drain(self) -> None:
        """Hold the caller until all calls are done; what they raised is their works' to tell.

        A callback of a future runs in the thread itself and may call on: it waits for nothing.
        """
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last._done.wait()
            if self._last is last:
                self._last = None

    def close(self) -> None:
        """End the thread after the calls that it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, call = item
            with contextlib.suppress(Exception):  # of a callback: torch has logged it
                work.run(call)
            del item, work, call  # an idle thread keeps no tensor


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
