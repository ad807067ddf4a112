"""``tpspan bench pipeline``: values first, every way or why not; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import rank_environment
from tpspan.tools.bench.command import parser
from tpspan.tools.bench.pipeline import default_sizes

COMMAND = [sys.executable, "-m", "tpspan.tools.cli", "bench", "pipeline", "--backend", "host"]
WAYS = {"window", "remap", "copy", "gloo"}


def test_sizes_end_at_what_the_issue_of_a_stage_is() -> None:
    assert default_sizes("host") == tuple(4**power << 20 for power in range(5))
    assert default_sizes("cuda")[-1] == 1 << 30
    assert parser().parse_args(["pipeline"]).depth == 2


def test_one_rank_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "--ranks", "1"], env=rank_environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "handing over takes two ranks" in done.stderr


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_way_hands_over_the_right_values(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    words = [
        "--ranks",
        str(num_ranks),
        "--sizes",
        "3MiB",
        "--seconds",
        "0.002",
        "--json",
        str(path),
    ]
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
