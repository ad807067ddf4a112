"""Handing tensors from one rank to others by mappings and signals; nothing is copied."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Self

import torch

from tpspan.errors import ClosedError
from tpspan.launch.world import World
from tpspan.parallel.handoff_arguments import (
    BLOCK_UNIT_NBYTES,
    HandoffStats,
    checked_ranks,
    choose_mode,
    places_of,
)
from tpspan.parallel.handoff_mapped import MappedTransport
from tpspan.parallel.handoff_parts import Shape, round_up
from tpspan.parallel.handoff_send import SendTransport
from tpspan.parallel.headers import LARGEST_DEPTH
from tpspan.parallel.link import Link
from tpspan.parallel.packing import Packed, Packing, Placed, Spec, pack
from tpspan.parallel.slot import Slot


class Handoff:
    """A channel from one rank to another, or to several. Collective among these ranks only.

    The blocks are memory of the (first) consumer, and go round: the producer writes into the next
    free one, the consumer reads it where it is. In ``window`` mode each block has its own address
    on each side, and a hand-over is a signal. In ``remap`` mode each side has one address for ever,
    and a helper thread swaps the block behind it once everything that used it is done; a captured
    graph that uses the address stays right. In ``send`` mode torch.distributed carries the tensors.

    On CUDA only streams wait, with the world's deadline; a wait that ran out is raised by the next
    call, or by ``check``. On the host backend the caller waits.

    One thread at a time takes slots on each side; any may release. Ranks that make several channels
    make them, and close them, in one order: sorted by the ranks, for example.

    Args:
        world: holds the ranks.
        src: produces.
        dst: consumes; several ranks read the same blocks, and may not write them. It may be ``src``
            itself: then one process stands on both sides.
        nbytes: room in a block, for all tensors of one hand-over; rounded up to 4 KiB. All blocks
            together take whole pages of 2 MiB; in ``remap`` mode each block does.
        mode: ``auto`` takes ``window``, or ``remap`` for a fixed address; ``send`` if the ranks
            cannot map each other's memory.
        depth: blocks that go round: so many may be on their way.
        fixed_address: ask for ``remap``.
        devices: of the producer and of the consumer, where ``src`` is ``dst`` and drives two GPUs.
        timeout_s: how long the host waits for other ranks; by default as the world.

    Raises:
        ValueError: the arguments do not fit together; nothing was done.
        CollectiveMismatch: the ranks asked for different channels; nothing was done.
        OutOfMemoryError, DriverError: it failed on this rank; undone on all.
        PeerError: it failed on another one, or one did not come.
    """

    def __init__(
        self,
        world: World,
        src: int,
        dst: int | Sequence[int],
        nbytes: int,
        *,
        mode: str = "auto",
        depth: int = 2,
        fixed_address: bool = False,
        devices: tuple[torch.device | str, torch.device | str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._transport: MappedTransport | SendTransport | None = None
        targets = checked_ranks(world, src, dst)
        places = places_of(world, src, targets, devices)
        timeout_s = world.timeout_s if timeout_s is None else timeout_s
        link = Link.of(world, tuple(sorted({src, *targets})))

        def check() -> Shape:
            chosen = choose_mode(mode, fixed_address, is_one_domain=link.is_one_domain)
            least = 2 if chosen == "remap" else 1
            if nbytes < 1:
                raise ValueError(f"nbytes={nbytes}: a block has at least one byte")
            if not least <= depth <= LARGEST_DEPTH:
                raise ValueError(f"depth={depth}: in {chosen} mode {least} to {LARGEST_DEPTH}")
            if chosen == "send" and targets == (src,):
                raise ValueError("a rank does not send to itself: use another mode")
            page_nbytes, remaps = world.driver.page_nbytes, chosen == "remap"
            block_nbytes = round_up(nbytes, page_nbytes if remaps else BLOCK_UNIT_NBYTES)
            inner = tuple(map(link.inner, targets))
            return Shape(link.inner(src), inner, block_nbytes, depth, remaps, page_nbytes)

        request = (src, targets, nbytes, mode, depth, fixed_address)
        self.world, self.src, self.dst, self.depth = world, src, targets, depth
        self._num_finished = 0
        self._channels = link.channels
        with link.outer_names():
            if link.is_one_domain and mode != "send":
                self._transport = MappedTransport(world, link, request, check, places, timeout_s)
            else:
                self._transport = SendTransport(world, link, request, check)
        self.block_nbytes = self._transport.shape.block_nbytes
        self.mode = self._transport.mode
        self._channels.add(self)

    @property
    def is_producer(self) -> bool:
        """Whether this rank produces."""
        return self.world.rank == self.src

    @property
    def is_consumer(self) -> bool:
        """Whether this rank consumes."""
        return self.world.rank in self.dst

    def produce(self, *, timeout_s: float | None = None) -> Slot:
        """Take the next block to write; the stream, or on the host backend the caller, waits.

        Raises:
            ValueError: this rank does not produce.
            InUseError: as many slots as may be are held already; release one first.
            PeerError: the consumer is dead, or has not released a block before the deadline.
            CaptureError: the current stream is being captured into a graph.
            ClosedError: the channel was closed.
        """
        return self._take(True, timeout_s)

    def consume(self, *, timeout_s: float | None = None) -> Slot:
        """Take the next block to read; the stream, or on the host backend the caller, waits.

        Raises:
            As ``produce``, of the other side.
        """
        return self._take(False, timeout_s)

    def acquire(self, *, timeout_s: float | None = None) -> Slot:
        """``produce`` where this rank produces, ``consume`` where it consumes.

        Raises:
            ValueError: it does both.
        """
        if self.is_producer and self.is_consumer:
            raise ValueError("this rank is on both sides: call produce or consume")
        return self._take(self.is_producer, timeout_s)

    def try_produce(self) -> Slot | None:
        """``produce`` if the consumer's host has released the next block already, else None."""
        return self._take(True, None) if self._open().has_come(True) else None

    def try_consume(self) -> Slot | None:
        """``consume`` if the producer's host has handed the next block over already, else None."""
        return self._take(False, None) if self._open().has_come(False) else None

    def pack(self, specs: Iterable[tuple[Sequence[int], torch.dtype]]) -> Packed:
        """Place tensors of these shapes and dtypes once, for slots that all hold the same.

        ``slot.all_of`` then costs a fraction of asking for one after another.

        Raises:
            As ``Slot.tensor``.
        """
        return pack(self.block_nbytes, specs)

    def fixed_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        offset_bytes: int = 0,
        producer: bool | None = None,
    ) -> torch.Tensor:
        """In ``remap`` mode a tensor over the address of this side, for good.

        What it shows belongs to the slot that is held; use it only while one is. A graph that was
        captured with it works on whatever is mapped at its replay.

        Args:
            producer: which side's, where this rank is both.

        Raises:
            ValueError: another mode, or it does not lie inside a block.
        """
        transport = self._open()
        if self.mode != "remap":
            raise ValueError(f"in {self.mode} mode no address stays: ask for fixed_address=True")
        placed = Packing(self.block_nbytes).place(shape, dtype)
        if offset_bytes < 0 or offset_bytes % dtype.itemsize:
            raise ValueError(f"offset_bytes={offset_bytes} is not a place for {dtype}")
        if offset_bytes + placed.nbytes > self.block_nbytes:
            raise ValueError(f"{placed.nbytes} bytes at {offset_bytes} do not fit into a block")
        placed = Placed(offset_bytes, placed.nbytes, placed.shape, dtype)
        return transport.fixed_view(self.is_producer if producer is None else producer, placed)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream uses this channel's tensors: a remap then waits for it, too."""
        self._open().record_stream(stream)

    def check(self) -> None:
        """Raise what a wait on a stream, or a remap, ran into.

        Raises:
            PeerError: a rank did not come in time; results since are void.
            DriverError: a remap failed.
        """
        self._open().check()

    def stats(self) -> HandoffStats:
        """What was done so far on this rank."""
        transport = self._open()
        return HandoffStats(
            mode=self.mode,
            nbytes=self.block_nbytes,
            depth=self.depth,
            ring_nbytes=transport.ring_nbytes,
            num_handovers=self._num_finished,
            num_remaps=transport.num_remaps,
            remap_us=transport.remap_us,
            remap_host_us=transport.remap_host_us,
            copied_nbytes=transport.copied_nbytes,
            num_waits=transport.num_waits,
        )

    @property
    def is_closed(self) -> bool:
        """Whether the channel has been closed."""
        return self._transport is None

    def close(self, *, force: bool = False) -> None:
        """Unmap on all its ranks, then give the blocks back. Collective; once is enough.

        What was handed over and not consumed is lost.

        Args:
            force: close although tensors or slots are in use (using them afterwards crashes the
                process), and without the other ranks, which may be dead.

        Raises:
            InUseError: tensors or slots of it are still alive on this rank; nothing was done.
            PeerError: the same on another rank; or ranks did not come.
        """
        if self._transport is not None:
            self._transport.close(force=force, forget=self._forget, name=repr(self))

    def close_with_world(self) -> None:
        """Close without the other ranks unless tensors live; the world's ``close`` calls it."""
        if self._transport is not None and self._transport.num_live == 0:
            self.close(force=True)

    def place(self, slot: Slot, placed: Placed) -> torch.Tensor:
        """A tensor in a slot's block; ``Slot.tensor`` calls it."""
        return self._open().view(slot, placed)

    def place_all(self, slot: Slot, packed: Packed) -> list[torch.Tensor]:
        """All tensors of a slot; ``Slot.all_of`` calls it."""
        return self._open().views(slot, packed)

    def header(self, slot: Slot, *, wait: bool) -> tuple[Spec, ...] | None:
        """What the producer packed for a slot; ``Slot`` calls it."""
        return self._open().header(slot, wait=wait)

    def may_be(self, slot: Slot, packed: Packed) -> bool:
        """Whether the producer may have packed that for a slot; ``Slot`` calls it."""
        return self._open().may_be(slot, packed)

    def wait_until_mapped(self, slot: Slot) -> None:
        """Hold the caller until a slot's address leads to its block; ``Slot`` calls it."""
        self._open().wait_until_mapped(slot)

    def finish(self, slot: Slot) -> None:
        """Hand over or give back; ``Slot.release`` calls it."""
        self._open().finish(slot)
        self._num_finished += 1

    def put_back(self, slot: Slot) -> bool:
        """Untake a producer's slot after an exception; ``Slot`` calls it."""
        return self._transport is None or self._transport.put_back(slot)

    def _take(self, is_producer: bool, timeout_s: float | None) -> Slot:
        return Slot(self, self._open().take(is_producer, timeout_s), is_producer)

    def _forget(self) -> None:
        self._transport = None
        self._channels.discard(self)

    def _open(self) -> MappedTransport | SendTransport:
        if self._transport is None:
            raise ClosedError(f"{self!r} was closed")
        return self._transport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may be elsewhere: ask none of them
            self.close_with_world()

    def __del__(self) -> None:
        if getattr(self, "_transport", None) is not None:  # invariant 10: no driver call from here
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        to = self.dst[0] if len(self.dst) == 1 else self.dst
        state = ", closed" if self.is_closed else ""
        return f"<Handoff {self.src} -> {to}, {self.depth} blocks, {self.mode}{state}>"
