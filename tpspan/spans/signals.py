"""Signals between the streams of ranks: post, wait and barrier, each with a deadline.

Counters lie in one page per rank, mapped by all: rank r polls its own, its peers write there. How a
stream waits depends on who shares a GPU:

- every rank has its own GPU: a kernel posts and polls (``tpspan.kernels``), one launch a barrier;
- ranks share a GPU: they are time-sliced, and a kernel that spins keeps the one it waits for from
  running (2.3 ms a barrier, against 7 µs). There the stream itself waits for a value, see
  ``tpspan.spans.stream_ops``;
- no GPU: the host waits on a futex.

A slot is a set of counters for one purpose. Each wait takes one post of a pair of ranks, in order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, cast

import torch

from tpspan import kernels
from tpspan.errors import PeerError
from tpspan.kernels import host_remap
from tpspan.launch.world import World
from tpspan.memory.closing import close_each
from tpspan.memory.cuda import CudaDriver, device_uuid
from tpspan.memory.host import HostDriver
from tpspan.spans.board import Board
from tpspan.spans.host_ops import HostOps
from tpspan.spans.pages import Pages
from tpspan.spans.stream_ops import StreamOps
from tpspan.spans.stream_watch import StreamWatch
from tpspan.spans.stream_words import DeviceAccess, HostAccess, StreamWords

_SLOTS_NBYTES = 1 << 20  # of each page of counters


class SignalOps(Protocol):
    """One way to post and to wait."""

    def barrier(self, slot: int, stream: int, capturing: bool | None = None) -> None:
        """Hold the stream until the streams of all ranks have come to this barrier."""

    def post(self, slot: int, peer: int, stream: int) -> None:
        """Tell a peer's stream that everything before on this stream is done."""

    def wait(self, slot: int, peer: int, stream: int) -> None:
        """Hold the stream until the peer's next post."""

    def missing(self) -> tuple[int, ...]:
        """The ranks for which a wait ran out of time; empty as long as none did."""

    def close(self) -> None:
        """Stop helpers; nothing waits any more."""


class Signals:
    """The signals of one world, shared by its spans. Made by ``Signals.of``, collectively.

    Attributes:
        shares_device: whether any two ranks share a GPU; the same on all.
    """

    def __init__(self, world: World) -> None:
        self.board = Board.of(world)
        self.world_size = world.world_size
        exchange = self.board.exchange
        self.shares_device = any(self.board.all_gather(world.shares_device))
        self._free = list(range(num_slots(world)))[::-1]
        with contextlib.ExitStack() as undo:
            on_host = self.shares_device and not self._is_one_device(world)
            self._pages = Pages(exchange, world.driver, on_host=on_host)
            self._close = [self._pages.close]
            undo.callback(self._pages.close)
            if self.shares_device:
                reports = Pages(exchange, HostDriver())
                self._close.append(reports.close)
                undo.callback(reports.close)

            def make() -> SignalOps:
                if world.backend == "host":
                    num_cores = self.board.num_cores
                    return HostOps(self._pages, exchange, world.timeout_s, num_cores)
                # Now and not at first use: that may be while a stream is being captured.
                kernels.prepare(world.device.index)
                cast(CudaDriver, world.driver).remap = host_remap.remap
                _clear_own_page(self._pages, world)
                if not self.shares_device:
                    return KernelOps(self._pages, world)
                driver = cast(CudaDriver, world.driver)
                access = HostAccess() if on_host else DeviceAccess(driver)
                undo.callback(access.close)
                words = StreamWords(self._pages, reports, access, world)
                watch = StreamWatch(words, driver, world.timeout_s, world.abort)
                return StreamOps(words, driver, watch)

            # The vote also holds: nobody posts before every page is mapped and cleared.
            self._ops = self.board.together("preparing signals", make)
            undo.pop_all()

    @staticmethod
    def of(world: World) -> Signals:
        """The signals of a world, made at their first use. Collective."""
        return world.resource("signals", Signals)

    def acquire(self) -> int:
        """Take a slot. Ranks acquire and release in the same order, so that it is the same one.

        Raises:
            RuntimeError: every slot is in use.
        """
        if not self._free:
            raise RuntimeError("no signal slot is left: close spans that are no longer needed")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back, after all ranks have finished with it."""
        self._free.append(slot)

    def barrier(self, slot: int, stream: int, capturing: bool | None = None) -> None:
        """Hold the stream until the streams of all ranks have come here. Collective.

        On the host backend the caller itself is held. On CUDA the host goes on at once; a wait that
        runs out of time releases the stream, and ``check`` says so. On a GPU that ranks share the
        host is held if it is far ahead of the stream (``stream_watch.ROOM``), and a barrier in a
        replayed graph is watched only if a barrier or a wait outside follows it.

        Args:
            slot: of the barrier, the same on all ranks.
            stream: its handle; unused on the host backend.
            capturing: whether it is being captured, if the caller knows.

        Raises:
            PeerError: an earlier wait ran out of time.
        """
        self.check()
        self._ops.barrier(slot, stream, capturing)

    def post(self, slot: int, peer: int, stream: int) -> None:
        """Tell a peer that everything before on this stream is done."""
        self.check()
        self._ops.post(slot, self._peer(peer), stream)

    def wait(self, slot: int, peer: int, stream: int) -> None:
        """Hold the stream until the peer's next post on the slot.

        Raises:
            PeerError: the peer did not post in time (host backend), or an earlier wait ran out.
        """
        self.check()
        self._ops.wait(slot, self._peer(peer), stream)

    def check(self) -> None:
        """Raise what a wait on a stream ran into.

        Raises:
            PeerError: ranks did not come before the deadline; what was computed since is void.
            ClosedError: the world was closed.
        """
        self.board.check()
        missing = self._ops.missing()
        if missing:
            raise PeerError(
                missing,
                "did not come before a stream's wait ran out of time; results since are void",
            )

    def close(self) -> None:
        """Unmap the counters; the world is closing, so every later use raises ``ClosedError``."""
        close_each([self._ops.close, *self._close])

    def _is_one_device(self, world: World) -> bool:
        """Whether all ranks share one and the same GPU."""
        return len(set(self.board.all_gather(device_uuid(world.device.index)))) == 1

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.world_size:
            raise ValueError(f"there is no rank {peer} in a world of {self.world_size}")
        return peer


def num_slots(world: World) -> int:
    """How many slots the counters of a world have room for."""
    return kernels.num_slots(_SLOTS_NBYTES, world.world_size)


class KernelOps:
    """Kernels post and poll; every rank has a GPU of its own."""

    def __init__(self, pages: Pages, world: World) -> None:
        self._pages = pages
        self._rank, self._world_size = world.rank, world.world_size
        self._device = world.device.index
        self._timeout_ns = int(world.timeout_s * 1e9)
        # Counts advance on the device, so that a captured graph does not replay an old one.
        counts = torch.zeros(3, num_slots(world) * world.world_size, dtype=torch.int32)
        self._counts = counts.to(world.device)
        self._epochs, self._sent, self._expected = (row.data_ptr() for row in self._counts)
        self._status = torch.zeros(world.world_size, dtype=torch.int32).pin_memory()
        self._status_bytes = memoryview(cast(Any, self._status.numpy())).cast("B")
        self._all_well = bytes(len(self._status_bytes))

    def barrier(self, slot: int, stream: int, capturing: bool | None = None) -> None:
        if self._world_size == 1:
            return
        kernels.barrier(
            self._pages.base_address,
            self._pages.page_nbytes,
            slot,
            self._rank,
            self._world_size,
            self._epochs + 4 * slot,
            self._status.data_ptr(),
            self._timeout_ns,
            device=self._device,
            stream=stream,
        )

    def post(self, slot: int, peer: int, stream: int) -> None:
        kernels.post(
            self._pages.counter(slot, peer, self._rank),
            self._sent + 4 * (slot * self._world_size + peer),
            device=self._device,
            stream=stream,
        )

    def wait(self, slot: int, peer: int, stream: int) -> None:
        kernels.wait(
            self._pages.counter(slot, self._rank, peer),
            self._expected + 4 * (slot * self._world_size + peer),
            self._status.data_ptr() + 4 * peer,
            self._timeout_ns,
            device=self._device,
            stream=stream,
        )

    def missing(self) -> tuple[int, ...]:
        if self._status_bytes == self._all_well:  # a tenth of a µs: every barrier looks
            return ()
        return tuple(rank for rank, late in enumerate(self._status.tolist()) if late)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)


def _clear_own_page(pages: Pages, world: World) -> None:
    """Clear this rank's counters; a block's first content is undefined."""
    zeros = torch.zeros(pages.page_nbytes, dtype=torch.uint8, device=world.device)
    stream = torch.cuda.current_stream(world.device)
    own = pages.address_of(world.rank)
    world.driver.copy(own, zeros.data_ptr(), pages.page_nbytes, stream.cuda_stream)
    stream.synchronize()
