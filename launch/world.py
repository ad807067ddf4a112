"""The world: this job's ranks, what each has, and the control plane between them."""

from __future__ import annotations

import hashlib
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch

from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.launch.control import Channel, Control, StarControl
from tpspan.launch.hosts import Member, domain_of, on_host_of, shares_gpu
from tpspan.memory.closing import close_each
from tpspan.memory.driver import Driver

MAX_TIMEOUT_S = 1e9
"""No deadline is later: thirty years, and no clock of the system runs over."""


class Closable(Protocol):
    """What a world can own: it must close without waiting for a peer."""

    def close(self) -> None:
        """Give everything back."""


R = TypeVar("R", bound=Closable)


IN_A_CHILD = "this process was forked from a rank after tpspan.init and is not a rank itself"


def _nothing() -> None:
    """What a world does at its end that has nothing to end."""


@dataclass(frozen=True)
class Facts:
    """What does not change over the life of a world."""

    launcher: str
    source: str
    local_rank: int
    local_world_size: int
    timeout_s: float
    token: bytes


class World:
    """The ranks of a job; made by ``tpspan.init`` and by ``subset``. A context manager.

    Attributes:
        rank, world_size: this process, and how many there are.
        job_ranks: what each of these ranks is called in the whole job.
        local_rank, local_world_size: the same among the ranks of this host.
        backend: ``cuda`` or ``host``.
        device: the device that this rank uses.
        driver: the memory driver of that device.
        control: the control plane.
        launcher: ``mpirun``, ``torchrun``, ``srun``, ``process group`` or ``alone``.
        source: a sentence that says which variables decided.
        timeout_s: the deadline of calls that give none.
        domain: the ranks that can map each other's memory: one host, one user.
        shares_device: whether another rank uses the same GPU.
        token: 16 random bytes, the same on all ranks and secret to the job.
    """

    def __init__(
        self,
        channel: Channel,
        control: StarControl,
        ranks: Sequence[int],
        members: Sequence[Member],
        driver: Driver,
        facts: Facts,
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        self._channel = channel
        self._control = control
        self._ranks = self.job_ranks = tuple(ranks)
        self._members = tuple(members)
        self._resources: dict[str, Closable] = {}
        self._subsets: list[World] = []
        self._attempts: dict[tuple[int, ...], int] = {}
        self._on_close = on_close
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.rank = control.rank
        self.world_size = control.world_size
        self.driver = driver
        self.backend = driver.name
        self.device: torch.device = driver.device
        self.domain = domain_of(self._members, self.rank)
        self.shares_device = shares_gpu(self._members, self.rank)
        self.launcher, self.source = facts.launcher, facts.source
        self.local_rank, self.local_world_size = facts.local_rank, facts.local_world_size
        self.timeout_s, self.token = facts.timeout_s, facts.token

    @property
    def control(self) -> Control:
        """The control plane.

        Raises:
            ClosedError: the world is closed, or this process was forked from its rank.
        """
        self._check_open()
        return self._control

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def subset(self, ranks: Sequence[int]) -> World:
        """Collective over ``ranks`` only. Return a world of these ranks, renumbered in order.

        It shares driver and transport with this one, and is closed with it. Ranks that are not
        named need not call, and disjoint subsets may be made in any order.

        Raises:
            ValueError: a rank is named twice or does not exist, or this rank is not among them.
            CollectiveMismatch: the ranks named the same ranks in different orders.
            PeerError: some of the ranks did not call before the deadline.
        """
        self._check_open()
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(self.world_size)):
            raise ValueError(f"ranks {chosen} must be different ranks of {self.world_size}")
        if self.rank not in chosen:
            raise ValueError(
                f"rank {self.rank} is not among {chosen}: only those that are may call"
            )
        # The same ranks agree on a name without a word: all of them have asked for this set equally
        # often. Sets that differ have different names, whatever the order they are made in.
        ordered = tuple(sorted(chosen))
        with self._lock:
            attempt = self._attempts.get(ordered, 0)
            self._attempts[ordered] = attempt + 1
        context = f"{self._control.context}:{','.join(map(str, ordered))}#{attempt}"
        hello = StarControl(
            self._channel, [self._ranks[r] for r in ordered], context + "?", self.timeout_s
        )
        orders = hello.all_gather(chosen)
        if len(set(orders)) > 1:
            raise CollectiveMismatch("subset", dict(zip(ordered, orders, strict=True)))
        inner = [self._ranks[r] for r in chosen]
        members = [self._members[r] for r in chosen]
        mates = on_host_of(members, chosen.index(self.rank))
        facts = Facts(
            self.launcher,
            self.source,
            mates.index(chosen.index(self.rank)),
            len(mates),
            self.timeout_s,
            hashlib.sha256(self.token + context.encode()).digest()[:16],
        )
        control = StarControl(self._channel, inner, context, self.timeout_s)
        made = World(self._channel, control, inner, members, self.driver, facts)
        with self._lock:
            self._subsets = [*(one for one in self._subsets if not one.is_closed), made]
        return made

    def has_resource(self, key: str) -> bool:
        """Whether ``resource`` was called for this key: on all ranks alike if it is collective."""
        return key in self._resources

    def resource(self, key: str, factory: Callable[[World], R]) -> R:
        """Return what ``factory`` made for this key, making it at the first call.

        The world closes its resources when it closes, the last made first.

        Raises:
            ClosedError: the world is closed.
        """
        self._check_open()
        known: Any = self._resources.get(key)  # of every collective call: it need not wait
        if known is not None:
            return cast(R, known)
        with self._lock:
            if key not in self._resources:
                made = factory(self)
                # The factory may have asked for resources of its own: they came before this one.
                self._resources[key] = made
            found: Any = self._resources[key]
        result: R = found
        return result

    def abort(self, error: BaseException) -> NoReturn:
        """Print the error's traceback and end every rank of the job with a non-zero exit code."""
        text = "".join(traceback.format_exception(error))
        self._channel.abort(text, secondary=isinstance(error, PeerError))

    def close(self) -> None:
        """Close what the world owns, the last made first; idempotent.

        The other ranks need not call. This rank waits until what it sent has gone, and one that
        serves the store until the others have left: at most 5 s, and not after a failed call.
        Afterwards the world holds nothing of what it owned, so that all of that, and the store, are
        gone when this returns and not at some later run of the garbage collector. In a process that
        was forked from the rank nothing is done: all of it is the rank's.

        Raises:
            Exception: the first failure of a resource's ``close``, after all were tried.
        """
        if self._process != os.getpid():  # nor is the lock asked for: a thread may have held it
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        owned: list[Closable] = [*self._resources.values(), *self._subsets]
        on_close, self._on_close = self._on_close, _nothing
        # Most resources know their world: while it knew them, only the collector could end them.
        self._resources, self._subsets = {}, []
        close_each([*(one.close for one in reversed(owned)), on_close])

    def __enter__(self) -> World:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        where = f"rank {self.rank} of {self.world_size} on {self.device}"
        return f"<{state}World {where}, {self.launcher}>"

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(IN_A_CHILD)
        if self._closed:
            raise ClosedError("the world is closed")
