"""The engine of GPU groups, its steps played on the host: what it stages, reads and waits for."""

from __future__ import annotations

import pytest

from harness import Ranks

HERE = pytest.mark.ranks(2, 3, backends=("host",), launchers=("mpirun",))


@HERE
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("through_host", [False, True])
def test_every_call(ranks: Ranks, through_host: bool, captured: bool) -> None:
    for dtype in ("float32", "bfloat16", "int64"):
        ranks.run(
            "bodies.cuda_logic:every_call",
            dtype=dtype,
            through_host=through_host,
            captured=captured,
        )


@HERE
def test_what_a_graph_has_captured_stays(ranks: Ranks) -> None:
    ranks.run("bodies.cuda_logic:grown")


@HERE
@pytest.mark.parametrize("through_host", [False, True])
def test_every_reduction(ranks: Ranks, through_host: bool) -> None:
    ranks.run("bodies.cuda_logic:every_reduction", through_host=through_host)
