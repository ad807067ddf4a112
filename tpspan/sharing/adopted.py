"""Tensors of a module that stand for places in a range, until the range is closed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from tpspan.errors import InUseError
from tpspan.parallel.regions import Region, Slots
from tpspan.sharing.layout import Entry
from tpspan.spans.tensors import TensorRange


class Adopted:
    """The tensors that were given memory in a range, as long as they live."""

    def __init__(self) -> None:
        self._tensors: list[tuple[TensorWeakRef, int]] = []

    def take(self, slots: Slots, region: Region, view: torch.Tensor) -> None:
        """Let everything that a module registers for a region stand for ``view``.

        A real tensor stays the same object; one on the meta device is replaced wherever the module
        registers it, since torch cannot give it memory.
        """
        for tensor in region.tensors:
            if tensor.is_meta:
                # ``.data`` forgets what the view was made from, which would keep the range in use.
                is_parameter = isinstance(tensor, nn.Parameter)
                made = nn.Parameter(view, tensor.requires_grad) if is_parameter else view.data
                if tensor.__dict__:
                    made.__dict__.update(tensor.__dict__)
                slots.put(tensor, made)
                self.note(made)
                continue
            gradient = tensor.grad
            if gradient is not None and gradient.device != view.device:
                tensor.grad = None
                tensor.data = view
                tensor.grad = gradient.to(view.device)
            else:
                tensor.data = view
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        """Remember a tensor that stands for a place."""
        if tensor.numel():
            self._tensors.append((TensorWeakRef(tensor), tensor.data_ptr()))

    def make_private(self, tensors: TensorRange, *, keep: object, what: str) -> None:
        """Give those that live, and are where they were put, memory of their own.

        Args:
            tensors: the range that they were taken from.
            keep: what keeps it.
            what: what it hands out, for the message.

        Raises:
            InUseError: others of its tensors live; nothing was changed.
            RuntimeError: torch has no memory for the copies; nothing was changed.
        """
        found = self._in_place()
        # A view of one of these shares its storage, and is seen only once that has been left.
        num_others = tensors.num_live - len({t.untyped_storage()._cdata for t in found})
        if num_others > 0:
            raise _in_use(num_others, what)
        copies: dict[object, torch.Tensor] = {}
        for tensor in found:
            key = _memory(tensor)
            if key not in copies:  # tied tensors stay tied
                copies[key] = torch.empty_like(tensor.detach()).copy_(tensor.detach())
        places = [_memory(tensor) for tensor in found]
        for tensor, key in zip(found, places, strict=True):
            tensor.data = copies[key]
        if num_others := tensors.num_live:
            copies.clear()
            views: dict[object, torch.Tensor] = {}
            for tensor, key in zip(found, places, strict=True):
                if key not in views:
                    address, shape, stride, dtype = key
                    offset = address - tensors.address
                    views[key] = tensors.tensor(shape, dtype, offset, stride, keep=keep)
                tensor.data = views[key]
            raise _in_use(num_others, what)
        self._tensors.clear()

    def _in_place(self) -> list[torch.Tensor]:
        """Those that live and are where they were put."""
        living = [(reference(), address) for reference, address in self._tensors]
        return [each for each, address in living if each is not None and each.data_ptr() == address]


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _in_use(count: int, what: str) -> InUseError:
    return InUseError(f"{count} {what} are still alive: drop them first")


def part_of(region: Region, stride: tuple[int, ...]) -> Entry:
    """What a layout needs to know of a region; the offset is not known yet."""
    tensor = region.tensor
    return Entry(region.names, 0, tuple(tensor.shape), stride, tensor.dtype)


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The devices of tensors that are not on meta."""
    return {tensor.device for tensor in tensors if not tensor.is_meta}
