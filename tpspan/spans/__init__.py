"""Spans: what all ranks of a domain hold and read together.

From the bottom: ``layout`` is arithmetic; ``connections`` and ``exchange`` pass descriptors;
``pages``, ``host_ops``, ``stream_ops`` (with ``stream_words`` and ``stream_watch``), ``board`` and
``signals`` are how ranks wait for and agree with each other; ``table``, ``allocation``, ``shards``,
``copying``, ``fence`` and ``tensors`` are the pieces of a ``span``.
"""

from tpspan.spans.board import Board
from tpspan.spans.fence import Fence
from tpspan.spans.layout import Layout, Run, balanced, pack
from tpspan.spans.signals import Signals
from tpspan.spans.span import Span, SpanStats
from tpspan.spans.table import Placement, SpanBlock

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
