"""A train of equal work on a device, timed while other things go on beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch


class Train(Protocol):
    """Work that is started, goes on by itself, and says how long it took."""

    def start(self) -> None:
        """Begin the work; it goes on after this returns."""

    def is_running(self) -> bool:
        """Whether it goes on."""

    def finish(self) -> float:
        """Wait for its end; return the seconds it took on its device."""


class StreamTrain:
    """``num_steps`` kernels on a stream of their own, timed by events."""

    def __init__(self, step: Callable[[], object], num_steps: int, device: torch.device) -> None:
        self._step, self._num_steps = step, num_steps
        self._stream = torch.cuda.Stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        with torch.cuda.stream(self._stream):
            self._begin.record()
            for _ in range(self._num_steps):
                self._step()
            self._end.record()

    def is_running(self) -> bool:
        return not self._end.query()

    def finish(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class ThreadTrain:
    """``num_steps`` calls on a thread; torch gives the interpreter's lock back inside each.

    Timed by the thread's processor time: what it lost to others that wanted the core is not the
    mappings' doing.
    """

    def __init__(self, step: Callable[[], object], num_steps: int) -> None:
        self._step, self._num_steps = step, num_steps
        self._seconds = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="tpspan-bench-load")
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> float:
        if self._thread is not None:
            self._thread.join()
        return self._seconds

    def _work(self) -> None:
        start = time.thread_time()
        for _ in range(self._num_steps):
            self._step()
        self._seconds = time.thread_time() - start


def products(device: torch.device, size: int) -> Callable[[], object]:
    """A step that multiplies matrices: bound by arithmetic."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def copies(device: torch.device, nbytes: int) -> Callable[[], object]:
    """A step that copies memory: bound by it, and by the translation of addresses."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
