"""Pipelines of models that are more than a row of layers."""

from __future__ import annotations

import pytest

from harness import Ranks

# torch keeps what its groups have made: see test_pipeline.


@pytest.mark.ranks(2, launchers=("mpirun",))
def test_stages_of_a_model_that_is_shared(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline_models:shared_parameters", leaks=False)


@pytest.mark.ranks(3, launchers=("mpirun",))
def test_a_skip_connection_passes_through(ranks: Ranks) -> None:
    ranks.run("bodies.pipeline_models:skip_connection", leaks=False)
