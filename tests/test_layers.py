"""Imports go down the layers only. Nothing is imported here: the sources are read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A layer may import itself and every layer before it.
LAYERS = (
    "errors",
    "cached",
    "kernels",
    "memory",
    "launch",
    "spans",
    "distributed",
    "parallel",
    "sharing",
    "tools",
)
# Layers that get along with less than the order allows: kernels are plain functions over
# addresses, and a launch needs no kernel.
NARROWER = {"kernels": {"errors", "cached"}, "launch": {"errors", "memory"}}
# tpspan/__init__.py offers the public names of these; the command line stands above it.
PUBLIC = set(LAYERS) - {"tools"}

# Arithmetic that is tested without torch, without a driver and without a device.
POLICY = (
    "tpspan/spans/layout.py",
    "tpspan/spans/reads.py",
    "tpspan/parallel/chunks.py",
    "tpspan/parallel/order.py",
    "tpspan/parallel/pipeline_cut.py",
    "tpspan/parallel/pipeline_order.py",
    "tpspan/parallel/policy.py",
    "tpspan/parallel/ring.py",
)
POLICY_FORBIDDEN = {"torch", "numba", "cuda", "ctypes", "mpi4py"}

# `tpspan run` and `--help` have to answer without waiting for torch: a command imports what it runs
# when it runs it.
LAZY = {"tpspan/tools/cli.py"}


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute name."""

    path: str
    line: int
    name: str
    in_function: bool

    @property
    def layer(self) -> str | None:
        """The layer of tpspan that is imported; "" for the package itself; None if not ours."""
        parts = self.name.split(".")
        if parts[0] != "tpspan":
            return None
        return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def sources(folder: str) -> list[Path]:
    """Python files by the name they are installed under: the links are followed."""
    base = ROOT / folder
    files = list(base.glob("*.py"))
    for child in sorted(base.iterdir()):
        if child.is_dir() and child.name != "__pycache__":
            files += sources(f"{folder}/{child.name}")
    return files


def imports_of(source: str, path: str) -> Iterator[Import]:
    package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not path.endswith("/__init__.py"):
        package = package[:-1]

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, in_function)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*up, *filter(None, [node.module])])
            if module == "tpspan":  # each name may be a layer
                for alias in node.names:
                    yield Import(path, node.lineno, f"tpspan.{alias.name}", in_function)
            else:
                yield Import(path, node.lineno, module, in_function)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source, path), False)


def violations(source: str, path: str) -> list[str]:
    """What a file of tpspan imports against the rules."""
    parts = path.split("/")
    name = parts[1].removesuffix(".py")
    if name in LAYERS:
        allowed = NARROWER.get(name, set(LAYERS[: LAYERS.index(name)])) | {name}
    else:
        allowed = PUBLIC
    may_import_root = name == "tools"
    wrong = []
    for found in imports_of(source, path):
        if found.name.split(".")[0] in ("kernels", "launch"):
            wrong.append(f"{found}, which is installed as tpspan.{found.name}")
        if found.layer is None:
            if path in POLICY and found.name.split(".")[0] in POLICY_FORBIDDEN:
                wrong.append(f"{found}, but is policy")
            continue
        if found.layer == "" and not may_import_root:
            wrong.append(f"{found}, which stands above it")
        if found.layer and found.layer not in allowed:
            wrong.append(f"{found}, but {name} may import {sorted(allowed)} only")
        is_policy = f"{found.name.replace('.', '/')}.py" in POLICY
        if path in POLICY and not is_policy and found.layer not in ("errors", name):
            wrong.append(f"{found}, but is policy")
        if found.in_function and path not in LAZY:
            wrong.append(f"{found} inside a function")
    return wrong


FILES = sources("tpspan")


@pytest.mark.parametrize("path", [str(file.relative_to(ROOT)) for file in FILES])
def test_a_file_imports_downwards_only(path: str) -> None:
    assert violations((ROOT / path).read_text(), path) == []


def test_every_folder_is_a_layer() -> None:
    folders = {child.name for child in (ROOT / "tpspan").iterdir() if child.is_dir()}
    assert folders - {"__pycache__"} <= set(LAYERS)
    found = {str(file.relative_to(ROOT)).split("/")[1] for file in FILES}
    assert {"kernels", "launch"} <= found, "the links are followed"


def test_examples_use_the_public_names_only() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        for found in imports_of(file.read_text(), f"examples/{file.name}"):
            assert found.layer is None or found.name.count(".") <= 1, f"{found}: not public"


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("tpspan/memory/x.py", "import tpspan.spans.span", "tpspan.spans.span, but memory"),
        ("tpspan/memory/x.py", "from ..spans import span", "tpspan.spans, but memory"),
        ("tpspan/memory/x.py", "from tpspan import spans", "tpspan.spans, but memory"),
        ("tpspan/memory/x.py", "from .. import Span", "tpspan.Span, which stands above"),
        ("tpspan/memory/x.py", "import launch.world", "installed as tpspan.launch.world"),
        ("tpspan/kernels/x.py", "from tpspan.memory import Block", "tpspan.memory, but kernels"),
        ("tpspan/launch/x.py", "import tpspan.kernels", "tpspan.kernels, but launch"),
        ("tpspan/spans/layout.py", "import torch", "torch, but is policy"),
        ("tpspan/spans/layout.py", "import tpspan.memory", "tpspan.memory, but is policy"),
        ("tpspan/spans/x.py", "def f():\n    import tpspan.errors", "inside a function"),
        ("tpspan/__init__.py", "from tpspan.tools.cli import main", "tpspan.tools.cli, but"),
    ],
)
def test_the_rules_catch(path: str, source: str, wrong: str) -> None:
    found = violations(source, path)
    assert len(found) == 1
    assert wrong in found[0]
