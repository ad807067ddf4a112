"""What the channels among the same ranks share: a world of these ranks alone, made once."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Protocol

from tpspan.errors import CollectiveMismatch, PeerError
from tpspan.launch.world import World
from tpspan.memory.closing import close_each


class Channel(Protocol):
    """What a link knows of a channel."""

    def close_with_world(self) -> None:
        """Close without the other ranks, if nothing uses it any more."""


class OpenChannels:
    """The channels that are open; a resource of the link's world, which closes them with it."""

    def __init__(self, world: World) -> None:
        self._open: weakref.WeakSet[Channel] = weakref.WeakSet()

    def add(self, channel: Channel) -> None:
        """Remember an open channel."""
        self._open.add(channel)

    def discard(self, channel: Channel) -> None:
        """Forget a closed one."""
        self._open.discard(channel)

    def close(self) -> None:
        """Close what no tensor uses any more."""
        close_each(channel.close_with_world for channel in tuple(self._open))


class Link:
    """Some ranks of a world, as a world of their own.

    Attributes:
        world: of these ranks; they are numbered there by their order in ``ranks``.
        ranks: their ranks outside, sorted.
        numbers: of the channels among them, the same on all.
        is_one_domain: whether all of them can map each other's memory.
    """

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.world = world.subset(ranks)
        self.ranks = ranks
        self.numbers = itertools.count()
        self.is_one_domain = len(self.world.domain) == self.world.world_size

    @staticmethod
    def of(world: World, ranks: tuple[int, ...]) -> Link:
        """The link of these ranks, made at its first use. Collective among them."""
        key = ",".join(map(str, ranks))
        return world.resource(f"link {key}", lambda world: Link(world, ranks))

    @property
    def channels(self) -> OpenChannels:
        """The open channels."""
        return self.world.resource("channels", OpenChannels)

    def inner(self, rank: int) -> int:
        """What a rank is called inside."""
        return self.ranks.index(rank)

    @contextlib.contextmanager
    def outer_names(self) -> Iterator[None]:
        """Let errors name ranks as they are called outside."""
        try:
            yield
        except PeerError as error:
            raise self.named(error) from None
        except CollectiveMismatch as error:
            requests = {self.ranks[rank]: what for rank, what in error.requests.items()}
            raise CollectiveMismatch(error.operation, requests) from None

    def named(self, error: PeerError) -> PeerError:
        """The same error with ranks as they are called outside."""
        return PeerError([self.ranks[rank] for rank in error.ranks], error.what)

    def close(self) -> None:
        """Close the world of these ranks."""
        self.world.close()
