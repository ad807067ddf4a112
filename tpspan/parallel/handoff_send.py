"""Hand-overs between domains: torch.distributed carries the tensors, behind the same interface."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpspan.errors import CollectiveMismatch, PeerError
from tpspan.launch.votes import together
from tpspan.launch.world import World
from tpspan.parallel.handoff_parts import Shape
from tpspan.parallel.link import Link
from tpspan.parallel.packing import (
    HEADER_WORDS,
    Packed,
    Packing,
    Placed,
    Spec,
    decode,
    encode,
    strides_of,
)
from tpspan.parallel.ring import Ring
from tpspan.parallel.slot import Slot

_TAGS = 1 << 30


class SendTransport:
    """``Transport`` by ``isend`` and ``recv`` of torch's default group. Made collectively.

    A header goes first, through host memory where the group can, so the consumer's host waits
    until the producer's has released. Both sides have ``depth`` blocks of their own.

    Attributes:
        shape, mode: what was made.
        ring_nbytes: memory of this side's blocks.
        copied_nbytes: bytes of tensors that were sent or received.
    """

    mode = "send"
    num_remaps = 0
    remap_us = remap_host_us = 0.0

    def __init__(
        self, world: World, link: Link, request: object, check: Callable[[], Shape]
    ) -> None:
        control = link.world.control
        inner = link.world.rank

        def prepare() -> Shape:
            if not dist.is_initialized():
                raise ValueError(
                    "mode send needs torch.distributed: tpspan.init(torch_distributed=True)"
                )
            return check()

        said = control.all_gather(request)
        if any(other != said[0] for other in said):
            raise CollectiveMismatch("Handoff", dict(enumerate(said)))
        self.shape = together("Handoff", inner, prepare, control.all_gather)
        self._world = world
        self._outer = link.ranks
        self._inner = inner
        number = next(link.numbers)
        self._tag = zlib.crc32(repr((link.ranks, number)).encode()) % _TAGS
        # torch's ranks are those of the job.
        self._job_ranks = [world.job_ranks[rank] for rank in link.ranks]
        header_device = world.device if _is_device_only(world.device) else torch.device("cpu")
        self._ring = Ring(self.shape.depth)
        numbers = range(self.shape.depth)
        self._headers = [
            torch.zeros(HEADER_WORDS, dtype=torch.int64, device=header_device) for _ in numbers
        ]
        self._blocks = [
            torch.empty(self.shape.block_nbytes, dtype=torch.uint8, device=world.device)
            for _ in numbers
        ]
        self._works: list[list[Any]] = [[] for _ in numbers]
        self._specs: dict[int, tuple[Spec, ...]] = {}
        self.ring_nbytes = self.shape.block_nbytes * self.shape.depth
        self.copied_nbytes = 0
        self.num_waits = 0

    @property
    def num_live(self) -> int:
        """Nothing is unmapped here: tensors may outlive the channel."""
        return 0

    def take(self, is_producer: bool, timeout_s: float | None) -> int:
        """Take this side's next turn: wait for earlier sends of the block, or receive into it."""
        self._check_side(is_producer)
        turn = self._ring.check()
        index = self._ring.block_of(turn)
        if is_producer:
            self._finish_sends(index, timeout_s)
        else:
            self._receive(turn, index, timeout_s)
        return self._ring.take()

    def has_come(self, is_producer: bool) -> bool:
        """Whether the sends of the next block are done; a consumer cannot know, and waits."""
        self._check_side(is_producer)
        index = self._ring.block_of(self._ring.check())
        return not is_producer or all(work.is_completed() for _, work in self._works[index])

    def view(self, slot: Slot, placed: Placed) -> torch.Tensor:
        """A tensor in a slot's block."""
        dtype = placed.dtype
        base = self._blocks[self._ring.block_of(slot.turn)].view(dtype)
        strides = strides_of(placed.shape)
        return base.as_strided(placed.shape, strides, placed.offset_bytes // dtype.itemsize).data

    def views(self, slot: Slot, packed: Packed) -> list[torch.Tensor]:
        """All tensors that were placed beforehand."""
        return [self.view(slot, placed) for placed in packed.places]

    def fixed_view(self, is_producer: bool, placed: Placed) -> torch.Tensor:
        """No address stays in this mode."""
        raise ValueError("in send mode no address stays")

    def header(self, slot: Slot, *, wait: bool) -> tuple[Spec, ...] | None:
        """What the producer packed."""
        return self._specs.get(slot.turn)

    def may_be(self, slot: Slot, packed: Packed) -> bool:
        """Whether the producer has packed exactly that."""
        return self._specs.get(slot.turn) == packed.specs

    def wait_until_mapped(self, slot: Slot) -> None:
        """Nothing is remapped."""

    def finish(self, slot: Slot) -> None:
        """Send what was packed; a consumer's block is free at once."""
        index = self._ring.block_of(slot.turn)
        if slot.is_producer:
            words = encode(slot.specs)
            header = self._headers[index]
            header[: len(words)] = torch.tensor(words, dtype=torch.int64)
            data = self._blocks[index][: slot.used_nbytes]
            for peer in self.shape.dst:
                for tensor in (header, data):
                    self._works[index].append((peer, self._send(tensor, peer)))
                self.copied_nbytes += slot.used_nbytes
        self._specs.pop(slot.turn, None)
        self._ring.release(slot.turn)

    def put_back(self, slot: Slot) -> bool:
        """Untake a producer's turn; if later ones are held it stays held, and this is False."""
        try:
            self._ring.put_back(slot.turn)
        except ValueError:
            return False
        return True

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Nothing is remapped."""

    def check(self) -> None:
        """torch raises what its streams run into."""

    def close(self, *, force: bool, forget: Callable[[], None], name: str) -> None:
        """Wait until everything has been sent."""
        try:
            if not force:
                for index in range(self.shape.depth):
                    self._finish_sends(index, None)
        finally:
            forget()

    def _send(self, tensor: torch.Tensor, peer: int) -> Any:
        try:
            return dist.isend(tensor, self._job_ranks[peer], tag=self._tag)
        except RuntimeError as error:
            raise self._peer_error(peer, error) from None

    def _finish_sends(self, index: int, timeout_s: float | None) -> None:
        while self._works[index]:
            peer, work = self._works[index][0]
            try:
                self._wait(work, timeout_s)
            except RuntimeError as error:
                raise self._peer_error(peer, error) from None
            self._works[index].pop(0)

    def _receive(self, turn: int, index: int, timeout_s: float | None) -> None:
        source = self.shape.src
        rank = self._job_ranks[source]
        try:
            self._wait(dist.irecv(self._headers[index], rank, tag=self._tag), timeout_s)
            words = self._headers[index].tolist()
            specs = decode(words[: words[0]])
            packing = Packing(self.shape.block_nbytes)
            for spec in specs:
                packing.place(*spec)
            data = self._blocks[index][: packing.end_bytes]
            self._wait(dist.irecv(data, rank, tag=self._tag), timeout_s)
        except RuntimeError as error:
            raise self._peer_error(source, error) from None
        self._specs[turn] = specs
        self.copied_nbytes += data.nbytes

    def _wait(self, work: Any, timeout_s: float | None) -> None:
        """Hold the stream, or without a GPU the caller, which the group's deadline ends at last."""
        if timeout_s is None or self._world.backend == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))

    def _peer_error(self, peer: int, error: RuntimeError) -> PeerError:
        said = str(error).splitlines()[0]
        return PeerError([self._outer[peer]], f"torch.distributed lost it: {said}")

    def _check_side(self, is_producer: bool) -> None:
        if is_producer != (self._inner == self.shape.src):
            does = "produce" if is_producer else "consume"
            raise ValueError(f"rank {self._world.rank} does not {does} in this channel")


def _is_device_only(device: torch.device) -> bool:
    """Whether torch's default group carries nothing but tensors of the GPU."""
    return device.type == "cuda" and dist.get_backend() == "nccl"
