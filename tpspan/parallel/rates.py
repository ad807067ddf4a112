"""The rates that ``auto`` decides by: measured once on the machine, then kept in a small file.

There is one file (``tpspan.cached``) for every combination of device, driver, number of ranks and
dtype; ``TPSPAN_RATES_CACHE=0`` neither reads nor writes it, and ranks may then decide differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpspan.cached import DiskCache
from tpspan.launch.world import World
from tpspan.parallel.policy import LINKED, LOCAL, Rates
from tpspan.parallel.staging import SharedWeight, multiply, staged_product

CACHE_VARIABLE = "TPSPAN_RATES_CACHE"

_CACHE = DiskCache("rates", 2, CACHE_VARIABLE)
_LEAST_NBYTES = 8 << 20
_SOME_ROWS, _MANY_ROWS = 256, 1024
# Products of many rows that keep the device busy while the host queues what is timed.
_AHEAD = 12
_REPEATS = 3
_AS_LOCAL = 1.1
_NEVER_AGAIN = 1e9


class KnownRates:
    """The rates of a world, by dtype, as far as they are known. Each rank measures its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rates: dict[torch.dtype, Rates] = {}
        self._sought: set[torch.dtype] = set()

    @classmethod
    def of(cls, world: World) -> KnownRates:
        """The rates of a world; nothing is measured yet."""
        return world.resource("rates", cls)

    def close(self) -> None:
        """Nothing to give back."""

    def get(self, weight: SharedWeight) -> Rates:
        """The rates that hold for a weight, measured on it if they are not known.

        Measuring takes a few ms to 100 ms and a copy of the weight in local memory. It is put off,
        with the rates of GPUs with NVLink instead, while a stream is being captured and for weights
        under 8 MiB.
        """
        found = self._rates.get(weight.dtype)
        if found is not None:
            return found
        world = self._world
        if world.backend == "host" or world.world_size == 1:
            return self._rates.setdefault(weight.dtype, LOCAL)
        key = self._key(weight.dtype)
        stored = None if weight.dtype in self._sought else load(key)
        self._sought.add(weight.dtype)
        if stored is None:
            if weight.remote_nbytes < _LEAST_NBYTES or torch.cuda.is_current_stream_capturing():
                return LINKED
            stored = store(key, measure(weight))
        return self._rates.setdefault(weight.dtype, stored)

    def set(self, dtype: torch.dtype, rates: Rates) -> None:
        """Decide by these rates from now on, in this process."""
        self._rates[dtype] = rates

    def _key(self, dtype: torch.dtype) -> dict[str, str]:
        world = self._world
        return {
            "device": torch.cuda.get_device_name(world.device),
            "cuda": str(torch.version.cuda),
            "driver": _driver_version(),
            "torch": torch.__version__,
            "ranks": str(world.world_size),
            "shared": str(world.shares_device),
            "dtype": str(dtype),
        }


def measure(weight: SharedWeight) -> Rates:
    """Measure on a weight between GPUs; it is only read. Not inside a capture."""
    device = weight.span.world.device
    rows, columns = weight.shape
    whole = weight.in_place()
    remote = [piece for piece in weight.copies if piece.owner != weight.span.world.rank]
    few, some, many = (
        torch.randn(count, columns, device=device).to(weight.dtype)
        for count in (1, _SOME_ROWS, _MANY_ROWS)
    )
    out = torch.empty(_MANY_ROWS, rows, dtype=weight.dtype, device=device)
    with weight.fetching() as local:
        address = weight.address

    def copies() -> None:
        with weight.lane.forked():
            weight.lane.copy(local.data_ptr(), address, remote)

    def ahead() -> None:
        for _ in range(_AHEAD):
            multiply(many, local, None, out)

    def product_s(x: torch.Tensor, w: torch.Tensor) -> float:
        return _seconds(lambda: multiply(x, w, None, out[: len(x)]), ahead)

    copy_s = _seconds(copies, ahead)
    local_few_s, local_many_s = product_s(few, local), product_s(many, local)
    in_place_few_s, in_place_many_s = product_s(few, whole), product_s(many, whole)
    staged_s = _seconds(lambda: staged_product(weight, few, None, out[:1]), ahead)
    # The height of the tiles depends on the rows, and with it how often the weight is read: 256
    # rows read 14336 x 8192 of bf16 twice, and 1024 rows four times.
    rows_per_reading = min(
        rows / max(1.0, taken_s / in_place_few_s)
        for rows, taken_s in ((_SOME_ROWS, product_s(some, whole)), (_MANY_ROWS, in_place_many_s))
    )
    rereads = in_place_many_s > _AS_LOCAL * local_many_s
    return Rates(
        copy_bytes_per_s=weight.remote_nbytes / copy_s,
        read_bytes_per_s=weight.remote_nbytes / in_place_few_s,
        rows_per_reading=rows_per_reading if rereads else _NEVER_AGAIN,
        local_bytes_per_s=weight.nbytes / local_few_s,
        flops_per_s=2.0 * _MANY_ROWS * rows * columns / local_many_s,
        overlaps=True,
        start_s=max(0.0, staged_s - max(copy_s, local_few_s)),
    )


def load(key: dict[str, str]) -> Rates | None:
    """The rates stored under a key, or None if there are none that can be used."""
    return _usable(_CACHE.load(key))


def store(key: dict[str, str], rates: Rates) -> Rates:
    """Store rates under a key, unless there are some; where that is impossible, do nothing.

    Returns:
        What is stored now. Ranks that measure at the same time so decide by the same rates: one
        that reads in place while another copies takes longer than either way on both.
    """
    found = _CACHE.store(
        key, dataclasses.asdict(rates), keep=lambda found: _usable(found) is not None
    )
    return _usable(found) or rates


def _usable(numbers: Any) -> Rates | None:
    try:
        if not all(math.isfinite(number) for number in numbers.values()):
            return None
        return Rates(**numbers)
    except (ValueError, TypeError, AttributeError):
        return None


def _driver_version() -> str:
    """What the kernel module says of itself, which changes with every driver."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def _seconds(body: Callable[[], object], ahead: Callable[[], object]) -> float:
    """The shortest of a few runs on the current stream, after one to warm up.

    Args:
        ahead: work that the stream does first: else the host's time would be counted.
    """
    body()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ahead()
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return max(min(times), 1e-6)
