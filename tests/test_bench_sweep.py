"""The benches over sizes: values first, every peer or why not; no time is asserted."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bodies.process_groups import process_group
from harness import Ranks, missing_launcher, rank_environment
from tpspan.errors import PeerError
from tpspan.tools.bench import all_reduce, gather, sweep_report
from tpspan.tools.bench.command import parser
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender, Row, Stage, integers, modulus_of_sums, sweep
from tpspan.tools.bench.values import WrongValues

SET_UPS = {
    gather.OPERATION: gather.set_up,
    all_reduce.ALL_REDUCE: all_reduce.set_up_all_reduce,
    all_reduce.REDUCE_SCATTER: all_reduce.set_up_reduce_scatter,
}
ROW = {
    *("operation", "nbytes", "us", "host_us", "best_peer", "ratio", "share_of_floor"),
    *("barriers_in_place", "alone_us", "ratio_alone"),
}


# ---------------------------------------------------------------- arithmetic


def test_default_sizes() -> None:
    sizes = sweep_report.default_sizes("host")
    assert (sizes[0], sizes[1], sizes[-1]) == (1 << 10, 4 << 10, 256 << 20)
    sizes = sweep_report.default_sizes("cuda")
    assert (sizes[0], sizes[-2], sizes[-1]) == (1 << 10, 1 << 30, 2 << 30)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
def test_sums_are_exact_in_bf16(world_size: int) -> None:
    modulus = modulus_of_sums(world_size)
    parts = [
        integers(r, 0, 1000, modulus, torch.int64, torch.device("cpu")) for r in range(world_size)
    ]
    total = torch.stack(parts).sum(0)
    assert total.to(torch.bfloat16).to(torch.int64).equal(total)
    assert world_size == 1 or not parts[0].equal(parts[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gather", "--sizes", "4KiB,0"], "take no time"),
        (["gather", "--sizes", "4 apples"], "not a size"),
        (["all-reduce", "--dtype", "int8"], "invalid choice"),
        (["all-reduce", "--plot", "/nowhere/at/all.png"], "cannot be written"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- on ranks


def rows_of(world: Any, operation: str, dtype: str) -> list[Row]:
    shared = any(world.control.all_gather(world.shares_device))
    backend = "cpu:gloo,cuda:nccl" if world.backend == "cuda" and not shared else "gloo"
    sizes = (4, 3000, 1 << 20)
    with process_group(world, backend):
        bench = Bench(world, seconds=0.0)
        rows = sweep(bench, operation, SET_UPS[operation], sizes, getattr(torch, dtype))
    for row in rows:
        assert row.us["tpspan"] and row.share_of_floor
        left_out = {name for name, value in row.us.items() if value is None}
        notes = {each.name: each.note for each in bench.figures if each.median is None}
        assert all(notes[name].startswith("n/a: ") for name in left_out), notes
        assert bool(row.host_us) == (world.backend == "cuda")
    return rows


def wrong_values_end_the_bench(world: Any, wrong_rank: int) -> str:
    """A contender that changes one element of one rank's result."""

    @contextlib.contextmanager
    def set_up(bench: Bench, nbytes: int, dtype: torch.dtype) -> Iterator[Stage]:
        with gather.set_up(bench, nbytes, dtype) as stage:
            honest = stage.contenders[0].body
            assert honest is not None

            def wrong() -> torch.Tensor:
                result = honest()
                assert result is not None
                if world.rank == wrong_rank:
                    result[-1] += 1
                return result

            contender = Contender("liar", "ours", wrong)
            yield Stage([contender], stage.fill, stage.expected, stage.rest)

    bench = Bench(world, seconds=0.0)
    try:
        sweep(bench, "all-gather", set_up, (4096,), torch.float32)
    except (WrongValues, PeerError) as error:
        return str(error)
    return ""


@pytest.mark.ranks(1, 3, launchers=("torchrun",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", sorted(SET_UPS))
def test_everybody_is_checked_and_timed(ranks: Ranks, operation: str, dtype: str) -> None:
    rows = ranks.run("test_bench_sweep:rows_of", operation=operation, dtype=dtype, leaks=False)[0]
    assert [row.nbytes for row in rows] == [4, 3000, 1 << 20]
    if ranks.backend == "host":
        assert all(row.best_peer == "gloo" and row.ratio for row in rows)


@pytest.mark.ranks(2, launchers=("torchrun",))
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_wrong_value_is_told_by_every_rank(ranks: Ranks, wrong_rank: int) -> None:
    said = ranks.run("test_bench_sweep:wrong_values_end_the_bench", wrong_rank=wrong_rank)
    assert all("4 KiB, bf16, liar: 1 of" in text for text in said), said


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("which", "operations"),
    [("gather", {"all-gather"}), ("all-reduce", {"all-reduce", "reduce-scatter"})],
)
def test_the_command_measures_and_reports(which: str, operations: set[str], tmp_path: Path) -> None:
    if reason := missing_launcher("mpirun"):
        pytest.skip(reason)
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["--ranks", "2", "--backend", "host", "--seconds", "0.002", "--sizes", "1KiB,64KiB"]
    words += ["--json", str(path)]
    has_plot = importlib.util.find_spec("matplotlib") is not None
    words += ["--plot", str(picture)] if has_plot else []
    done = subprocess.run(
        [sys.executable, "-m", "tpspan.tools.cli", "bench", which, *words],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(path.read_text())
    assert found["schema"] == f"tpspan-bench-{which}/1"
    assert (found["ranks"], found["backend"], found["dtype"]) == (2, "host", "float32")
    assert found["size_bytes"] == 64 << 10
    assert all(set(row) == ROW for row in found["rows"])
    sizes = {(row["operation"], row["nbytes"]) for row in found["rows"]}
    assert sizes == {(operation, nbytes) for operation in operations for nbytes in (1024, 65536)}
    for row in found["rows"]:
        assert row["best_peer"] == "gloo" and row["ratio"] > 0
        assert (row["barriers_in_place"] is not None) == (which == "gather")
    names = [(figure["group"], figure["name"]) for figure in found["figures"]]
    assert len(set(names)) == len(names)
    for text in (*operations, "64 KiB", "share of floor", "n/a: torch symmetric memory"):
        assert text in done.stdout
    assert not has_plot or picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_of_a_gpu_has_calls_alone() -> None:
    us = {"tpspan": 10.0, "nccl": None, "floor": 5.0}
    host_us, alone_us = {"tpspan": 3.0, "floor": 1.0}, {"tpspan": 12.0, "floor": 6.0}
    row = Row("all-gather", 1024, us, host_us, alone_us, None, None, None, 0.5, None)
    table = sweep_report._table("all-gather", [row])
    headers = [str(column.header) for column in table.columns]
    assert headers[1:6] == ["tpspan", "nccl", "floor", "tpspan, alone", "floor, alone"]
    assert list(table.columns[2].cells) == ["-"]
