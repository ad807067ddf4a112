"""Models over spans."""

# Layers, from below: policy, chunks and order are arithmetic; boxes, stored and footprint know
# nothing of modules; regions knows modules but no spans; shared and parameters put the two
# together; checkpoint*, fit and loading fill them. staging and buffers copy weights beside what
# multiplies them, rates measures, reader decides; gathered and linear make a layer of it;
# substitution and prefetch do the same for whole models; owned hands gradients to the owners.

from tpspan.parallel.linear import GatheredLinear
from tpspan.parallel.loading import LoadReport, load_weights
from tpspan.parallel.owned import OwnedParameters, owned_parameters
from tpspan.parallel.parameters import share_parameters
from tpspan.parallel.prefetch import ReadPolicy, read_policy
from tpspan.parallel.reader import ReadStats
from tpspan.parallel.shared import Entry, SharedParameters

__all__ = [
    "Entry",
    "GatheredLinear",
    "LoadReport",
    "OwnedParameters",
    "ReadPolicy",
    "ReadStats",
    "SharedParameters",
    "load_weights",
    "owned_parameters",
    "read_policy",
    "share_parameters",
]
