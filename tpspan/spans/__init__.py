"""Spans: what all ranks of a domain hold and read together.

From the bottom: ``layout`` is arithmetic; ``connections`` and ``exchange`` pass descriptors;
``pages``, ``host_ops``, ``stream_ops`` (with ``stream_words`` and ``stream_watch``), ``board`` and
``signals`` are how ranks wait for and agree with each other; ``table``, ``allocation``, ``shards``,
``copying``, ``fence`` and ``tensors`` are the pieces of a ``span``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpspan.spans.board import Board
    from tpspan.spans.fence import Fence
    from tpspan.spans.layout import Layout, Run, balanced, pack
    from tpspan.spans.signals import Signals
    from tpspan.spans.span import Span, SpanStats
    from tpspan.spans.table import Placement, SpanBlock

# Imported at their first use: who needs a layout need not wait for numba.
_HOME = {
    "Board": "board",
    "Fence": "fence",
    "Layout": "layout",
    "Run": "layout",
    "balanced": "layout",
    "pack": "layout",
    "Signals": "signals",
    "Span": "span",
    "SpanStats": "span",
    "Placement": "table",
    "SpanBlock": "table",
}

__all__ = [
    "Board",
    "Fence",
    "Layout",
    "Placement",
    "Run",
    "Signals",
    "Span",
    "SpanBlock",
    "SpanStats",
    "balanced",
    "pack",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpspan.spans' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tpspan.spans.{_HOME[name]}"), name)
    globals()[name] = value
    return value
