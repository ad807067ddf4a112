"""The two directions of a stage boundary, and the boundaries of one rank together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tpspan.errors import ClosedError
from tpspan.launch.world import World
from tpspan.parallel.handoff import Handoff
from tpspan.parallel.pipeline_crossing import Counts, Receiver, Sender, Wanted


class Boundary:
    """What one stage has at one of its boundaries: activations one way, gradients the other.

    Args:
        world: of the ranks of the pipeline.
        number: of the stage before it.
        earlier, later: the ranks of the two stages, which are different ones.
        timeout_s: the deadline of the host's waits; streams have the world's.
    """

    def __init__(
        self, world: World, number: int, earlier: int, later: int, timeout_s: float | None
    ) -> None:
        self.number = number
        self._world, self._earlier, self._later = world, earlier, later
        self._timeout_s = timeout_s
        self._wishes: dict[bool, tuple[tuple[Wanted, ...], int]] = {}
        self._channels: dict[bool, tuple[tuple[int, int], Handoff]] = {}
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None

    @property
    def sender(self) -> Sender:
        """Of activations on the earlier stage, of gradients on the later one."""
        if self._sender is None:
            raise ClosedError("the stage is closed, or has no channel in this direction")
        return self._sender

    @property
    def receiver(self) -> Receiver:
        """Of gradients on the earlier stage, of activations on the later one."""
        if self._receiver is None:
            raise ClosedError("the stage is closed, or has no channel in this direction")
        return self._receiver

    def want(self, tensors: Sequence[Wanted], depth: int, *, backward: bool) -> None:
        """Say what a channel has to carry, and how many blocks it has."""
        self._wishes[backward] = tuple(tensors), max(1, depth)

    def open(self) -> None:
        """Collective among the two ranks. Make the channels that are wanted and not there."""
        for backward in sorted(self._wishes):
            tensors, depth = self._wishes.pop(backward)
            self._open(tensors, depth, backward)

    def close(self, *, force: bool = False) -> None:
        """Collective among the two ranks, unless forced."""
        self.drop_held()
        self._sender = self._receiver = None
        for _, channel in (self._channels.pop(key) for key in sorted(self._channels)):
            channel.close(force=force)

    def drop_held(self) -> None:
        """Give back whatever is held: the last step was not finished."""
        if self._receiver is not None:
            self._receiver.drop()

    def ring_nbytes(self) -> int:
        """Memory of this rank: the blocks that it reads from."""
        made = self._channels.get(self._world.rank == self._earlier)
        if made is None:
            return 0
        return made[1].stats().ring_nbytes

    def counts(self) -> Counts:
        """What has crossed here."""
        received = 0 if self._receiver is None else self._receiver.num_received
        if self._sender is None:
            return Counts(num_received=received)
        sent = replace(self._sender.counts, num_received=received)
        if self._world.rank == self._later:
            sent = replace(sent, copied_nbytes=0, gradient_nbytes=sent.copied_nbytes)
        return sent

    def _open(self, tensors: Sequence[Wanted], depth: int, backward: bool) -> None:
        size = max(1, sum(each.nbytes for each in tensors)), depth
        made = self._channels.get(backward)
        if made is not None and made[0] != size:
            made[1].close()
            made = None
        if made is None:
            src, dst = self._earlier, self._later
            if backward:
                src, dst = dst, src
            channel = Handoff(
                self._world, src, dst, size[0], depth=depth, timeout_s=self._timeout_s
            )
            made = self._channels[backward] = size, channel
        if (self._world.rank == self._earlier) == backward:
            self._receiver = Receiver(made[1], tensors)
        else:
            self._sender = Sender(made[1], tensors)


class Together:
    """The boundaries of one pipeline on this rank, which are opened and closed in one go.

    All ranks do so in the order of the boundaries, and none can wait for one that waits for it.

    Attributes:
        members: what has to forget its tensors before anything is closed, by identity.
        is_open: whether nothing is new since ``open``.
    """

    def __init__(self) -> None:
        self.members: list[Forgetful] = []
        self._boundaries: list[Boundary] = []
        self.is_open = False

    def join(self, member: Forgetful, boundaries: Sequence[Boundary | None]) -> None:
        """Add a stage and its boundaries, or say that it wants something new of them."""
        if not any(each is member for each in self.members):
            self.members.append(member)
        known = {id(each) for each in self._boundaries}
        self._boundaries += [each for each in boundaries if each and id(each) not in known]
        self.is_open = False

    def open(self) -> None:
        """Collective among the ranks on both sides of each boundary; quick if nothing is new."""
        if not self.is_open:
            for boundary in self._in_order():
                boundary.open()
            self.is_open = True

    def close(self, *, force: bool = False) -> None:
        """The same for closing."""
        for member in self.members:
            member.forget()
        for boundary in self._in_order():
            boundary.close(force=force)

    def _in_order(self) -> list[Boundary]:
        return sorted(self._boundaries, key=lambda each: each.number)


class Forgetful(Protocol):
    """A stage."""

    def forget(self) -> None:
        """Keep no tensor of a channel."""


class Gathering:
    """Brings the stages together that a rank prepares for one step. A resource of a world."""

    def __init__(self, world: World) -> None:
        self._current: Together | None = None

    def current(self) -> Together:
        """Those that are being prepared."""
        if self._current is None:
            self._current = Together()
        return self._current

    def done(self) -> None:
        """They are complete: a step begins."""
        self._current = None

    def close(self) -> None:
        """There is nothing to give back."""
