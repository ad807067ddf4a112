"""What is installed: a wheel from the tree and from its source archive, in an environment apart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Offline: the setuptools that is installed builds, none is fetched for the build alone.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
BUILD_SOURCE = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


def command(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}"
    return done.stdout


def build_wheel(source: Path, into: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    command(*PIP, "wheel", *options, into, source, cwd=into.parent)
    (wheel,) = into.glob("tpspan-*.whl")
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree with its links: building writes into the folder it builds."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend")
    copy = tmp_path_factory.mktemp("package") / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build_wheel(tree, tree.parent / "from-tree")


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_under_tpspan(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for folder in ("tpspan", *(f"tpspan/{p.name}" for p in (ROOT / "tpspan").iterdir()))
        for path in (ROOT / folder).rglob("*.py")
    }
    held = modules(wheel)
    assert {"tpspan/__init__.py", "tpspan/kernels/__init__.py", "tpspan/py.typed"} <= held
    assert expected <= held
    assert {name.split("/")[0] for name in held} == {"tpspan"}


def test_a_source_archive_gives_the_same_wheel(tree: Path, wheel: Path) -> None:
    (tree / "dist").mkdir()
    lines = command(sys.executable, "-c", BUILD_SOURCE, cwd=tree).splitlines()
    archive = tree / "dist" / lines[-1]
    assert modules(build_wheel(archive, tree.parent / "from-archive")) == modules(wheel)


def test_an_installed_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Only the dependencies come from outside the environment, and not through its own site."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    command(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    program = """
import importlib.util, json, tpspan, tpspan.kernels, tpspan.launch
with tpspan.init(backend="host") as world:
    found = [world.world_size, tpspan.__file__, tpspan.kernels.__file__, tpspan.launch.__file__]
print(json.dumps([*found, *map(importlib.util.find_spec, ["kernels", "launch"])]))
"""
    unchanged = """
import sys, torch, torch.distributed as dist
assert not {"tpspan.launch", "tpspan.kernels", "numba", "mpi4py"} & set(sys.modules)
dist.init_process_group("tpspan", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(3))
print(dist.get_backend(), dist.Backend.default_device_backend_map["cpu"])
dist.destroy_process_group()
"""
    output = command(python, "-I", "-c", program, cwd=tmp_path)
    size, *files, kernels, launch = json.loads(output.splitlines()[-1])
    assert size == 1
    assert all(file.startswith(str(site)) for file in files), files
    assert (kernels, launch) == (None, None)
    # torch finds the backend by itself; programs that do not ask for it notice nothing.
    said = command(python, "-I", "-c", unchanged, cwd=tmp_path).splitlines()[-1]
    assert said == "tpspan gloo"
    for first in ("tpspan.distributed", "tpspan.distributed.registration", "tpspan"):
        command(python, "-I", "-W", "error", "-c", f"import {first}", cwd=tmp_path)
    assert "--num-ranks" in command(home / "bin" / "tpspan", "run", "--help", cwd=tmp_path)


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        text = archive.read(name).decode()
        assert any(n.endswith("LICENSE") for n in archive.namelist())
    required = {
        re.split("[;<>]", line.split(": ")[1])[0].strip()
        for line in text.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert required == {
        *("torch", "numpy", "cuda-python", "mpi4py", "numba", "numba-cuda"),
        *("safetensors", "rich", "typer"),
    }
    assert "Requires-Python: >=3.11" in text
    assert "Apache-2.0" in text
