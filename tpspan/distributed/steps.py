"""How the ranks of a group meet on the host: one page of counters and requests each.

Every step of every call is one barrier here, and carries the rank's request with it. A failure is
final: the ranks no longer agree on which step they are in, so every later call raises at once.
"""

from __future__ import annotations

import ctypes
import struct
import time

from tpspan.distributed.forks import end_in_children
from tpspan.distributed.requests import NUM_WORDS, describe
from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.kernels import host_exchange
from tpspan.kernels.host_exchange import DIFFERENT, LATE, PLACE_WORDS
from tpspan.launch.world import World
from tpspan.memory.host import HostDriver
from tpspan.spans.board import Board
from tpspan.spans.pages import Pages

NUM_BUFFERS = 3
_SLOT = 0
_REQUESTS_OFFSET = 1 << 20
_REQUEST_AT = 72
_SPINS_WITH_CORES = 1000
_SPINS_WITHOUT = 20
_SLICE_NS = 100_000_000


class Steps:
    """The steps of one group of ranks on one host. Collective to make.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        board = Board.of(world)
        self._exchange = board.exchange
        self._pages = Pages(board.exchange, HostDriver())
        self._world_size = world.world_size
        self._timeout_s = world.timeout_s
        self._epoch = ctypes.c_uint32()
        self._place = (ctypes.c_int64 * PLACE_WORDS)()
        num_cores = board.num_cores
        self._place[0:9] = [
            self._pages.base_address,
            self._pages.page_nbytes,
            _SLOT,
            world.rank,
            world.world_size,
            ctypes.addressof(self._epoch),
            0,
            _SPINS_WITH_CORES if world.world_size <= num_cores else _SPINS_WITHOUT,
            _REQUESTS_OFFSET,
        ]
        self._place_address = ctypes.addressof(self._place)
        self._request = struct.Struct(f"={NUM_WORDS}q")
        self._ended: PeerError | ClosedError | None = None
        end_in_children(self)
        self._buffer = 0
        self._parity = 0  # which of a rank's two requests the next step writes

    def ask(self, request: tuple[int, ...]) -> None:
        """Say what this rank asks for in the steps that follow.

        Raises:
            PeerError: an earlier call failed.
            ClosedError: the world is closed, or this process was forked from its rank.
        """
        if self._ended is not None:
            self.check()
        self._request.pack_into(self._place, _REQUEST_AT, *request)

    def check(self) -> None:
        """Refuse what ``ask`` would.

        Raises:
            PeerError, ClosedError: as ``ask``.
        """
        ended = self._ended
        if isinstance(ended, PeerError):
            raise PeerError(ended.ranks, f"already failed earlier: {ended.what}")
        if ended is not None:
            raise ClosedError(*ended.args)

    def end(self, error: PeerError | ClosedError) -> None:
        """Let every later call raise the error."""
        self._ended = error

    def next_buffer(self) -> int:
        """Which of the staging buffers the next step that stages something writes, in turn.

        Ranks whose requests differ may have taken different turns. All of them begin anew then:
        nobody reads after such a meeting, and what was read before it has been.
        """
        self._buffer = (self._buffer + 1) % NUM_BUFFERS
        return self._buffer

    def step(
        self,
        target: int = 0,
        source: int = 0,
        head_nbytes: int = 0,
        tail_offset: int = 0,
        tail_nbytes: int = 0,
        keep: int = 0,
        past_caches: bool = False,
    ) -> None:
        """Copy this rank's bytes, then wait until all ranks have come.

        Args:
            target, source: two pieces are copied, the head and the tail.
            keep: where else the head goes, while waiting; ``past_caches`` if much will go there.

        Raises:
            CollectiveMismatch: the ranks ask for different things; nothing was done.
            PeerError: ranks died or did not come before the deadline.
        """
        parity = self._parity
        self._parity = 1 - parity
        came = host_exchange.host_step(
            self._place_address,
            parity,
            target,
            source,
            head_nbytes,
            tail_offset,
            tail_nbytes,
            keep,
            past_caches,
            _SLICE_NS,
        )
        if came:
            self._not_at_once(parity, came)

    def close(self) -> None:
        """Unmap the pages; every later call raises ``ClosedError``."""
        if not isinstance(self._ended, ClosedError):
            self.end(ClosedError("the world of this group is closed"))
        self._pages.close()

    def _not_at_once(self, parity: int, came: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            while came == LATE:
                missing = self._missing()
                dead = set(self._exchange.dead_peers()) & set(missing)
                if dead:
                    ended = "its process ended" if len(dead) == 1 else "their processes ended"
                    raise PeerError(dead, ended)
                if time.monotonic() > deadline:
                    raise PeerError(
                        missing,
                        f"did not come within {self._timeout_s:g} s; all ranks of a group must "
                        "make the same collective calls in the same order",
                    )
                came = host_exchange.host_step_again(self._place_address, parity, _SLICE_NS)
        except PeerError as error:
            self.end(error)
            raise
        except BaseException:  # an interrupt: this rank has left the step
            self.end(PeerError([self._place[3]], "it was interrupted in a collective call"))
            raise
        if came == DIFFERENT:
            self._buffer = 0
            requests = {peer: self._asked(peer, parity) for peer in range(self._world_size)}
            mine = requests[self._place[3]]
            raise CollectiveMismatch(mine.split(" ", 1)[0], requests)

    def _asked(self, peer: int, parity: int) -> str:
        page = self._pages.base_address + peer * self._pages.page_nbytes
        at = page + _REQUESTS_OFFSET + parity * self._request.size
        return describe(self._request.unpack(ctypes.string_at(at, self._request.size)))

    def _missing(self) -> list[int]:
        rank = self._place[3]
        own = self._pages.base_address + rank * self._pages.page_nbytes
        counts = {
            peer: ctypes.c_uint32.from_address(own + 64 * peer).value
            for peer in range(self._world_size)
            if peer != rank
        }
        expected = self._epoch.value
        return [peer for peer, count in counts.items() if (count - expected) & 0x8000_0000]
