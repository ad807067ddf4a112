"""Which rank is this? Pure: a dictionary of environment variables in, a ``Launch`` out.

Order of precedence, first match decides:

1. an initialised torch process group (given by the caller): its rank and size;
2. torchrun: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` (``TORCHELASTIC_RUN_ID``
   says that an agent set them; without it they may have been set by hand or by another launcher of
   torch);
3. Open MPI 4 and 5: ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``;
4. MPICH's Hydra and Intel MPI: ``PMI_RANK``, ``PMI_SIZE``;
5. PMIx outside Slurm: ``PMIX_RANK`` (it carries no size: MPI is asked);
6. a Slurm step: ``SLURM_STEP_ID``, ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NTASKS``.
   A batch script's own process is no step and has one rank, however many tasks the job may start;
7. none of these: alone.

Launchers that stand side by side must agree: torchrun's rank or size against an MPI launcher's,
Open MPI's against Hydra's or PMIx's. Two of them are one inside the other and need not agree: a
torchrun agent started per node by ``mpirun`` (then ``GROUP_RANK`` and ``GROUP_WORLD_SIZE`` are
MPI's), and everything started inside a Slurm step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tpspan.errors import LaunchError

Transport = Literal["mpi", "store", "process group", "none"]

LAUNCHERS = ("auto", "mpirun", "torchrun", "srun", "process group", "alone")


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this process.

    Attributes:
        rank: this process, from 0.
        world_size: how many there are; None if the launcher did not say (PMIx): MPI knows.
        local_rank, local_world_size: the same among the ranks of this host; None if not said.
        launcher: ``mpirun``, ``torchrun``, ``srun``, ``process group`` or ``alone``.
        transport: what carries the control plane.
        source: a sentence that says which variables decided.
    """

    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    launcher: str
    transport: Transport
    source: str


@dataclass(frozen=True)
class _Claim:
    who: str
    launch: Launch

    def agrees(self, other: _Claim) -> bool:
        sizes = (self.launch.world_size, other.launch.world_size)
        same_size = None in sizes or sizes[0] == sizes[1]
        return self.launch.rank == other.launch.rank and same_size


def detect(
    environ: Mapping[str, str],
    *,
    process_group: tuple[int, int] | None = None,
    launcher: str = "auto",
) -> Launch:
    """Find rank and size from the variables that launchers set.

    Args:
        environ: the environment variables.
        process_group: rank and size of torch's initialised default process group, if there is one.
        launcher: one of ``LAUNCHERS``; anything but ``auto`` reads that launcher's variables only.

    Raises:
        LaunchError: variables are incomplete, no integers, out of range, or contradict each other.
        ValueError: no such launcher.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher={launcher!r}: expected one of {', '.join(LAUNCHERS)}")
    if launcher == "alone":
        return _alone("alone, because launcher='alone' was asked for")
    if process_group is not None and launcher in ("auto", "process group"):
        return _from_process_group(environ, *process_group)
    if launcher == "process group":
        raise LaunchError("launcher='process group', but torch.distributed is not initialised")
    if launcher == "auto":
        return _first_that_agrees(environ)
    readers = {
        "torchrun": (_torchrun,),
        "mpirun": (_open_mpi, _hydra, _pmix),
        "srun": (_slurm,),
    }[launcher]
    for read in readers:
        claim = read(environ)
        if claim is not None:
            return claim.launch
    raise LaunchError(f"launcher={launcher!r}, but this process has none of its variables")


def _first_that_agrees(environ: Mapping[str, str]) -> Launch:
    in_step = "SLURM_STEP_ID" in environ
    torch_claim = _torchrun(environ)
    mpi_claims = [claim for read in (_open_mpi, _hydra, _pmix) if (claim := read(environ))]
    if in_step and mpi_claims and mpi_claims[0].who != "Open MPI":
        # Slurm's own PMI plugins set PMI_RANK and PMIX_RANK for every task of a step.
        mpi_claims = [claim for claim in mpi_claims if not _is_slurms(claim, environ)]
    elif in_step:
        # Inside a step PMI variables next to Open MPI's describe the daemon that srun started.
        mpi_claims = mpi_claims[:1]
    mpi_claim = mpi_claims[0] if mpi_claims else None
    for claim in mpi_claims[1:]:
        if not claim.agrees(mpi_claims[0]):
            raise _contradiction(environ, mpi_claims[0], claim)
    if torch_claim is not None:
        if mpi_claim is not None:
            agreed = torch_claim.agrees(mpi_claim) or _one_agent_each(environ, mpi_claim)
            if not agreed:
                raise _contradiction(environ, torch_claim, mpi_claim)
        if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
            return torch_claim.launch
        if mpi_claim is None and not in_step:
            _require(environ, "torchrun", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    elif "WORLD_SIZE" in environ:
        stated = _integer(environ, "WORLD_SIZE")
        if mpi_claim is not None and mpi_claim.launch.world_size not in (None, stated):
            shown = _show(environ)
            raise LaunchError(f"WORLD_SIZE and {mpi_claim.who} contradict each other: {shown}")
        if mpi_claim is None and not in_step and stated != 1:
            _require(environ, "torchrun", ("RANK", "WORLD_SIZE"))
    if mpi_claim is not None:
        return mpi_claim.launch
    slurm_claim = _slurm(environ)
    if slurm_claim is not None:
        return slurm_claim.launch
    return _alone("alone, because no launcher's variables are set")


def _torchrun(environ: Mapping[str, str]) -> _Claim | None:
    if "RANK" not in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return None
    required = ["RANK", "WORLD_SIZE"]
    if "TORCHELASTIC_RUN_ID" in environ:
        required += ["MASTER_ADDR", "MASTER_PORT"]
    _require(environ, "torchrun", required)
    if "MASTER_PORT" in environ:
        _integer(environ, "MASTER_PORT")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _claim(environ, "torchrun", names, "torchrun", "store")


def _open_mpi(environ: Mapping[str, str]) -> _Claim | None:
    names = (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    return _paired(environ, "Open MPI", names, "mpirun", "mpi")


def _hydra(environ: Mapping[str, str]) -> _Claim | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _paired(environ, "Hydra", names, "mpirun", "mpi")


def _pmix(environ: Mapping[str, str]) -> _Claim | None:
    if "PMIX_RANK" not in environ:
        return None
    rank = _integer(environ, "PMIX_RANK")
    if rank < 0:
        raise LaunchError(f"PMIx: the rank is negative: {_show(environ)}")
    source = f"PMIx decided: PMIX_RANK={rank}; MPI says how many ranks there are"
    return _Claim("PMIx", Launch(rank, None, None, None, "mpirun", "mpi", source))


def _slurm(environ: Mapping[str, str]) -> _Claim | None:
    if "SLURM_STEP_ID" not in environ:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _require(environ, "Slurm", ("SLURM_PROCID", size_name))
    # The tasks of a node are listed as "4(x2),3": who has how many is found by comparing hosts.
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "")
    transport: Transport = "mpi" if "PMIX_RANK" in environ else "store"
    return _claim(environ, "Slurm", names, "srun", transport)


def _is_slurms(claim: _Claim, environ: Mapping[str, str]) -> bool:
    slurm_claim = _slurm(environ)
    return slurm_claim is not None and claim.agrees(slurm_claim)


def _one_agent_each(environ: Mapping[str, str], claim: _Claim) -> bool:
    """Say whether an MPI launcher started one agent of torchrun per rank, and that one us."""
    if "TORCHELASTIC_RUN_ID" not in environ or "GROUP_RANK" not in environ:
        return False
    group = (_integer(environ, "GROUP_RANK"), environ.get("GROUP_WORLD_SIZE"))
    return group == (claim.launch.rank, str(claim.launch.world_size))


def _from_process_group(environ: Mapping[str, str], rank: int, world_size: int) -> Launch:
    local_rank = local_world_size = None
    if environ.get("RANK") == str(rank) and environ.get("WORLD_SIZE") == str(world_size):
        claim = _torchrun(environ)
        if claim is not None:
            local_rank = claim.launch.local_rank
            local_world_size = claim.launch.local_world_size
    source = f"torch's initialised process group decided: rank {rank} of {world_size}"
    return Launch(
        rank, world_size, local_rank, local_world_size, "process group", "process group", source
    )


def _alone(source: str) -> Launch:
    return Launch(0, 1, 0, 1, "alone", "none", source)


def _paired(
    environ: Mapping[str, str],
    who: str,
    names: tuple[str, str, str, str],
    launcher: str,
    transport: Transport,
) -> _Claim | None:
    if names[0] not in environ and names[1] not in environ:
        return None
    _require(environ, who, names[:2])
    return _claim(environ, who, names, launcher, transport)


def _claim(
    environ: Mapping[str, str],
    who: str,
    names: tuple[str, str, str, str],
    launcher: str,
    transport: Transport,
) -> _Claim:
    present = [name for name in names if name in environ]
    rank, world_size = _integer(environ, names[0]), _integer(environ, names[1])
    local_rank, local_world_size = (
        _integer(environ, name) if name in environ else None for name in names[2:]
    )
    if not 0 <= rank < world_size:
        raise LaunchError(f"{who}: rank {rank} of {world_size} cannot be: {_show(environ)}")
    if local_world_size is not None and local_world_size < 1:
        raise LaunchError(f"{who}: {local_world_size} local ranks cannot be: {_show(environ)}")
    if local_rank is not None and not 0 <= local_rank < (local_world_size or world_size):
        raise LaunchError(f"{who}: local rank {local_rank} cannot be: {_show(environ)}")
    shown = ", ".join(f"{name}={environ[name]}" for name in present)
    source = f"{who}'s variables decided: {shown}"
    launch = Launch(rank, world_size, local_rank, local_world_size, launcher, transport, source)
    return _Claim(who, launch)


def _require(environ: Mapping[str, str], who: str, names: tuple[str, ...] | list[str]) -> None:
    missing = ", ".join(name for name in names if name not in environ)
    if missing:
        raise LaunchError(f"{who}'s variables are incomplete: no {missing} ({_show(environ)})")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"{name}={environ[name]!r} is no integer ({_show(environ)})") from None


def _contradiction(environ: Mapping[str, str], first: _Claim, second: _Claim) -> LaunchError:
    return LaunchError(
        f"the variables of {first.who} and {second.who} contradict each other: {_show(environ)}. "
        "Unset those that are left over, or name the launcher: tpspan.init(launcher=...)"
    )


_SHOWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
)


def _show(environ: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environ[name]!r}" for name in _SHOWN if name in environ)
