"""The control plane's channel over MPI, on a communicator of its own.

Point-to-point only, nothing blocks: messages leave by ``Isend``, arrive by ``Improbe`` and are
sorted into an inbox, so tags may be anything and user messages are never touched. mpi4py is
imported only by ``connect``, that is, only when MPI launched this process. ``MPI_Finalize`` stays
mpi4py's.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from tpspan.errors import LaunchError, PeerError
from tpspan.launch import failure, mpi_start
from tpspan.launch.control import Backoff, StarControl, Tag
from tpspan.launch.environment import Launch

if TYPE_CHECKING:
    from mpi4py import MPI

# Any tags below 32767 are allowed everywhere; on COMM_WORLD an unlikely one keeps out of the way.
HELLO_TAG = 31415
MESSAGE_TAG = 1
_generation = itertools.count()


class MpiChannel:
    """A ``Channel`` over one communicator and one MPI tag; safe to use from several threads."""

    def __init__(self, comm: MPI.Intracomm, mpi_tag: int) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = comm
        self._mpi_tag = mpi_tag
        self._lock = threading.RLock()
        self._inbox: dict[tuple[int, str], dict[int, deque[bytes]]] = {}
        self._pending: list[tuple[MPI.Request, bytes]] = []
        self._left: set[int] = set()
        self._closed = False
        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()

    def send(self, peer: int, tag: Tag, data: bytes) -> None:
        self._post(peer, ("message", tag, data))

    def retract(self, peer: int, tag: Tag) -> None:
        self._post(peer, ("retract", tag, b""))

    def poll(self, peer: int, tag: Tag) -> bytes | None:
        with self._lock:
            self._pump()
            box = self._inbox.get((peer, tag.context), {})
            for sequence in [key for key in box if key < tag.sequence]:
                del box[sequence]
            queue = box.get(tag.sequence)
            return queue.popleft() if queue else None

    def flush(self, limit_s: float) -> None:
        """Wait until MPI is done with what was sent.

        A large message may move only while its sender is inside MPI.
        """
        deadline_s = time.monotonic() + limit_s
        backoff = Backoff()
        while True:
            with self._lock:
                self._pump()
                if not self._pending:
                    return
            if time.monotonic() >= deadline_s:
                # Their receivers are gone. MPI may still read the buffers, so they are kept.
                _abandoned.extend(self._pending)
                self._pending.clear()
                return
            backoff.sleep()

    def has_left(self, peer: int) -> bool:
        with self._lock:
            self._pump()
            return peer in self._left

    def abort(self, message: str, *, secondary: bool = False) -> NoReturn:
        failure.report(message, self.rank, self.world_size, secondary=secondary)
        self._mpi.COMM_WORLD.Abort(1)
        # Open MPI does not return from there; MPICH does, and is killed by its launcher.
        time.sleep(failure.SECONDARY_WAIT_S)
        os._exit(1)

    def close(self, linger_s: float = 5.0) -> None:
        if self._closed or self._mpi.Is_finalized():
            return
        self._closed = True
        for peer in range(self.world_size):
            if peer != self.rank and peer not in self._left:
                self._post(peer, ("left", Tag("", 0), b""))
        self.flush(linger_s)

    def _post(self, peer: int, envelope: tuple[str, Tag, bytes]) -> None:
        data = pickle.dumps(envelope)
        with self._lock:
            request = self._comm.Isend([data, self._mpi.BYTE], peer, self._mpi_tag)
            self._pending.append((request, data))

    def _pump(self) -> None:
        self._pending = [entry for entry in self._pending if not entry[0].Test()]
        status = self._mpi.Status()
        while True:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi_tag, status)
            if message is None:
                return
            data = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([data, self._mpi.BYTE])
            self._sort(status.Get_source(), *pickle.loads(data))

    def _sort(self, peer: int, kind: str, tag: Tag, data: bytes) -> None:
        box = self._inbox.setdefault((peer, tag.context), {})
        if kind == "message":
            box.setdefault(tag.sequence, deque()).append(data)
        elif kind == "retract":
            box.pop(tag.sequence, None)
        else:
            self._left.add(peer)


_abandoned: list[tuple[Any, bytes]] = []


def connect(launch: Launch, timeout_s: float) -> tuple[Launch, MpiChannel]:
    """Collective. Open a channel between the ranks that MPI launched.

    Returns the launch with its size filled in, and the channel. From here on an exception that
    nobody catches ends the job.

    Raises:
        LaunchError: mpi4py cannot be loaded, or its MPI is not the one of the launcher.
        PeerError: some ranks did not call before the deadline.
    """
    MPI = mpi_start.load(launch, timeout_s)
    comm = MPI.COMM_WORLD
    wanted = launch.world_size or comm.Get_size()
    if (comm.Get_rank(), comm.Get_size()) != (launch.rank, wanted):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        raise LaunchError(
            f"{launch.source}, but MPI says rank {comm.Get_rank()} of {comm.Get_size()}: mpi4py "
            f"loaded {library}, which is not the launcher's MPI. Start with the mpirun of that "
            "MPI, or point MPI4PY_LIBMPI at the libmpi.so of the launcher"
        )
    hello = MpiChannel(comm, HELLO_TAG)
    if wanted > 1:
        failure.install(hello.abort)
    # The first call goes over COMM_WORLD, so that ranks which never call are named: making the
    # communicator is collective, and MPI itself can only wait for them.
    generation = next(_generation)
    StarControl(hello, range(wanted), f"init {generation}", timeout_s).barrier()
    copy, request = comm.Idup()
    deadline_s = time.monotonic() + timeout_s
    backoff = Backoff()
    while not request.Test():
        if time.monotonic() >= deadline_s:
            raise PeerError([], f"MPI_Comm_idup did not end within {timeout_s:g} s")
        backoff.sleep()
    return replace(launch, world_size=wanted), MpiChannel(copy, MESSAGE_TAG)
