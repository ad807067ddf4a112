"""Options, the parametrization by groups of ranks, and the order that keeps few groups alive."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from harness import LAUNCHERS, Config, Pool, Ranks, missing_launcher

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HOME", os.path.expanduser("~"))  # Open MPI does not start without it

_SIZES = (1, 2, 3, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "groups of ranks")
    group.addoption("--backend", help="only this backend: host or cuda")
    group.addoption("--launcher", help="only this launcher: mpirun or torchrun")
    group.addoption("--sizes", help="only these numbers of ranks, such as 1,2,4")
    group.addoption("--slow", action="store_true", help="the tests marked slow, too")


def _has_gpu() -> bool:
    return torch.cuda.is_available()  # False as well with a GPU and the CPU build of torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} uses ranks without a marker")
    option = metafunc.config.getoption
    sizes = marker.args or _SIZES
    if option("sizes"):
        wanted = {int(size) for size in option("sizes").split(",")}
        sizes = tuple(size for size in sizes if size in wanted)
    launchers = marker.kwargs.get("launchers", LAUNCHERS)
    backends = marker.kwargs.get("backends", ("host", "cuda"))
    configs = [
        Config(backend, launcher, size)
        for backend in backends
        for launcher in launchers
        for size in sizes
        if option("backend") in (None, backend) and option("launcher") in (None, launcher)
        if backend == "host" or _has_gpu()
    ]
    metafunc.parametrize(
        "ranks",
        [
            pytest.param(
                config, id=str(config), marks=[pytest.mark.cuda] * (config.backend == "cuda")
            )
            for config in configs
        ],
        indirect=True,
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests without ranks first; then group by group, so that each group starts once.

    Slow tests are left out, unless they are asked for by ``--slow``, by ``-m`` or by name.
    """
    by_name = any("::" in argument for argument in config.invocation_params.args)
    if not (config.option.slow or "slow" in config.option.markexpr or by_name):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)

    def key(item: pytest.Item) -> tuple[bool, Config]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        config = parameters.get("ranks")
        if not isinstance(config, Config):  # none, or none left by the options
            return False, Config("", "", 0)
        return True, config

    items.sort(key=key)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, rank_pool: Pool) -> Ranks:
    config: Config = request.param
    if reason := missing_launcher(config.launcher):
        pytest.skip(reason)
    return Ranks(config, rank_pool)
