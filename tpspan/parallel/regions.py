"""What a module holds: its tensors by the memory they stand for, and where they hang.

Two names are tied if they are one Parameter, or two Parameters over the very same elements; both
make one region. Pure bookkeeping: nothing here changes a module except ``Slots.put``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Region:
    """One piece of memory of a module.

    Attributes:
        names: every name it goes by, in order of registration.
        tensors: the distinct tensors over it, mostly one.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """The first of the tensors; all have the same elements."""
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.numel() * self.tensor.element_size()


def group(named: Iterable[tuple[str, torch.Tensor]]) -> list[Region]:
    """Collect tensors that stand for the same elements, in order of their first names."""
    groups: dict[object, tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in named:
        key = _identity(tensor)
        found = groups.get(key)
        if found is None:
            groups[key] = [name], [tensor]
            continue
        found[0].append(name)
        if all(tensor is not known for known in found[1]):
            found[1].append(tensor)
    return [Region(tuple(names), tuple(tensors)) for names, tensors in groups.values()]


class Slots:
    """Where each tensor hangs in a module, so that another can be put in its place everywhere.

    Attributes:
        named: every tensor with every one of its names, in order of registration.
        optional: names of buffers that a state dict does not hold.
    """

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self._slots: dict[int, list[tuple[nn.Module, str, bool]]] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        optional: list[str] = []
        seen: set[int] = set()
        waiting = [("", module)]
        while waiting:  # in the order of named_modules, in half the time
            prefix, part = waiting.pop()
            is_new = id(part) not in seen
            seen.add(id(part))
            for kind in (part._parameters, part._buffers) if buffers else (part._parameters,):
                for key, tensor in kind.items():
                    if tensor is None:
                        continue
                    self.named.append((prefix + key, tensor))
                    if is_new:
                        slot = part, key, kind is part._buffers
                        self._slots.setdefault(id(tensor), []).append(slot)
            if part._non_persistent_buffers_set:
                optional.extend(prefix + key for key in part._non_persistent_buffers_set)
            for name, child in reversed(part._modules.items()):
                if child is not None:
                    waiting.append((f"{prefix}{name}.", child))
        self.optional = frozenset(optional)

    def put(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Hang ``new`` wherever ``old`` hangs."""
        for part, key, is_buffer in self._slots[id(old)]:
            if is_buffer:
                part._buffers[key] = new
            elif type(part).__setattr__ is nn.Module.__setattr__ and key in part._parameters:
                part._parameters[key] = new  # type: ignore[assignment]
            else:
                # An RNN keeps a second list of its parameters; only setattr brings it up to date.
                setattr(part, key, new)


def check_shareable(regions: list[Region]) -> None:
    """Refuse what cannot be moved into a span with its meaning kept.

    Raises:
        TypeError: a tensor is of a kind that has no plain memory.
        ValueError: tensors overlap without being tied, or hang on a graph.
    """
    for region in regions:
        for tensor in region.tensors:
            _check_kind(region.names[0], tensor)
    _check_overlaps(regions)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of the tensor without gaps: its own if it has none, else in the same order."""
    return torch.empty_like(tensor.detach(), device="meta").stride()


def _identity(tensor: torch.Tensor) -> object:
    kind = type(tensor)
    plain = kind is nn.Parameter or kind is torch.Tensor
    if not plain or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    space, begin = _place(tensor)
    return space, begin, tensor.shape, tensor.stride(), tensor.dtype


def _place(tensor: torch.Tensor) -> tuple[object, int]:
    """The address space of a tensor, and the byte there at which it begins."""
    if tensor.is_meta:
        # Tensors on meta have no address; those over one storage still share it.
        space = tensor.untyped_storage()._cdata
        return space, int(tensor.storage_offset()) * tensor.element_size()
    return tensor.device, tensor.data_ptr()


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    plain = kind is nn.Parameter or kind is torch.Tensor
    if plain and tensor.layout is torch.strided and tensor.is_leaf and not tensor.is_quantized:
        if not tensor.is_contiguous() and _overlaps_itself(tensor):
            raise ValueError(f"{name} is expanded: several of its elements are one in memory")
        return
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise TypeError(f"{name} has no shape yet: run the lazy module once before sharing it")
    if not plain:
        raise TypeError(
            f"{name} is a {kind.__name__}: only plain parameters and tensors can be shared"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}): only dense tensors can be shared")
    if tensor.is_quantized:
        raise TypeError(f"{name} is a quantized tensor ({tensor.dtype}), which cannot be shared")
    raise ValueError(f"{name} is computed from other tensors, so it cannot be moved on its own")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _check_overlaps(regions: list[Region]) -> None:
    spaces: dict[object, list[tuple[int, Region]]] = {}
    for region in regions:
        if region.tensor.numel():
            space, begin = _place(region.tensor)
            spaces.setdefault(space, []).append((begin, region))
    for pieces in spaces.values():
        pieces.sort(key=lambda piece: piece[0])
        for index, (begin, region) in enumerate(pieces[:-1]):
            end = begin + (_reach(region.tensor) + 1) * region.tensor.element_size()
            at = index + 1
            while at < len(pieces) and pieces[at][0] < end:
                other_begin, other = pieces[at]
                if _meet(region.tensor, other.tensor, other_begin - begin):
                    raise ValueError(
                        f"{region.names[0]} and {other.names[0]} overlap in memory but are not "
                        "the same elements, so they cannot be moved apart"
                    )
                at += 1


def _meet(first: torch.Tensor, second: torch.Tensor, distance_nbytes: int) -> bool:
    """Whether two tensors whose ranges overlap have an element in common; columns may not."""
    size = first.element_size()
    if second.element_size() != size or distance_nbytes % size:
        return True
    distance = distance_nbytes // size
    reach = max(_reach(first), distance + _reach(second))
    used = torch.zeros(reach + 1, dtype=torch.bool)
    used.as_strided(first.shape, first.stride()).fill_(True)
    return bool(used.as_strided(second.shape, second.stride(), distance).any())


def _reach(tensor: torch.Tensor) -> int:
    """Elements of memory from the first of a tensor to the last."""
    if tensor.is_contiguous():
        return max(tensor.numel() - 1, 0)
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
