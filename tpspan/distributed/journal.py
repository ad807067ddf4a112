"""What the ranks asked for, written where all of them can look, without waiting for anybody.

On a stream the host does not wait for its peers, so it cannot compare before it goes on. Instead
every rank writes its n-th request into a ring in its own page of host memory and looks at what the
others wrote for the same n, as far as they have come. Whoever comes last sees all the others: a
difference is found by the last rank at once, and by the others at their next call.
"""

from __future__ import annotations

import ctypes
import struct

from tpspan.distributed.forks import end_in_children
from tpspan.distributed.requests import NUM_WORDS, describe
from tpspan.errors import ClosedError, CollectiveMismatch
from tpspan.launch.world import World
from tpspan.memory.host import HostDriver
from tpspan.spans.board import Board
from tpspan.spans.pages import Pages

_ENTRIES = 4096
_ENTRY = struct.Struct(f"={NUM_WORDS}q")
_NUMBER = struct.Struct("=q")
_NUMBER_AT = _ENTRY.size - _NUMBER.size


class Journal:
    """The requests of one world's ranks. Collective to make."""

    def __init__(self, world: World) -> None:
        self._pages = Pages(Board.of(world).exchange, HostDriver())
        size = self._pages.page_nbytes
        base = self._pages.base_address
        self._rank = world.rank
        self._views = [
            memoryview((ctypes.c_char * size).from_address(base + rank * size)).cast("B")
            for rank in range(world.world_size)
        ]
        self._peers = [rank for rank in range(world.world_size) if rank != world.rank]
        self._seen = dict.fromkeys(self._peers, 0)
        self._number = 0
        self._ended: ClosedError | None = None
        end_in_children(self)

    def note(self, request: tuple[int, ...], *, compare: bool = True) -> None:
        """Write this rank's next request and compare it with those of the ranks that are ahead.

        Raises:
            CollectiveMismatch: another rank asked for something else, here or since the last look.
            ClosedError: the world is closed, or this process was forked from its rank.
        """
        if self._ended is not None:
            self.check()
        self._number = number = self._number + 1
        at = number % _ENTRIES * _ENTRY.size
        # The number last: it says that the rest is there. Until then there is none (words end so).
        own = self._views[self._rank]
        _ENTRY.pack_into(own, at, *request)
        _NUMBER.pack_into(own, at + _NUMBER_AT, number)
        if compare:
            self._compare(at)

    def check(self) -> None:
        """Refuse what ``note`` would.

        Raises:
            ClosedError: as ``note``.
        """
        if self._ended is not None:
            raise ClosedError(*self._ended.args)

    def end(self, error: ClosedError) -> None:
        """Let every later request raise the error."""
        self._ended = error

    def close(self) -> None:
        """Unmap the pages."""
        self._ended = self._ended or ClosedError("the world of this group is closed")
        for view in self._views:
            view.release()
        self._views.clear()
        self._pages.close()

    def _compare(self, at: int) -> None:
        own = self._views[self._rank]
        now = self._number
        here = slice(at, at + _ENTRY.size)
        latest = own[here].tobytes()
        for peer in self._peers:
            view = self._views[peer]
            if self._seen[peer] == now - 1 and view[here].tobytes() == latest:
                self._seen[peer] = now  # nearly always
                continue
            for number in range(self._seen[peer] + 1, self._number + 1):
                at = number % _ENTRIES * _ENTRY.size
                if _NUMBER.unpack_from(view, at + _NUMBER_AT)[0] < number:
                    break
                self._seen[peer] = number
                theirs = bytes(view[at : at + _NUMBER_AT])
                mine = bytes(own[at : at + _NUMBER_AT])
                if theirs != mine and _NUMBER.unpack_from(view, at + _NUMBER_AT)[0] == number:
                    self._raise(peer, at)

    def _raise(self, peer: int, at: int) -> None:
        requests = {
            rank: describe(_ENTRY.unpack_from(self._views[rank], at))
            for rank in sorted((self._rank, peer))
        }
        raise CollectiveMismatch(requests[self._rank].split(" ", 1)[0], requests)
