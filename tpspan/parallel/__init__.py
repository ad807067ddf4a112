"""Models over spans."""

# Layers, from below: policy, chunks and order are arithmetic; boxes, stored and footprint know
# nothing of modules; regions knows modules but no spans; shared and parameters put the two
# together; checkpoint*, fit and loading fill them. staging and buffers copy weights beside what
# multiplies them, rates measures, reader decides; gathered and linear make a layer of it;
# substitution and prefetch do the same for whole models; owned hands gradients to the owners.
# ring and packing are arithmetic of a channel; turns and headers are what its two sides tell each
# other; side, link and handoff_parts are what it is made of; handoff_mapped and handoff_send carry;
# slot and handoff are what a program sees. pipeline_order and pipeline_cut are arithmetic;
# out_forms and pipeline_output let outputs be written where they belong, pipeline_crossing and
# pipeline_boundary move them, torch_stages knows torch's releases, and pipeline is the stage;
# model_parts, layer_costs and split cut a model into stages.

# Imported at their first use, since most programs need few of them and some take long: torch's
# pipelines a second, numba half of one. A module has the name of the function split, which
# therefore cannot wait.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpspan.parallel.split import StageModule, split, tied_parameters

if TYPE_CHECKING:
    from tpspan.parallel.handoff import Handoff
    from tpspan.parallel.handoff_arguments import HandoffStats
    from tpspan.parallel.linear import GatheredLinear
    from tpspan.parallel.loading import LoadReport, load_weights
    from tpspan.parallel.owned import OwnedParameters, owned_parameters
    from tpspan.parallel.parameters import share_parameters
    from tpspan.parallel.pipeline import SpanPipelineStage, fit_rings
    from tpspan.parallel.prefetch import ReadPolicy, read_policy
    from tpspan.parallel.reader import ReadStats
    from tpspan.parallel.shared import Entry, SharedParameters

_HOME = {
    "Handoff": "handoff",
    "HandoffStats": "handoff_arguments",
    "GatheredLinear": "linear",
    "LoadReport": "loading",
    "load_weights": "loading",
    "OwnedParameters": "owned",
    "owned_parameters": "owned",
    "share_parameters": "parameters",
    "SpanPipelineStage": "pipeline",
    "fit_rings": "pipeline",
    "ReadPolicy": "prefetch",
    "read_policy": "prefetch",
    "ReadStats": "reader",
    "Entry": "shared",
    "SharedParameters": "shared",
}

__all__ = [
    "Entry",
    "GatheredLinear",
    "Handoff",
    "HandoffStats",
    "LoadReport",
    "OwnedParameters",
    "ReadPolicy",
    "ReadStats",
    "SharedParameters",
    "SpanPipelineStage",
    "StageModule",
    "fit_rings",
    "load_weights",
    "owned_parameters",
    "read_policy",
    "share_parameters",
    "split",
    "tied_parameters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpspan.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tpspan.parallel.{_HOME[name]}"), name)
    globals()[name] = value
    return value
