"""A tensor as a checkpoint describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StoredTensor:
    """Shape and type of a tensor in a checkpoint, as ``read`` returns it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
