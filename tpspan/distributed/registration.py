"""Making ``init_process_group("tpspan")`` known to torch, without importing what it will need."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as torch_distributed

NAME = "tpspan"


def register() -> None:
    """Register the backend; torch calls this while it is imported, by an entry point.

    That is why nothing else is imported here, and why a build of torch without its distributed
    part is no error: ``import torch`` must neither wait nor fail because tpspan is installed.
    """
    if not torch_distributed.is_available():
        return
    backend = torch_distributed.Backend
    if NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    module = importlib.import_module("tpspan.distributed.process_group")
    return module.SpanProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        str(options.group_id),
    )
