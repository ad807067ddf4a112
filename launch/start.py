"""``tpspan.init``: from a launched process to a world."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tpspan.errors import CollectiveMismatch, LaunchError
from tpspan.launch import mpi, torch_group, torchrun
from tpspan.launch.control import AloneChannel, Channel, StarControl
from tpspan.launch.environment import Launch, detect
from tpspan.launch.hosts import Member, deal_gpus, num_threads, on_host_of, this_member
from tpspan.launch.votes import together
from tpspan.launch.world import MAX_TIMEOUT_S, Facts, World
from tpspan.memory.cuda import CudaDriver, cuda_device_count, device_uuid
from tpspan.memory.driver import Driver
from tpspan.memory.host import HostDriver

Backend = Literal["auto", "cuda", "host"]

SHARE_DEVICE_VARIABLE = "TPSPAN_SHARE_DEVICE"

_default: World | None = None
_pid = 0


@dataclass(frozen=True)
class _Request:
    """What must be the same on all ranks."""

    backend: str
    share_device: bool
    torch_distributed: bool


@dataclass(frozen=True)
class _Greeting:
    request: _Request
    member: Member
    token: bytes


def init(
    backend: Backend = "auto",
    *,
    timeout_s: float = 300.0,
    share_device: bool = False,
    torch_distributed: bool = False,
    launcher: str = "auto",
) -> World:
    """Collective. Join the job that this process was launched in; return its world.

    The world is also the default one, ``tpspan.world()``. Works under mpirun (Open MPI, MPICH),
    torchrun, srun, ``tpspan run``, and alone as one rank; `tpspan.launch.environment` has the order
    of precedence. From here on an exception that nobody catches ends every rank, with its traceback
    printed last.

    Args:
        backend: ``cuda``, ``host`` (the CPU), or ``auto``: CUDA if there is a GPU.
        timeout_s: the deadline of collective calls that give none, this one included.
        share_device: let several ranks share a GPU where there are more ranks than GPUs; so does
            ``TPSPAN_SHARE_DEVICE=1``.
        torch_distributed: also initialise torch.distributed, unless it is; closed with the world.
        launcher: read the variables of this launcher only.

    Raises:
        LaunchError: the environment contradicts itself, there are too few GPUs, or a world is open.
        CollectiveMismatch: the ranks asked for different things.
        PeerError: some ranks did not call before the deadline.
        DriverError: the driver could not start, on this rank.
        ValueError: an argument has no such value.
    """
    global _default, _pid
    if _default is not None and not _default.is_closed:
        raise LaunchError("init was called already: use tpspan.world(), or close that world first")
    if backend not in ("auto", "cuda", "host"):
        raise ValueError(f"backend={backend!r}: expected 'auto', 'cuda' or 'host' (the CPU)")
    if not 0 < timeout_s < MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
    share_device = share_device or os.environ.get(SHARE_DEVICE_VARIABLE, "0") not in ("", "0")
    launch = detect(os.environ, process_group=torchrun.process_group(), launcher=launcher)
    launch, channel = _connect(launch, timeout_s)
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        control = StarControl(channel, range(channel.world_size), "world", timeout_s)
        request = _Request(backend, share_device, torch_distributed)
        world = _build(launch, channel, control, request, timeout_s, stack)
        stack.pop_all()
    _default, _pid = world, os.getpid()
    return world


def world() -> World:
    """Return the default world.

    Raises:
        LaunchError: ``init`` was not called, or its world is closed.
    """
    if _default is None or _default.is_closed:
        raise LaunchError("there is no world: call tpspan.init() first, on every rank")
    return _default


def _connect(launch: Launch, timeout_s: float) -> tuple[Launch, Channel]:
    if launch.transport == "none":
        return launch, AloneChannel()
    if launch.transport == "mpi":
        try:
            return mpi.connect(launch, timeout_s)
        except LaunchError:
            # Slurm's PMIx plugin is there for every step, with or without an MPI that speaks it.
            if launch.launcher != "srun":
                raise
            launch = replace(launch, transport="store")
    return launch, torchrun.connect(launch, os.environ, timeout_s)


def _build(
    launch: Launch,
    channel: Channel,
    control: StarControl,
    request: _Request,
    timeout_s: float,
    stack: contextlib.ExitStack,
) -> World:
    rank = control.rank
    gpus = () if request.backend == "host" else _visible_gpus()
    greeting = _Greeting(request, this_member(gpus), secrets.token_bytes(16))
    greetings = control.all_gather(greeting)
    requests = {peer: greeting.request for peer, greeting in enumerate(greetings)}
    if len(set(requests.values())) > 1:
        raise CollectiveMismatch("tpspan.init", requests)
    members = [greeting.member for greeting in greetings]
    driver, members = _open_driver(request, members, control)
    mates = on_host_of(members, rank)
    facts = Facts(
        launch.launcher,
        launch.source,
        mates.index(rank) if launch.local_rank is None else launch.local_rank,
        launch.local_world_size or len(mates),
        timeout_s,
        greetings[0].token,
    )
    if driver.name == "host" and len(mates) > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads(members, rank))
    owns_group = request.torch_distributed and torchrun.process_group() is None
    store = torch_group.set_up(control, members, timeout_s=timeout_s) if owns_group else None

    def on_close() -> None:
        nonlocal store
        if store is not None and not control.failed:
            torch_group.tear_down()
        store = None
        channel.close(0.0 if control.failed else 5.0)

    return World(channel, control, range(channel.world_size), members, driver, facts, on_close)


def _visible_gpus() -> tuple[str, ...]:
    return tuple(device_uuid(index) for index in range(cuda_device_count()))


def _open_driver(
    request: _Request, members: list[Member], control: StarControl
) -> tuple[Driver, list[Member]]:
    """Collective. Open the driver that was asked for; fails on all ranks if it fails on one."""
    use_cuda = request.backend == "cuda" or (
        request.backend == "auto" and any(member.gpus for member in members)
    )
    what = "opening the memory driver"
    if not use_cuda:
        return together(what, control.rank, HostDriver, control.all_gather), members
    indices = deal_gpus(members, share_device=request.share_device)
    members = [
        replace(member, gpu=member.gpus[index])
        for member, index in zip(members, indices, strict=True)
    ]
    index = indices[control.rank]

    def open_cuda() -> Driver:
        torch.cuda.set_device(index)
        return CudaDriver(index)

    return together(what, control.rank, open_cuda, control.all_gather), members


@atexit.register
def _close_at_exit() -> None:
    """Close a world that was left open; mpi4py ends MPI after this."""
    # A forked child that ends is not the rank that leaves.
    if _default is None or _pid != os.getpid():
        return
    try:
        _default.close()
    except Exception as error:
        sys.stderr.write(f"tpspan: rank {_default.rank}: closing at exit: {error}\n")
