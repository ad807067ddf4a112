"""Channels over torch's stores: torchrun's, srun's, and that of an initialised process group.

Under torchrun the store is reached as torch's own ``env://`` does: the agent serves it
(``TORCHELASTIC_USE_AGENT_STORE``), or else rank 0 does, on the same port as torch in the same
process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from tpspan.errors import LaunchError, PeerError
from tpspan.launch import failure, slurm
from tpspan.launch.environment import Launch
from tpspan.launch.store import StoreChannel

_generation = itertools.count()


def process_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group, or None if there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def connect(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> StoreChannel:
    """Open a channel between the ranks that torchrun, srun or a process group connects.

    From here on an exception that nobody catches ends the job.

    Raises:
        LaunchError: the address is missing, or rank 0 cannot serve there.
        PeerError: the store did not answer before the deadline.
    """
    assert launch.world_size is not None
    store: Store
    if launch.transport == "process group":
        store, serves = _store_of_group(), False
    else:
        store, serves = _connect_tcp(launch, environ, timeout_s)
    # A job that the agent restarts, and a second init of a process, start on keys of their own.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"tpspan/{attempt}/{next(_generation)}"
    end_job = slurm.cancel_step if launch.launcher == "srun" else lambda: None
    channel = StoreChannel(
        store, prefix, launch.rank, launch.world_size, serves=serves, end_job=end_job
    )
    if launch.world_size > 1:
        failure.install(channel.abort)
    return channel


def _connect_tcp(
    launch: Launch, environ: Mapping[str, str], timeout_s: float
) -> tuple[Store, bool]:
    if launch.launcher == "srun":
        host, port = slurm.meeting_point(environ)
    else:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = launch.rank == 0 and not agent_serves
    try:
        store = TCPStore(
            host,
            port,
            launch.world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if serves:
            raise LaunchError(
                f"rank 0 cannot serve a store on {host}:{port} ({reason}); try another MASTER_PORT"
            ) from error
        raise PeerError(
            [0], f"no store on {host}:{port} within {timeout_s:g} s ({reason})"
        ) from error
    return store, serves


def _store_of_group() -> Store:
    store = _get_default_store()
    if store is None:
        raise LaunchError(
            "the initialised torch process group has no store; name the launcher: "
            "tpspan.init(launcher=...)"
        )
    return store
