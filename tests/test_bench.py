"""The benchmark measures what it says, of spans that hold what they should; no time is asserted."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness import Ranks, missing_launcher, rank_environment
from tpspan.errors import PeerError
from tpspan.spans import stream_watch
from tpspan.spans.signals import Signals
from tpspan.tools.bench import values
from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.command import num_bytes, parser
from tpspan.tools.bench.measuring import Bench, summarise
from tpspan.tools.bench.report import SCHEMA, short
from tpspan.tools.bench.scaling import fit
from tpspan.tools.bench.span import check_values

COMMAND = [sys.executable, "-m", "tpspan.tools.cli", "bench", "span"]
TINY = ["--size", "4MiB", "--seconds", "0.002", "--large-size", "12MiB", "--backend", "host"]
KEYS = {
    *("schema", "date", "command_line", "seconds", "backend", "ranks", "launcher", "size_bytes"),
    *("hardware", "ranks_share_gpu", "versions", "figures", "scaling"),
}
HARDWARE = {
    *("cpu", "num_cores", "memory_bytes", "kernel", "gpu", "num_gpus_visible", "num_gpus_used"),
    "driver",
}
FIGURE = {
    *("group", "name", "unit", "median", "minimum", "maximum", "num_samples", "slowest_rank"),
    *("rank_medians", "note"),
}


# ---------------------------------------------------------------- arithmetic


def test_the_slowest_rank_of_every_sample_counts() -> None:
    figure = summarise("g", "n", "us", [[1.0, 9.0, 2.0], [5.0, 3.0, 4.0]], note="why")
    assert (figure.median, figure.minimum, figure.maximum) == (5.0, 4.0, 9.0)
    assert (figure.num_samples, figure.slowest_rank, figure.rank_medians) == (3, 1, (2.0, 4.0))
    assert (figure.group, figure.name, figure.unit, figure.note) == ("g", "n", "us", "why")


def test_of_a_rate_the_slowest_rank_has_the_least() -> None:
    figure = summarise("g", "n", "GB/s", [[10.0, 30.0], [20.0, 20.0]], more_is_better=True)
    assert (figure.median, figure.minimum, figure.maximum) == (15.0, 10.0, 20.0)
    figure = summarise("g", "n", "GB/s", [[10.0], [9.0]], more_is_better=True)
    assert figure.slowest_rank == 1


def test_differences_are_taken_of_one_rank() -> None:
    by_rank = [[-9.0, 9.0, 0.0], [1.0, 2.0, -3.0]]
    figure = summarise("g", "n", "%", by_rank, combine="worst median")
    assert (figure.median, figure.minimum, figure.maximum) == (1.0, -3.0, 2.0)
    assert figure.slowest_rank == 1


@pytest.mark.parametrize("by_rank", [[], [[]], [[1.0], []], [[1.0, 2.0], [1.0]]])
def test_ranks_give_as_many_samples(by_rank: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="as many samples"):
        summarise("g", "n", "us", by_rank)


class PlayedCalls:
    """Calls of 17 µs on a stream on which the first of two events comes 300 µs late.

    Attributes:
        num_put: calls since the stream was last held, at most.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 0.0
        self.num_put = 0
        self._num_since = 0
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "_sleep", self._held, raising=False)

    def __call__(self) -> None:
        self.now_us += 17
        self._num_since += 1
        self.num_put = max(self.num_put, self._num_since)

    def bench(self, *, shares_device: bool) -> Bench:
        """A bench of one rank that says of itself what the ranks agree on."""
        bench: Any = Bench.__new__(Bench)
        bench.shares_device = shares_device
        bench.agree, bench.start_together = float, lambda: None
        return cast(Bench, bench)

    def _held(self, cycles: int) -> None:
        self._num_since = 0

    def _event(self, enable_timing: bool) -> Any:
        def record() -> None:
            event.at_us = self.now_us

        def elapsed_ms(end: Any) -> float:
            return float(end.at_us - event.at_us + 300) / 1e3

        event = SimpleNamespace(record=record, elapsed_time=elapsed_ms, synchronize=lambda: None)
        return event


@pytest.mark.parametrize(
    ("shares_device", "meets", "late_us"), [(True, True, 0), (True, False, 300), (False, True, 300)]
)
def test_an_event_that_comes_late_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, shares_device: bool, meets: bool, late_us: int
) -> None:
    calls = PlayedCalls(monkeypatch)
    bench = calls.bench(shares_device=shares_device)
    stream_s, host_s = bench.queued(calls, 50, 14, meets=meets)
    assert stream_s * 1e6 == pytest.approx(17 + late_us / 50)
    assert host_s > 0
    assert calls.num_put == 50 + 14


def test_a_host_may_be_far_ahead_while_a_stream_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = PlayedCalls(monkeypatch)
    bench = calls.bench(shares_device=True)
    room, rooms = stream_watch.ROOM, []

    def call() -> None:
        calls()
        rooms.append(stream_watch.ROOM)
        if len(rooms) > 400:
            raise ValueError("enough")

    stream_s, _ = bench.queued(call, 200, 50)
    assert stream_s * 1e6 == pytest.approx(17)
    assert min(rooms) > 64 * len(rooms), "no call was held"
    assert room == stream_watch.ROOM
    with pytest.raises(ValueError, match="enough"):
        bench.queued(call, 200, 50)
    assert room == stream_watch.ROOM


def test_a_call_begins_behind_a_barrier_and_the_slowest_rank_of_each_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = PlayedCalls(monkeypatch)
    done: list[object] = []
    bench: Any = calls.bench(shares_device=False)

    def barrier(slot: int, stream: int) -> None:
        calls.now_us += 5000
        done.append(("barrier", slot, stream))

    def call() -> None:
        calls()
        done.append(("call",))

    def all_gather(mine: list[float]) -> list[list[float]]:
        assert [1e6 * each for each in mine] == pytest.approx([317] * 3)
        return [mine, [2e-4, 9e-4, 4e-4]]

    signals = SimpleNamespace(acquire=lambda: 4, release=done.append, barrier=barrier)
    monkeypatch.setattr(Signals, "of", lambda world: signals)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    bench.world = SimpleNamespace(device=None, backend="host")
    bench.board = SimpleNamespace(all_gather=all_gather)
    assert bench.begun_together(call, 3) == pytest.approx(4e-4)
    assert done == [("barrier", 4, 7), ("call",)] * 3 + [4]


def test_fit() -> None:
    line = fit([1, 2, 4, 1000], [5 + 3 * x for x in (1, 2, 4, 1000)])
    assert (line.fixed, line.each, line.r_squared) == pytest.approx((5, 3, 1))
    bent = fit([0, 1, 2], [0.0, 3.0, 0.0])
    assert (bent.fixed, bent.each, bent.r_squared) == pytest.approx((1, 0, 0))
    assert fit([1, 2], [4.0, 4.0]).r_squared == 1
    with pytest.raises(ValueError, match="different numbers of blocks"):
        fit([3, 3], [1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("256MiB", 256 << 20),
        ("256 mb", 256 << 20),
        ("1.5G", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert num_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "12 apples", "MiB", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        num_bytes(text)


def test_what_people_read() -> None:
    assert [shown(n) for n in (7, 2048, 3 << 19, 64 << 30)] == ["7 B", "2 KiB", "1.5 MiB", "64 GiB"]
    assert [short(x) for x in (0.1234, -12.34, 12345.6)] == ["0.123", "-12.3", "12,346"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "WHAT"),
        (["span", "--ranks", "0"], "not a positive number"),
        (["span", "--size", "0"], "0 bytes take no time"),
        (["share", "--size", "0B"], "0 bytes take no time"),
        (["gather", "--seconds", "0"], "not a positive number of seconds"),
        (["span", "--seconds", "-1"], "not a positive number of seconds"),
        (["span", "--seconds", "nan"], "not a positive number of seconds"),
        (["span", "--json", "/nowhere/at/all.json"], "cannot be written"),
        *(
            ([which, *option], message)
            for which in ("span", "gather", "all-reduce", "gather-matmul", "fsdp", "pipeline")
            for option, message in (
                (["--json", "/proc/figures.json"], "cannot be written"),
                (["--json", "/dev/null"], "cannot be written"),
                (["--plot", "/proc/plot.png"], "cannot be written"),
                (["--plot", "plot.qqq"], "does not end in one of .png"),
                (["--plot", "plot"], "does not end in one of .png"),
            )
        ),
        (["gather-matmul", "--profile", "profile.txt"], "does not end in one of .png"),
        (["span", "--scaling", "--blocks", "4,4"], "two different numbers"),
        (["span", "--launcher", "srun"], "invalid choice"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    assert message in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import contextlib, sys\n"
        "from tpspan.tools import cli\n"
        "from tpspan.tools.bench import command\n"
        "assert 'bench' in [command.name for command in cli.COMMANDS]\n"
        "with contextlib.suppress(SystemExit):\n"
        "    command.main(['span', '--help'])\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--ranks" in done.stdout
    assert done.stdout.endswith("False\n")


# ---------------------------------------------------------------- on ranks


def values_hold(world: Any, nbytes: int) -> None:
    check_values(world, nbytes)


def wrong_value_is_noticed(world: Any, wrong_rank: int, what: str) -> str:
    span = values.allocate(world, 4 << 20)
    values.fill(span, 1)
    span.barrier()
    values.check(span, 1, "before")
    span.barrier()
    if world.rank == wrong_rank:
        span.local[-1] += 1
    span.barrier()
    try:
        values.check(span, 1, what)
    except (values.WrongValues, PeerError) as error:
        said = str(error)
    else:
        said = ""
    span.close(force=True)
    return said


def other_values_differ(world: Any) -> None:
    """No salt, element or block looks like another."""
    first, other_salt = (values.expected(0, 1 << 20, salt, world.device) for salt in (1, 2))
    next_block = values.expected(1 << 20, 2 << 20, 1, world.device)
    assert not (first == other_salt).any()
    assert not (first == next_block).any()
    assert first.unique().numel() == first.numel()


def agrees(world: Any) -> tuple[float, int, int, int]:
    bench = Bench(world, seconds=0.0)
    calls: list[int] = []
    samples = bench.sample(lambda: calls.append(1), least=3, most=3)
    in_turns = bench.sample(lambda: 0, least=3, most=3, in_turns=True)
    return bench.agree(world.rank), len(samples), len(calls), len(in_turns)


@pytest.mark.ranks(1, 2, launchers=("torchrun",))
@pytest.mark.parametrize("nbytes", [1, 3 << 20, 8 << 20])
def test_values_are_checked(ranks: Ranks, nbytes: int) -> None:
    ranks.run("test_bench:values_hold", nbytes=nbytes)


@pytest.mark.ranks(2, launchers=("torchrun",))
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_wrong_value_is_told_by_every_rank(ranks: Ranks, wrong_rank: int) -> None:
    said = ranks.run("test_bench:wrong_value_is_noticed", wrong_rank=wrong_rank, what="on purpose")
    last = (4 << 20) // 4 // 2 * (wrong_rank + 1) - 1
    assert all("on purpose: 1 of" in text and f"element {last}," in text for text in said), said


@pytest.mark.ranks(2, launchers=("torchrun",))
def test_no_two_values_look_alike(ranks: Ranks) -> None:
    ranks.run("test_bench:other_values_differ")


@pytest.mark.ranks(2, launchers=("torchrun",))
def test_ranks_sample_equally_often_after_a_warm_up(ranks: Ranks) -> None:
    assert ranks.run("test_bench:agrees") == [(1, 3, 5, 3)] * 2


# ---------------------------------------------------------------- the command


def bench(*words: str, expect: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *words],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_ranks_measure_and_report_everything(launcher: str, tmp_path: Path) -> None:
    if reason := missing_launcher(launcher):
        pytest.skip(reason)
    path = tmp_path / "figures.json"
    options = ["--ranks", "2", "--launcher", launcher, "--scaling", "--blocks", "1,3"]
    output = bench(*TINY, *options, "--json", str(path))
    found = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path]
    assert set(found) == KEYS
    assert found["schema"] == SCHEMA
    assert (found["ranks"], found["backend"], found["launcher"]) == (2, "host", launcher)
    assert found["size_bytes"] == 4 << 20
    assert found["command_line"].startswith("tpspan bench span --size 4MiB")
    assert set(found["hardware"]) == HARDWARE
    assert found["hardware"]["cpu"] and found["hardware"]["num_gpus_used"] == 0
    assert set(found["versions"]) == {"tpspan", "torch", "cuda", "python"}
    figures = {(figure["group"], figure["name"]): figure for figure in found["figures"]}
    assert len(figures) == len(found["figures"]), "names are unique"
    for figure in figures.values():
        check_figure(figure)
        assert f"  {figure['name']}" in output
    groups = {group for group, _ in figures}
    assert groups == {"allocate", "barrier", "launch", "remap", "read in place", "gather"}
    for name in (
        *(f"{size}, {step}" for size in ("4 MiB", "12 MiB") for step in ("exchange", "total")),
        *(f"{size}, whole collective call, idle" for size in ("2 MiB", "64 MiB")),
        *(
            f"{size}, products slower, beside driver part, one every ms"
            for size in ("2 MiB", "64 MiB")
        ),
        *("own shard", "shard of the rank 1 to the right", "whole range in order"),
        *("4 MiB, copy_to", "read through the span sooner than after gloo"),
    ):
        assert any(name == known for _, known in figures), name
    points = found["scaling"]["points"]
    counts = [(point["num_ranks"], point["blocks_per_rank"]) for point in points]
    assert counts == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(point["seconds"] > 0 for point in points)
    assert set(found["scaling"]["wall"]) == {"fixed", "each", "r_squared"}
    assert "blocks x ranks, R^2" in output


def check_figure(figure: dict[str, Any]) -> None:
    assert set(figure) == FIGURE
    assert figure["unit"] in ("us", "ms", "GB/s", "%", "x")
    if figure["median"] is None:
        assert figure["num_samples"] == 0 and figure["note"], figure
        return
    assert figure["num_samples"] > 0
    assert figure["minimum"] <= figure["median"] <= figure["maximum"]
    if figure["unit"] != "%":
        assert figure["minimum"] > 0, figure
    assert len(figure["rank_medians"]) == (0 if figure["unit"] == "x" else 2)
    assert figure["slowest_rank"] in (None, 0, 1)


def test_plot_without_scaling_is_refused(tmp_path: Path) -> None:
    assert "give both" in bench("--plot", str(tmp_path / "plot.png"), expect=2)
