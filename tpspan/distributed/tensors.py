"""Tensors as the engines want them: side by side in memory."""

from __future__ import annotations

import torch


def alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Complex numbers may meet their parts, as in torch."""
    if one.dtype == other.dtype or one.is_complex() == other.is_complex():
        return one, other
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    return next(pair), next(pair)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, side by side in memory."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie side by side, otherwise one to be copied from."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def bring_back(output: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to where the caller wants it, unless it was made there."""
    if target is not output:
        output.detach().copy_(target.view_as(output))
