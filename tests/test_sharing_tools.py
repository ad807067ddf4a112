"""The commands around published memory: publish, ls, rm, keeper, and the bench."""

from __future__ import annotations

import configparser
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tpspan
from sharing_processes import ON_EACH_DEVICE, keeper_pid, own_keeper, wait_until
from tpspan.tools import keeper as keeper_tool
from tpspan.tools import listing, publish, remove
from tpspan.tools.cli import COMMANDS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def keeper() -> Iterator[str]:
    with own_keeper() as directory:
        yield directory


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2]), "c": torch.ones(())}
    save_file(values, path)
    return path


def test_a_file_is_published_listed_and_removed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing.main([]) == 0
    assert "nothing is published" in capsys.readouterr().out
    assert publish.main([str(file), "--name", "base", "--keep", "3", "--block-size", "2MiB"]) == 0
    assert capsys.readouterr().out.startswith("base: version 1, 44 B in 3 tensors on cpu, in ")
    with tpspan.attach("base") as a:
        assert a["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert a["b"].tolist() == [1, 2]
        assert float(a["c"]) == 1
        assert listing.main(["--json"]) == 0
        (seen,) = json.loads(capsys.readouterr().out)
        assert seen["versions"][0]["readers"] == [os.getpid()]
        assert (seen["name"], seen["keep"], seen["publisher_alive"]) == ("base", 3, False)
    assert publish.main([str(file), "--name", "base", "--block-size", "2MiB"]) == 0
    assert "base: version 2" in capsys.readouterr().out
    assert listing.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["base", "cpu", "44", "B", "2", "0", "B"] in [line.split()[:7] for line in lines]
    assert any(line.split()[:3] == ["1", "2", "MiB"] for line in lines)
    assert remove.main(["base", "nothing"]) == 1
    assert "nothing is published as 'nothing'" in capsys.readouterr().err
    assert tpspan.published() == []


def test_other_types_and_names(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish.main([str(file), "--dtype", "bfloat16"]) == 0
    with tpspan.attach("model") as a:
        assert (a["a"].dtype, a["b"].dtype) == (torch.bfloat16, torch.int64)
        assert a["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert remove.main(["--all"]) == 0
    for wrong, said in [
        ([str(file), "--dtype", "float"], ""),
        ([str(file), "--dtype", "nonsense"], "is no dtype of torch"),
        ([str(file), "--device", "meta"], "cpu and cuda devices"),
        (["/nowhere.safetensors"], "there is no file or directory"),
        (["/nowhere.gguf"], "publish the module"),
    ]:
        assert publish.main(wrong) == (1 if said else 0)
        assert said in capsys.readouterr().err
    assert remove.main(["--all"]) == 0
    for words in ([], ["x", "--all"]):
        with pytest.raises(SystemExit):
            remove.main(words)
    with pytest.raises(SystemExit):
        listing.main(["--watch", "never"])


def test_a_living_publisher_is_removed_by_force_only(capsys: pytest.CaptureFixture[str]) -> None:
    with tpspan.publish({"x": torch.ones(3)}, "x"):
        assert remove.main(["x"]) == 1
        assert "is alive" in capsys.readouterr().err
        assert remove.main(["x", "--force"]) == 0


def test_watching(keeper: str) -> None:
    with tpspan.publish({"x": torch.ones(3)}, "x") as p:
        process = subprocess.Popen(
            [sys.executable, "-m", "tpspan.tools.cli", "ls", "--watch", "0.05", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        versions = set()
        while 2 not in versions:
            (seen,) = json.loads(process.stdout.readline())
            versions.add(seen["versions"][-1]["version"])
            if 1 in versions and p.version == 1:
                p.commit()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        process.stdout.close()
        p.close(remove=True)


def test_the_keeper_as_a_service(keeper: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keeper_tool.main(["--unit"]) == 0
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(capsys.readouterr().out)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert Path(command[0]).is_absolute(), "a service has another path"
    process = subprocess.Popen(command)
    wait_until(lambda: keeper_pid() is not None)
    assert keeper_pid() == process.pid, "the light interpreter has taken the place of the heavy one"
    assert "typer" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert {"publish", "ls", "rm", "keeper"} <= {each.name for each in COMMANDS}


def test_listing_needs_no_torch() -> None:
    program = "import tpspan.tools.listing, tpspan.tools.remove, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_bench_checks_and_measures(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    words = "share --backend host --size 8MiB --tensors 20 --workers 2 --repeat 1 --json"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket is short
        done = subprocess.run(
            [sys.executable, "-m", "tpspan.tools.cli", "bench", *words.split(), str(path)],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        assert os.listdir(folder) == [], "the keeper has ended, and its folder is gone"
    found = json.loads(path.read_text())
    names = [figure["name"] for figure in found["figures"]]
    assert {"tpspan.attach", "tpspan.attach, all workers at once"} < set(names)
    assert len(names) == 12
    assert found["hardware"]["cpu"] and found["versions"]["python"]
    by_name = {figure["name"]: figure for figure in found["figures"]}
    assert by_name["new version, one hundredth changed"]["bytes"] == 2 << 20
    assert "times tpspan.attach" in done.stdout
    assert all(figure.get("median_s", 1) > 0 for figure in found["figures"])


@ON_EACH_DEVICE
def test_a_trainer_and_a_generator(capfd: pytest.CaptureFixture[str], device: str) -> None:
    """The trainer in this process, which has torch; the generator is a program of its own."""
    runpy.run_path(str(EXAMPLES / "trainer_and_generator.py"))["train"](0.5, device)
    said = capfd.readouterr().out
    assert "flips; from commit to flip" in said
    assert tpspan.published() == []


@pytest.mark.slow
def test_a_training_that_is_killed_and_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "restart.py")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    assert "all losses are those of a run without a kill: True" in done.stdout
    assert tpspan.published() == []
