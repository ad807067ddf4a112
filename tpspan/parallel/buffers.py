"""Two local buffers that take turns holding the weights of a model, filled ahead of their use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpspan.launch.world import World
from tpspan.parallel.order import Order
from tpspan.parallel.staging import CopyLane, Mark, SharedWeight


@dataclass(eq=False)
class _Buffer:
    """Memory, and the weight that it holds or will hold once the mark is reached."""

    memory: torch.Tensor
    weight: SharedWeight
    version: int
    mark: Mark


class Buffers:
    """Double buffers for whole weights, in use during a pass only.

    A pass forks the copies from the current stream and joins them again at its end. Before a buffer
    is written again, the copies wait for all that the streams of the pass, mostly one, have been
    given so far, and with it for every product that read the buffer. Memory comes from torch's
    allocator when a pass copies, and goes back at its end, behind the join. So it needs no
    ``record_stream``, which would keep it from the next pass of a host that runs ahead.

    Args:
        world: of the weights.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lane = CopyLane.of(world)
        self._orders: dict[str, Order] = {}
        self._order = Order()
        self._buffers: list[_Buffer] = []
        self._current: _Buffer | None = None
        self._streams: list[torch.cuda.Stream] = []
        self.most_nbytes = 0

    def begin(self, kind: str) -> None:
        """Begin a pass; each kind has an order of its own. Nothing from before is used."""
        self._order = self._orders.setdefault(kind, Order())
        self._order.begin()
        self._forget()

    def end(self, *, complete: bool) -> None:
        """End the pass; a complete one teaches the order of the next."""
        if complete:
            self._order.finish()
        self._forget()

    def follows(self, use: object) -> object | None:
        """Note a use of this pass; return the one expected after it."""
        return self._order.use(use)

    def take(self, weight: SharedWeight, version: int) -> torch.Tensor:
        """The weight in local memory, for products queued before the next ``take``."""
        buffer = self._find(weight, version) or self._fill(weight, version)
        self._lane.wait(buffer.mark)
        self._note_stream()
        self._current = buffer
        return buffer.memory[: weight.nbytes].view(weight.dtype).view(weight.shape)

    def prefetch(self, weight: SharedWeight, version: int) -> None:
        """Begin to bring a weight into the buffer that is not in use."""
        if self._find(weight, version) is None:
            self._fill(weight, version)

    def _find(self, weight: SharedWeight, version: int) -> _Buffer | None:
        for buffer in self._buffers:
            if buffer.weight is weight and buffer.version == version:
                return buffer
        return None

    def _fill(self, weight: SharedWeight, version: int) -> _Buffer:
        spare = next((b for b in self._buffers if b is not self._current), None)
        if spare is not None and (len(self._buffers) == 2 or self._current is None):
            self._buffers.remove(spare)
        else:
            spare = None
        self._note_stream()
        self._lane.follow(self._streams)
        memory = None if spare is None else spare.memory
        if memory is None or memory.nbytes < weight.nbytes:
            if spare is not None:
                self._lane.wait(spare.mark)  # the copy into what is dropped here
            memory = self._allocate(weight.nbytes)
        self._lane.reads(weight.span)
        mark = self._lane.copy(memory.data_ptr(), weight.address, weight.copies)
        made = _Buffer(memory, weight, version, mark)
        self._buffers.append(made)
        self.most_nbytes = max(self.most_nbytes, sum(b.memory.nbytes for b in self._buffers))
        return made

    def _note_stream(self) -> None:
        stream = self._lane.current()
        if stream is not None and stream not in self._streams:
            self._streams.append(stream)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the first stream of the pass, which waits for all others at the end."""
        with torch.cuda.stream(self._streams[0] if self._streams else None):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)

    def _forget(self) -> None:
        if self._buffers:
            self._lane.join()
        for stream in self._streams[:1]:
            self._lane.join(stream)
            for other in self._streams[1:]:
                stream.wait_stream(other)
        self._streams.clear()
        self._buffers.clear()
        self._current = None
