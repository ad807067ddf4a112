"""FSDP2 over spans: the same training, bounded memory, and nothing written while it is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import Ranks, missing_launcher, rank_environment

# torch keeps what its groups and meshes have made, so leaks are looked for in bodies of their own.
MPIRUN = ("mpirun",)
READS = pytest.mark.parametrize("read", ["in_place", "staged"])
RECIPES = (
    "kept",
    "bf16",
    "bf16 reduced in fp32",
    "fp16",
    "accumulated",
    "prefetched",
    "frozen",
    "recomputed",
    "factor",
    "unsharded ahead",
    "odd",
)


@pytest.mark.ranks(1, 2, 3, 4, launchers=MPIRUN)
def test_training_is_what_it_was(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:trained_alike", name="default", leaks=False)


@pytest.mark.ranks(2, 3, launchers=MPIRUN)
@READS
def test_training_by_every_way_to_read(ranks: Ranks, read: str) -> None:
    ranks.run("bodies.fsdp:trained_alike", name="prefetched", read=read, leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_of_training(ranks: Ranks, recipe: str) -> None:
    ranks.run("bodies.fsdp:trained_alike", name=recipe, leaks=False)


@pytest.mark.ranks(2, 3, launchers=("torchrun",))
def test_on_the_process_group_of_spans(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:trained_alike", name="bf16", backend="tpspan", leaks=False)


@pytest.mark.ranks(4, launchers=MPIRUN)
def test_resharding_to_fewer_ranks(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:resharded_to_fewer", leaks=False)


@pytest.mark.ranks(4, launchers=MPIRUN)
def test_replicas_of_shards(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:replicated_shards", leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
def test_objects_made_by_hand(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:made_by_hand", leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
def test_refusals(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:refusals", leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN, backends=("host",))
def test_ranks_of_several_domains_keep_torchs_own(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:not_one_domain", leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("bodies.fsdp:checkpoints", folder=str(tmp_path), leaks=False)


@pytest.mark.ranks(2, launchers=MPIRUN)
def test_everything_is_given_back(ranks: Ranks) -> None:
    ranks.run("bodies.fsdp:given_back", leaks=False)


@pytest.mark.ranks(2, 3, launchers=MPIRUN)
@READS
@pytest.mark.parametrize("is_guarded", [True, False])
def test_no_buffer_is_written_while_it_is_read(ranks: Ranks, is_guarded: bool, read: str) -> None:
    """Invariant 6; without the guard the same body sees values overwritten."""
    ranks.run("bodies.fsdp_buffers:slow_reader", is_guarded=is_guarded, read=read)


@pytest.mark.ranks(2, 3, 4, launchers=MPIRUN)
@READS
def test_buffers_are_right_and_bounded(ranks: Ranks, read: str) -> None:
    ranks.run("bodies.fsdp_buffers:random_requests", seed=len(read), read=read)


@pytest.mark.ranks(2, launchers=MPIRUN, backends=("host",))
def test_different_requests_are_found(ranks: Ranks) -> None:
    outcome = ranks.fresh("bodies.fsdp_buffers:different_requests")
    assert all(report and report.error is None for report in outcome.reports), outcome


def bench(path: Path, *options: str) -> dict[str, Any]:
    """What ``tpspan bench fsdp`` writes: the losses have been compared by then."""
    if reason := missing_launcher("mpirun"):
        pytest.skip(reason)
    command = [sys.executable, "-m", "tpspan.tools.cli", "bench", "fsdp", "--backend", "host"]
    done = subprocess.run(
        [*command, "--json", str(path), *options],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    assert "FSDP2, spans" in done.stdout and found["schema"].startswith("tpspan-bench-fsdp/")
    return found


def medians(found: dict[str, Any], group: str) -> dict[str, float]:
    return {
        each["name"]: each["median"] for each in found["figures"] if each["group"].startswith(group)
    }


def test_bench(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "64", "--seq", "8", "--steps", "3"]
    found = bench(tmp_path / "found.json", "--ranks", "2", *sizes)
    assert found["losses"]["spans"] == found["losses"]["fsdp2"]
    times = medians(found, "a step")
    assert times["over spans, of FSDP2's"] > 0
    assert times["largest relative difference of a loss"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "4"])
def test_twenty_steps_with_no_more_memory(tmp_path: Path, size: str) -> None:
    found = bench(tmp_path / "found.json", "--ranks", size)
    assert len(found["losses"]["spans"]) == 20
    assert medians(found, "a step")["largest relative difference of a loss"] <= 1e-6
    memory = medians(found, "peak memory")
    assert memory["FSDP2, spans"] <= memory["FSDP2, gloo"]
