"""The most memory that a piece of code takes on this rank."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tpspan.tools.bench.measuring import Bench

_WATCH_S = 1e-3


def release(bench: Bench) -> None:
    """Give back what allocators keep, so that all begin with the same. Collective."""
    bench.synchronize()
    gc.collect()
    if bench.is_cuda:
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)
    bench.start_together()


@contextmanager
def watched(bench: Bench, watch: bool) -> Iterator[list[int]]:
    """The most memory of this process inside, beyond that before, in bytes and without spans.

    On CUDA what torch has reserved. On the host private memory, which memory that ranks share is
    not; a thread looks at it every millisecond, and only if asked to, since that takes time.

    Yields:
        A list of one number, complete at the end.
    """
    most = [0]
    device = bench.world.device
    if bench.is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        yield most
        most[0] = torch.cuda.max_memory_reserved(device) - before
        return
    if not watch:
        yield most
        return
    before, stop = _private_nbytes(), threading.Event()

    def look() -> None:
        while not stop.wait(_WATCH_S):
            most[0] = max(most[0], _private_nbytes() - before)

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def _private_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not tell private memory")
