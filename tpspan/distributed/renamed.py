"""torch's collective functions, two of which have had two names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed

# torch 2.13 gave them other names and warns of the old ones.
_NEWER = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


def torch_function(operation: str) -> Callable[..., Any]:
    """torch's function of a name, under its newer name where this release has that."""
    newer = getattr(torch.distributed, _NEWER.get(operation, operation), None)
    return newer or getattr(torch.distributed, operation)  # type: ignore[no-any-return]
