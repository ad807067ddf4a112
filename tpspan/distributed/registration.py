"""Making ``init_process_group("tpspan")`` known to torch, without importing what it will need."""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed import Backend

NAME = "tpspan"


def register() -> None:
    """Register the backend; also what torch's entry point ``torch.backends`` may call."""
    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    module = importlib.import_module("tpspan.distributed.process_group")
    return module.SpanProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        str(options.group_id),
    )
