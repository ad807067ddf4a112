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
from tpspan.parallel.split import StageModule, split, tied_parameters

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
