"""Slurm: where the ranks of a step meet when MPI does not connect them, and how a step ends.

``MASTER_ADDR`` and ``MASTER_PORT`` are taken if both are set, as many job scripts do. Otherwise
rank 0 serves a TCPStore on the first host of ``SLURM_STEP_NODELIST`` (the loopback address if the
step has one node; ``SLURM_LAUNCH_NODE_IPADDR``, where srun was called, if that host's name does not
resolve), on a port that follows from the job's and the step's number and lies below the ephemeral
ports.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping

from tpspan.errors import LaunchError

FIRST_PORT, NUM_PORTS = 15000, 15000


def meeting_point(
    environ: Mapping[str, str], resolves: Callable[[str], bool] | None = None
) -> tuple[str, int]:
    """Return the host and port where rank 0 serves the store.

    Raises:
        LaunchError: the step's variables are missing.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        nodes = environ["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"Slurm does not say where rank 0 is ({error}); set MASTER_ADDR and MASTER_PORT"
        ) from None
    port = FIRST_PORT + (job * 131 + step) % NUM_PORTS
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1", port
    host = first_host(nodes)
    if not (resolves or _resolves)(host):
        host = environ.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host, port


def cancel_step() -> None:
    """Cancel the step that this process belongs to, if the command for it is here.

    By default srun lets the other tasks run on when one fails, such as one that has not come to
    ``init`` yet.
    """
    scancel = shutil.which("scancel")
    if scancel is not None:
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([scancel, step], timeout=3, check=False, capture_output=True)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list such as ``a[07-09,12]-ib,b3``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^\[,]*)", nodes)
    assert match is not None
    before, numbers, after = match.groups()
    return before + re.split("[-,]", numbers or "")[0] + after


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
