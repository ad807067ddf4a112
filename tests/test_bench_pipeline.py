"""``tpspan bench pipeline``: values first, every way or why not; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bodies.process_groups import process_group
from harness import Ranks, rank_environment
from tpspan.errors import LaunchError
from tpspan.tools.bench import handover, pipeline, pipeline_schedules
from tpspan.tools.bench.command import parser
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.pipeline import default_sizes
from tpspan.tools.bench.sweep import Row

COMMAND = [sys.executable, "-m", "tpspan.tools.cli", "bench", "pipeline", "--backend", "host"]
WAYS = {"window", "remap", "copy", "gloo"}


def test_sizes_end_at_what_the_issue_of_a_stage_is() -> None:
    assert default_sizes("host") == tuple(4**power << 20 for power in range(5))
    assert default_sizes("cuda")[-1] == 1 << 30
    assert parser().parse_args(["pipeline"]).depth == 2


def test_one_rank_is_refused() -> None:
    alone: Any = SimpleNamespace(world_size=1)
    for words in (["pipeline"], ["pipeline", "--schedules", "1f1b"]):
        options = parser().parse_args(words)
        run = pipeline_schedules.run if options.schedules else pipeline.run
        with pytest.raises(LaunchError, match="--ranks 2"):
            run(alone, options, "")


def rows_of(world: Any) -> tuple[list[Row], list[str]]:
    """A body: what is measured where one rank looks on."""
    with process_group(world, "gloo"):
        bench = Bench(world, seconds=0.002)
        rows = handover.measure(bench, (3 << 20,), torch.float32, depth=2)
        return rows, [figure.name for figure in bench.figures]


@pytest.mark.ranks(3, launchers=("mpirun",), backends=("host",))
def test_every_way_hands_over_the_right_values(ranks: Ranks) -> None:
    for (alone, product), names in ranks.run("test_bench_pipeline:rows_of", leaks=False):
        assert set(alone.us) == WAYS and set(product.us) == {*WAYS, "product alone"}
        assert all(us > 0 for row in (alone, product) for us in row.us.values())
        assert any(name.endswith(" / remap") for name in names)


def test_the_command_measures_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    words = ["--ranks", "2", "--sizes", "3MiB", "--seconds", "0.002", "--json", str(path)]
    done = subprocess.run(
        [*COMMAND, *words], env=rank_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["schema"] == "tpspan-bench-pipeline/1"
    alone, product = found["rows"]
    assert set(alone["us"]) == WAYS and set(product["us"]) == {*WAYS, "product alone"}
    assert all(us > 0 for row in found["rows"] for us in row["us"].values())
    names = [figure["name"] for figure in found["figures"]]
    assert any(name.endswith(" / remap") for name in names)
    assert "product alone" in done.stdout
