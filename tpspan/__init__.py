"""tpspan: the ranks of a PyTorch job hold a tensor once between them, and read all of it.

Layers, each importing only what stands below it: ``tools`` (what people run), ``sharing`` (memory
that outlives processes), ``parallel`` (models over spans), ``spans`` (all ranks), ``launch`` (who
the ranks are), ``memory`` (one process), ``kernels``, ``errors``. What users need is re-exported
here and imported at its first use, so that the command line answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpspan.distributed.fsdp import SpanAllGather, SpanReduceScatter
    from tpspan.distributed.fsdp_model import use_spans
    from tpspan.errors import (
        CaptureError,
        CheckpointError,
        ClosedError,
        CollectiveMismatch,
        DriverError,
        InUseError,
        KeeperError,
        LaunchError,
        NameTakenError,
        OutOfMemoryError,
        PeerError,
        PublicationMismatch,
        TpspanError,
        UnknownNameError,
        VersionGoneError,
    )
    from tpspan.launch.start import init, world
    from tpspan.launch.world import World
    from tpspan.memory.driver import Right
    from tpspan.parallel.handoff import Handoff
    from tpspan.parallel.linear import GatheredLinear
    from tpspan.parallel.loading import load_weights
    from tpspan.parallel.owned import owned_parameters
    from tpspan.parallel.parameters import share_parameters
    from tpspan.parallel.pipeline import SpanPipelineStage, fit_rings
    from tpspan.parallel.prefetch import read_policy
    from tpspan.parallel.split import split, tied_parameters
    from tpspan.sharing.attached import Attached
    from tpspan.sharing.attaching import attach
    from tpspan.sharing.listing import published, remove
    from tpspan.sharing.modules import attach_module
    from tpspan.sharing.publication import Publication
    from tpspan.sharing.publishing import publish
    from tpspan.spans.layout import Layout
    from tpspan.spans.span import Span

__version__ = "0.1.0"

_HOME = {
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "ClosedError": "errors",
    "CollectiveMismatch": "errors",
    "DriverError": "errors",
    "InUseError": "errors",
    "KeeperError": "errors",
    "LaunchError": "errors",
    "NameTakenError": "errors",
    "OutOfMemoryError": "errors",
    "PeerError": "errors",
    "PublicationMismatch": "errors",
    "TpspanError": "errors",
    "UnknownNameError": "errors",
    "VersionGoneError": "errors",
    "SpanAllGather": "distributed.fsdp",
    "SpanReduceScatter": "distributed.fsdp",
    "use_spans": "distributed.fsdp_model",
    "init": "launch.start",
    "world": "launch.start",
    "World": "launch.world",
    "Right": "memory.driver",
    "GatheredLinear": "parallel.linear",
    "Handoff": "parallel.handoff",
    "load_weights": "parallel.loading",
    "owned_parameters": "parallel.owned",
    "SpanPipelineStage": "parallel.pipeline",
    "fit_rings": "parallel.pipeline",
    "read_policy": "parallel.prefetch",
    "share_parameters": "parallel.parameters",
    "split": "parallel.split",
    "tied_parameters": "parallel.split",
    "Attached": "sharing.attached",
    "attach": "sharing.attaching",
    "published": "sharing.listing",
    "remove": "sharing.listing",
    "attach_module": "sharing.modules",
    "Publication": "sharing.publication",
    "publish": "sharing.publishing",
    "Layout": "spans.layout",
    "Span": "spans.span",
}

__all__ = [
    "Attached",
    "CaptureError",
    "CheckpointError",
    "ClosedError",
    "CollectiveMismatch",
    "DriverError",
    "GatheredLinear",
    "Handoff",
    "InUseError",
    "KeeperError",
    "LaunchError",
    "Layout",
    "NameTakenError",
    "OutOfMemoryError",
    "PeerError",
    "Publication",
    "PublicationMismatch",
    "Right",
    "Span",
    "SpanAllGather",
    "SpanPipelineStage",
    "SpanReduceScatter",
    "TpspanError",
    "UnknownNameError",
    "VersionGoneError",
    "World",
    "attach",
    "attach_module",
    "fit_rings",
    "init",
    "load_weights",
    "owned_parameters",
    "publish",
    "published",
    "read_policy",
    "remove",
    "share_parameters",
    "split",
    "tied_parameters",
    "use_spans",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpspan' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tpspan.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
