"""Hand-overs inside a domain: both sides map the same blocks, and nothing is copied."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

import torch

from tpspan.errors import CaptureError, ClosedError, InUseError, PeerError
from tpspan.launch.world import World
from tpspan.parallel.handoff_parts import Shape, make_parts
from tpspan.parallel.headers import NUM_HEADERS, Headers
from tpspan.parallel.link import Link
from tpspan.parallel.packing import Packed, Placed, Spec
from tpspan.parallel.side import Side, SidePlace
from tpspan.parallel.slot import Slot
from tpspan.spans.remapper import Remapper


class MappedTransport:
    """``Transport`` over blocks that all ranks of the channel map. Made collectively.

    Args:
        world: of the channel; names ranks, and has the helper that remaps.
        link: of its ranks.
        request, check, places: as ``make_parts``.
        timeout_s: how long the host waits.

    Attributes:
        shape, mode: what was made.
        copied_nbytes: always 0.
    """

    copied_nbytes = 0

    def __init__(
        self,
        world: World,
        link: Link,
        request: object,
        check: Callable[[], Shape],
        places: Sequence[SidePlace],
        timeout_s: float,
    ) -> None:
        self._world = world
        self._link = link
        self._timeout_s = timeout_s
        remapper = Remapper.of(world)
        self._parts, self.shape = make_parts(
            link, request, check, places, remapper, timeout_s=timeout_s
        )
        self.mode = "remap" if self.shape.remaps else "window"
        self._headers = Headers(self._parts.pages, self.shape.src)
        self._sides = {side.is_producer: side for side in self._parts.sides}
        self._put_back: tuple[int, torch.cuda.Event | None] | None = None

    @property
    def ring_nbytes(self) -> int:
        """Memory of the blocks together."""
        if self._world.backend == "host":
            return self.shape.block_nbytes * self.shape.depth
        return sum(self.shape.sizes)

    @property
    def num_remaps(self) -> int:
        """Blocks brought behind fixed addresses."""
        lanes = [side.lane for side in self._parts.sides]
        return sum(lane.num_done for lane in lanes if lane is not None)

    @property
    def remap_us(self) -> float:
        """How long one of them takes the helper."""
        return self._median_us(0)

    @property
    def remap_host_us(self) -> float:
        """How much of that its thread runs."""
        return self._median_us(1)

    @property
    def num_waits(self) -> int:
        """How often the other side was not so far."""
        return sum(side.num_waits for side in self._parts.sides)

    def take(self, is_producer: bool, timeout_s: float | None) -> int:
        """Take this side's next turn."""
        side = self._side(is_producer)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with side.lock:
            turn = side.ring.check()
            stream = self._stream(side)
            if side.lane is not None:
                side.lane.check()
            if not is_producer or not self._is_put_back(turn, side):
                turns = side.turns
                has_come = turns.has_come(turn)
                side.num_waits += not has_come
                if not has_come or turns.are_of_streams:
                    try:
                        # A host that waits itself is never ahead by more turns than blocks.
                        if is_producer and turns.are_of_streams and turn >= NUM_HEADERS:
                            turns.wait_until_freed(turn - NUM_HEADERS, timeout_s)
                        turns.wait(turn, stream, timeout_s, has_come=has_come)
                    except PeerError as error:
                        raise self._link.named(error) from None
            if side.lane is not None:
                side.hold(stream, turn)
            if is_producer:
                self._put_back = None
            return side.ring.take()

    def has_come(self, is_producer: bool) -> bool:
        """Whether the other side's host has let this side's next turn go."""
        side = self._side(is_producer)
        return side.turns.has_come(side.ring.check())

    def view(self, slot: Slot, placed: Placed) -> torch.Tensor:
        """A tensor in a slot's block."""
        return self._side(slot.is_producer).view(slot.turn, placed)

    def views(self, slot: Slot, packed: Packed) -> list[torch.Tensor]:
        """All tensors that were placed beforehand."""
        return self._side(slot.is_producer).views(slot.turn, packed)

    def fixed_view(self, is_producer: bool, placed: Placed) -> torch.Tensor:
        """A tensor over the address of a side, whichever block is behind it."""
        return self._side(is_producer).view(0, placed)

    def header(self, slot: Slot, *, wait: bool) -> tuple[Spec, ...] | None:
        """What the producer packed; None if its host has not said so yet and ``wait`` is false."""
        side = self._side(slot.is_producer)
        if wait:
            try:
                side.turns.wait_on_host(slot.turn, self._timeout_s)
            except PeerError as error:
                raise self._link.named(error) from None
        elif not side.turns.has_come(slot.turn):
            return None
        return self._headers.read(slot.turn)

    def may_be(self, slot: Slot, packed: Packed) -> bool:
        """Whether the producer has packed that, or may have: its host may not have said so yet."""
        turns = self._side(slot.is_producer).turns
        if turns.are_of_streams and not turns.has_come(slot.turn):
            return True
        return self._headers.is_of(slot.turn, packed.header)

    def wait_until_mapped(self, slot: Slot) -> None:
        """Hold the caller until the slot's block is behind its address."""
        lane = self._side(slot.is_producer).lane
        if lane is not None:
            lane.wait(slot.turn)

    def finish(self, slot: Slot) -> None:
        """Hand over or give back, behind everything on the current stream."""
        side = self._side(slot.is_producer)
        turn = slot.turn
        stream = self._stream(side)
        # Before anything is done: it refuses while a stream is being captured.
        fence = side.streams.fence(but=stream) if side.lane is not None else None
        if side.is_producer:
            self._headers.write(turn, slot.specs)
        try:
            side.turns.finish(turn, stream)
        except PeerError as error:
            raise self._link.named(error) from None
        side.ring.release(turn)
        if fence is not None:
            side.remap_after(fence, turn)

    def put_back(self, slot: Slot) -> bool:
        """Untake a producer's turn; if later ones are held it stays held, and this is False."""
        side = self._side(True)
        try:
            side.ring.put_back(slot.turn)
        except ValueError:
            return False
        event = None
        if side.place.backend == "cuda":
            event = torch.cuda.current_stream(side.place.device).record_event()
        self._put_back = slot.turn, event
        return True

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Note a stream that uses the tensors."""
        for side in self._parts.sides:
            side.streams.use(stream)

    def check(self) -> None:
        """Raise what a stream's wait or a remap ran into."""
        with self._link.outer_names():
            self._parts.waits.check()
        for side in self._parts.sides:
            if side.lane is not None:
                side.lane.check()

    @property
    def num_live(self) -> int:
        """Tensors that are still alive."""
        return sum(side.num_live for side in self._parts.sides)

    def close(self, *, force: bool, forget: Callable[[], None], name: str) -> None:
        """Unmap and give back; collective unless forced.

        Args:
            forget: called when nothing can be refused any more.
            name: of the channel, for errors.
        """
        parts = self._parts
        if force or self._link.world.is_closed:
            with contextlib.suppress(PeerError, ClosedError, CaptureError):
                for side in parts.sides:
                    side.streams.fence().wait()
            forget()
            parts.close(pooled=False)
            return

        def ready() -> None:
            for side in parts.sides:
                if side.ring.held:
                    raise InUseError(f"slots of turns {side.ring.held} of {name} are still held")
                if num := side.num_live:
                    raise InUseError(
                        f"{num} tensors of {name} are still alive: drop them first, and what "
                        "autograd made of them, whose graph keeps them; or close with force=True "
                        "and never touch them again"
                    )
                side.streams.fence().wait()

        with self._link.outer_names():
            parts.board.begin("Handoff.close", parts.number, ready)
            forget()
            parts.close(pooled=True)

    def _is_put_back(self, turn: int, side: Side) -> bool:
        """Whether the turn was had before, so that its block has been waited for."""
        if self._put_back is None or self._put_back[0] != turn:
            return False
        event = self._put_back[1]
        if event is not None:
            torch.cuda.current_stream(side.place.device).wait_event(event)
        return True

    def _median_us(self, which: int) -> float:
        lanes = [side.lane for side in self._parts.sides]
        taken = [last[which] for lane in lanes if lane is not None for last in tuple(lane.last_s)]
        return 1e6 * statistics.median(taken) if taken else 0.0

    def _stream(self, side: Side) -> int:
        """The current stream, which must not be one that is being captured."""
        if not side.turns.are_of_streams:
            return 0
        stream = side.streams.use()
        if side.place.driver.is_capturing(stream):
            raise CaptureError(
                "a slot cannot be taken or released while the current stream is being captured "
                "into a graph: capture what lies between (invariant 7)"
            )
        return stream

    def _side(self, is_producer: bool) -> Side:
        side = self._sides.get(is_producer)
        if side is None:
            does = "produce" if is_producer else "consume"
            raise ValueError(f"rank {self._world.rank} does not {does} in this channel")
        return side
