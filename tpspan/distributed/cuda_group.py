"""Placeholder."""
from __future__ import annotations
from tpspan.distributed.host_group import HostGroup
class CudaGroup(HostGroup):
    pass
