"""Real jobs: mpirun, torchrun, `tpspan run` and alone; how they work, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpspan
from harness import LAUNCHERS, missing_launcher, rank_environment, run_script
from tpspan.errors import ClosedError, LaunchError
from tpspan.tools import cli

BOTH = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture(autouse=True)
def _launchers_are_here(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    missing = missing_launcher(callspec.params.get("launcher", "") if callspec else "")
    if missing:
        pytest.skip(missing)


@pytest.fixture
def needs_mpirun() -> None:
    missing = missing_launcher("mpirun")
    if missing:
        pytest.skip(missing)


def script(folder: Path, body: str) -> Path:
    path = folder / "job.py"
    path.write_text("import os, sys, threading, time\nimport tpspan\n" + textwrap.dedent(body))
    return path


def tpspan_run(*arguments: str, deadline_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tpspan.tools.cli", "run", *arguments],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


WORKS = """
    from tpspan.errors import ClosedError, CollectiveMismatch

    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    alone = len(sys.argv) > 1
    if not alone:
        try:
            tpspan.init(backend="host", timeout_s=60, share_device=number == 1)
        except CollectiveMismatch as error:
            assert error.requests[1].share_device and not error.requests[0].share_device
        else:
            raise AssertionError("no mismatch")

    world = tpspan.init(backend="host", timeout_s=60)
    size = world.world_size
    assert tpspan.world() is world
    assert size == (1 if alone else 3) and world.rank == world.local_rank == number
    assert world.local_world_size == size and world.domain == tuple(range(size))
    assert world.backend == "host" and world.device.type == "cpu" and not world.shares_device
    tokens = world.control.all_gather(world.token)
    assert len(set(tokens)) == 1 and len(tokens[0]) == 16
    noise = os.urandom(9 << 20) if number == size - 1 else None
    noise = world.control.broadcast(noise, root=size - 1)
    assert len(noise) == 9 << 20 and len(set(world.control.all_gather(noise[-99:]))) == 1
    assert all(len(part) == 5 << 20 for part in world.control.all_gather(bytes(5 << 20)))
    if number != 1:
        ends = world.subset([size - 1, 0] if size > 1 else [0])
        assert ends.control.all_gather(number) == ([size - 1, 0] if size > 1 else [0])
        assert ends.token != world.token
    world.control.barrier()
    sys.stdout.write(f"rank {number} of {size} by {world.launcher}: {world.source}\\n")
    # Left open: the end of the interpreter must be quick and quiet.
"""


@BOTH
def test_a_job_works(launcher: str, tmp_path: Path) -> None:
    """Invariant 3, too: a call that the ranks make with different arguments does nothing."""
    done = run_script(launcher, 3, script(tmp_path, WORKS))
    assert done.returncode == 0, done.stdout
    who = {"mpirun": ("Open MPI's", "Hydra's"), "torchrun": ("torchrun's",)}[launcher]
    for rank in range(3):
        lines = [f"rank {rank} of 3 by {launcher}: {name} variables decided" for name in who]
        assert any(line in done.stdout for line in lines), done.stdout
    assert "Warning" not in done.stdout
    assert "closing at exit" not in done.stdout


def test_alone(tmp_path: Path) -> None:
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script(tmp_path, WORKS)), "alone"],
        env=rank_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == "rank 0 of 1 by alone: alone, because no launcher's variables are set\n"
    assert time.monotonic() - start_s < 60


FAILS = """
    world = tpspan.init(backend="host", timeout_s=60)
    world.control.barrier()
    if world.rank == 1:
        print("raised at", time.time(), flush=True)
        if "thread" in sys.argv:
            def work():
                raise KeyError("the culprit")
            threading.Thread(target=work).start()
        else:
            with world:
                raise KeyError("the culprit")
    if world.rank == 2:
        world.control.barrier()
    time.sleep(60)
"""


def seconds_since_raised(output: str) -> float:
    line = next(line for line in output.splitlines() if "raised at" in line)
    return time.time() - float(line.split()[-1])


@BOTH
def test_an_exception_on_one_rank_ends_the_job(launcher: str, tmp_path: Path) -> None:
    """One rank waits in a call, one is busy elsewhere, the culprit's world is closed meanwhile."""
    done = run_script(launcher, 3, script(tmp_path, FAILS))
    assert seconds_since_raised(done.stdout) < 10
    assert done.returncode != 0
    assert done.stdout.count("tpspan: rank") == 1, "the others say nothing"
    said = done.stdout.split("tpspan: rank 1 of 3 failed:\n")[1].splitlines()
    assert said[0] == "Traceback (most recent call last):"
    assert "KeyError: 'the culprit'" in said[:8]
    if launcher == "torchrun":
        summary = done.stdout.split("Root Cause")[1]
        assert "rank      : 1 " in summary
        assert "KeyError: 'the culprit'" in summary


@BOTH
def test_tpspan_run_prints_the_traceback_last(launcher: str, tmp_path: Path) -> None:
    path = str(script(tmp_path, FAILS))
    done = tpspan_run("-n", "3", "--launcher", launcher, path, "thread")
    assert seconds_since_raised(done.stdout) < 10
    assert done.returncode == 1
    last = done.stderr.split("tpspan: the job ended because rank 1 failed:\n")[1]
    assert last.startswith("in thread Thread-")
    assert last.endswith("KeyError: 'the culprit'\n")


LATE = """
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    if number == 1:
        time.sleep(60)
    tpspan.init(backend="host", timeout_s=3)
"""


@BOTH
def test_a_rank_that_never_calls_init_is_named(launcher: str, tmp_path: Path) -> None:
    """Invariant 9."""
    start_s = time.monotonic()
    done = run_script(launcher, 3, script(tmp_path, LATE))
    assert time.monotonic() - start_s < 45
    assert done.returncode != 0
    assert "PeerError: rank 1: did not come to" in done.stdout, done.stdout
    assert "within 3 s" in done.stdout


def test_a_rank_that_leaves_early_ends_the_job(tmp_path: Path, needs_mpirun: None) -> None:
    """``sys.exit`` reaches no hook; the others learn that the rank has left."""
    body = """
        world = tpspan.init(backend="host", timeout_s=60)
        if world.rank == 1:
            sys.exit(3)
        world.control.barrier()
    """
    start_s = time.monotonic()
    done = tpspan_run("-n", "2", str(script(tmp_path, body)))
    assert time.monotonic() - start_s < 45
    assert done.returncode != 0
    assert (
        done.stderr.rstrip()
        .splitlines()[-1]
        .endswith("PeerError: rank 1: left the world before barrier (call 3 of world)")
    )


def test_torch_distributed_is_set_up_from_mpi(tmp_path: Path, needs_mpirun: None) -> None:
    body = """
        import torch, torch.distributed as dist
        with tpspan.init(backend="host", timeout_s=60, torch_distributed=True) as world:
            assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [2.0] * 3
        assert not dist.is_initialized()
        sys.stdout.write("summed\\n")
    """
    done = run_script("mpirun", 2, script(tmp_path, body))
    assert (done.returncode, done.stdout.count("summed")) == (0, 2), done.stdout
    assert "Warning" not in done.stdout


def test_a_process_group_is_reused_and_left_as_it_was(tmp_path: Path) -> None:
    body = """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store
        dist.init_process_group("gloo")
        dist.barrier()
        before = _get_default_store().num_keys()
        dist.barrier()
        with tpspan.init(backend="host", timeout_s=60, torch_distributed=True) as world:
            assert world.launcher == "process group" and "of 2" in world.source
            for _ in range(10):
                assert world.control.all_gather(bytes(5 << 20))[1] == bytes(5 << 20)
        dist.barrier()
        assert _get_default_store().num_keys() == before, "the keys were cleaned up"
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.write("reused\\n")
    """
    done = run_script("torchrun", 2, script(tmp_path, body))
    assert (done.returncode, done.stdout.count("reused")) == (0, 2), done.stdout


def test_tpspan_run_passes_arguments_and_the_exit_code(tmp_path: Path) -> None:
    body = """
        assert sys.argv[1:] == ["-n", "9", "--launcher", "x y"] and __name__ == "__main__"
        sys.exit(7)
    """
    (tmp_path / "pack").mkdir()
    script(tmp_path / "pack", body)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tpspan.tools.cli", "run", "-n", "1", "-m", "pack.job"),
            *("-n", "9", "--launcher", "x y"),
        ],
        env=rank_environment({"PYTHONPATH": f"{tmp_path}:{rank_environment()['PYTHONPATH']}"}),
        check=False,
    )
    assert done.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_tpspan_run_ends_all_ranks(
    number: signal.Signals, tmp_path: Path, needs_mpirun: None
) -> None:
    path = tmp_path / "sleep.py"
    path.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    job = subprocess.Popen(
        [sys.executable, "-m", "tpspan.tools.cli", "run", "-n", "3", str(path)],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    pids = [int(job.stdout.readline()) for _ in range(3)]
    job.send_signal(number)
    job.communicate(timeout=20)
    assert job.returncode == 128 + number
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-n", "2", "missing.py"), "there is no script missing.py"),
        (("-n", "2"), "no script or module to run"),
        (("-n", "0", "x.py"), "greater than or equal to 1"),
        (("-n", "2", "--launcher", "srun", "x.py"), "srun"),
    ],
)
def test_bad_command_lines_are_answered(arguments: tuple[str, ...], text: str) -> None:
    done = tpspan_run(*arguments)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys, tpspan.tools.cli, tpspan.launch.run\n"
        "assert not {'torch', 'numba', 'mpi4py', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=rank_environment(), check=True)


def test_commands_of_other_files_get_all_that_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "probe_command.py").write_text(
        "def main(argv):\n    print(argv)\n    return 5 if argv else 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(cli.app.registered_commands)
    monkeypatch.setattr(cli.app, "registered_commands", before)
    cli._add(cli.Command("probe", "probe_command", "A probe."))
    monkeypatch.setattr(sys, "argv", ["tpspan", "probe", "--help", "-x", "y"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 5


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name not in rank_environment():
            monkeypatch.delenv(name)
    yield


def test_contradictory_variables_start_nothing(
    monkeypatch: pytest.MonkeyPatch, no_launcher: None
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="RANK='0'.*OMPI_COMM_WORLD_RANK='1'"):
        tpspan.init(backend="host")
    with pytest.raises(LaunchError, match="call tpspan.init"):
        tpspan.world()


def test_one_world_at_a_time(no_launcher: None) -> None:
    hooks = sys.excepthook
    with tpspan.init(backend="host") as world:
        assert sys.excepthook is hooks, "alone there is nobody else to end"
        assert tpspan.world() is world
        assert world.subset([0]).control.all_gather("x") == ["x"]
        with pytest.raises(LaunchError, match="init was called already"):
            tpspan.init(backend="host")
    with pytest.raises(ClosedError):
        world.control  # noqa: B018
    with pytest.raises(LaunchError, match="call tpspan.init"):
        tpspan.world()
    with tpspan.init(backend="host") as again:
        assert again.token != world.token


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "cpu"}, r"backend='cpu': expected 'auto', 'cuda' or 'host' \(the CPU\)"),
        ({"timeout_s": -1.0}, "must be a positive"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tpspan.init(**arguments)  # type: ignore[arg-type]
