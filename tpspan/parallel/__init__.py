"""Models over spans."""

# Layers, from below: boxes, stored and footprint know nothing of modules; regions knows modules but
# no spans; shared and parameters put the two together; checkpoint*, fit and loading fill them.

from tpspan.parallel.loading import LoadReport, load_weights
from tpspan.parallel.parameters import share_parameters
from tpspan.parallel.shared import Entry, SharedParameters

__all__ = ["Entry", "LoadReport", "SharedParameters", "load_weights", "share_parameters"]
