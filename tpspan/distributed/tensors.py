"""Tensors as the engines want them: with memory of their own, side by side in it."""

from __future__ import annotations

import torch


def alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Complex numbers may meet their parts, as in torch."""
    if one.dtype == other.dtype or one.is_complex() == other.is_complex():
        return one, other
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    return next(pair), next(pair)


def check_memory(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage is shorter than it says: at its addresses is something else.

    Raises:
        ValueError: it is.
    """
    offset = tensor.storage_offset()
    needed = tensor.nbytes + (offset * tensor.element_size() if offset else 0)
    if tensor.untyped_storage().nbytes() < needed or not tensor.is_contiguous():
        _check_extent(tensor)


def check_writable(tensor: torch.Tensor, *, may_share: bool = False) -> None:
    """``check_memory``, and refuse what torch does not write either.

    Args:
        may_share: elements that share memory are to get one value.

    Raises:
        ValueError: it has no memory, or no memory for each element.
    """
    check_memory(tensor)
    if not tensor.data_ptr() and tensor.numel():
        raise ValueError("the output is one of torch's immutable zero tensors: clone it first")
    if may_share or tensor.is_contiguous():
        return
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError("elements of the output share memory, as after expand: clone it first")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, side by side in memory."""
    if not is_plain(tensor):
        return tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not tensor.data_ptr() and tensor.numel():  # a zero tensor of torch, which has no memory
        return tensor.detach().clone()
    return tensor


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie side by side, otherwise one to be copied from."""
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def apart(source: torch.Tensor, target: torch.Tensor, own_offset: int | None) -> torch.Tensor:
    """The source, or a copy if it overlaps the target anywhere but exactly at that offset.

    A large call writes the first pieces of its output before it has read the last of its input.
    """
    distance = source.data_ptr() - target.data_ptr()
    if distance == own_offset or not -source.nbytes < distance < target.nbytes:
        return source
    return source.detach().clone()


def bring_back(output: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to where the caller wants it, unless it was made there.

    Where elements of the output share memory they have one value, so it is written once.
    """
    if target is output:
        return
    output, target = output.detach(), target.view_as(output)
    if torch._debug_has_internal_overlap(output) == 1:
        for dim, (length, stride) in enumerate(zip(output.shape, output.stride(), strict=True)):
            if length > 1 and not stride:
                output, target = output.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    output.copy_(target)


def _check_extent(tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * stride for length, stride in steps)
    needed, found = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} needs {needed} bytes of its storage, "
            f"which has {found}: it has been resized, or holds no data"
        )
