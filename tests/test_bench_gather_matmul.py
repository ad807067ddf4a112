"""``tpspan bench gather-matmul``: values first, every way or why not; no time is asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import rank_environment
from tpspan.tools.bench import timeline
from tpspan.tools.bench.command import parser
from tpspan.tools.bench.matmul_contenders import READS
from tpspan.tools.bench.matmul_report import Row
from tpspan.tools.bench.measuring import Figure
from tpspan.tools.bench.sweep import Contender
from tpspan.tools.bench.timeline import Interval

COMMAND = [sys.executable, "-m", "tpspan.tools.cli", "bench", "gather-matmul", "--backend", "host"]
TINY = ["--rows-of-w", "600", "--k", "2048", "--rows", "1,5", "--seconds", "0.002"]


def figure(name: str, median: float, minimum: float) -> Figure:
    return Figure("g", name, "us", median, minimum, 2 * median, 3, 0, (median,))


def test_a_row_compares_with_the_floor_the_better_and_the_best_peer() -> None:
    medians = {"local": 10.0, "wire": 20.0, "in_place": 50.0, "staged": 30.0, "auto": 25.0}
    medians |= {"nccl + mm": 75.0, "fused": 100.0}
    figures = {name: figure(name, value, value - 5) for name, value in medians.items()}
    contenders = [
        Contender(name, "peer" if "nccl" in name or name == "fused" else "ours", None)
        for name in (*medians, "low contention + mm")
    ]
    row = Row.of(64, contenders, figures)
    assert row.us["low contention + mm"] is None and row.us["auto"] == 25.0
    assert (row.floor_us, row.share_of_floor) == (20.0, 0.8)
    assert row.auto_over_better == 20.0 / 25.0
    assert (row.best_peer, row.ratio) == ("nccl + mm", 3.0)
    empty = Row.of(1, [Contender("auto", "ours", None)], {})
    assert (empty.floor_us, empty.ratio, empty.auto_over_better) == (None, None, None)


def event(category: str, stream: int, start: float, duration: float) -> dict[str, object]:
    return {
        "cat": category,
        "name": category,
        "ts": start,
        "dur": duration,
        "args": {"stream": stream},
    }


def test_a_timeline_tells_copies_from_products(tmp_path: Path) -> None:
    events = [
        event("kernel", 7, 100, 50),
        event("gpu_memcpy", 13, 120, 60),
        event("cpu_op", 0, 0, 500),
        {"cat": "kernel", "name": "no stream", "ts": 1, "dur": 1},
    ]
    found = timeline.intervals({"traceEvents": [*events[::-1], {"ph": "M"}]})
    assert [(each.stream, each.is_copy) for each in found] == [(7, False), (13, True)]
    assert timeline.overlap_us(found) == 30
    assert timeline.overlap_us([Interval(1, 0, 10, "k", False), Interval(2, 10, 5, "c", True)]) == 0
    pytest.importorskip("matplotlib", reason="draws the picture")
    timeline.draw(found, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "1,none"], "not a positive number"),
        (["--dtype", "int8"], "invalid choice"),
        (["--layout", "round"], "invalid choice"),
        (["--profile", "/nowhere/at/all.png"], "cannot be written"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["gather-matmul", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["blocked", "striped"])
def test_two_ranks_measure_every_way(layout: str, tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    options = ["--ranks", "2", "--layout", layout, "--json", str(path)]
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", str(picture)]
    done = subprocess.run(
        [*COMMAND, *TINY, *options],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(path.read_text())
    assert found["schema"] == "tpspan-bench-gather-matmul/1"
    assert found["case"] == {
        "rows_of_w": 600,
        "k": 2048,
        "dtype": "float32",
        "layout": layout,
        "rows": [1, 5],
    }
    assert [row["rows"] for row in found["rows"]] == [1, 5]
    for row in found["rows"]:
        assert all(row["us"][name] > 0 for name in ("local", *READS, "gloo + mm"))
        assert row["us"]["fused"] is None and row["best_peer"] == "gloo + mm"
        assert row["floor_us"] == row["us"]["local"]
        assert row["share_of_floor"] > 0 and row["auto_over_better"] > 0
    reads = found["reads"]
    assert reads["staged"]["num_staged"] > 0 == reads["staged"]["num_in_place"]
    assert reads["auto"]["num_staged"] == reads["in_place"]["num_staged"] == 0
    assert 0 < reads["staged"]["scratch_nbytes"] <= 2 * found["size_bytes"]
    assert "fused: n/a: torch symmetric memory is for CUDA" in done.stdout
    assert picture.exists() == ("--plot" in options)
