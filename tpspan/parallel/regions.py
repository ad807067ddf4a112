"""What a module holds: its tensors by the memory they stand for, and where they hang.

Two names are tied if they are one Parameter, or two Parameters over the very same elements; both
make one region. Pure bookkeeping: nothing here changes a module except ``Slots.put``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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


@dataclass
class _Group:
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def group(named: Iterable[tuple[str, torch.Tensor]]) -> list[Region]:
    """Collect tensors that stand for the same elements, in order of their first names."""
    groups: dict[object, _Group] = {}
    for name, tensor in named:
        found = groups.setdefault(_identity(tensor), _Group())
        found.names.append(name)
        if all(tensor is not known for known in found.tensors):
            found.tensors.append(tensor)
    return [Region(tuple(found.names), tuple(found.tensors)) for found in groups.values()]


class Slots:
    """Where each tensor hangs in a module, so that another can be put in its place everywhere."""

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self._slots: dict[int, list[tuple[nn.Module, str, bool]]] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        seen: set[tuple[int, str]] = set()
        for prefix, part in module.named_modules(remove_duplicate=False):
            for key, tensor, is_buffer in _registered(part, buffers):
                self.named.append((f"{prefix}.{key}" if prefix else key, tensor))
                if (id(part), key) not in seen:
                    seen.add((id(part), key))
                    self._slots.setdefault(id(tensor), []).append((part, key, is_buffer))

    def put(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Hang ``new`` wherever ``old`` hangs."""
        for part, key, is_buffer in self._slots[id(old)]:
            if is_buffer:
                part._buffers[key] = new
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


def _registered(part: nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for key, parameter in part._parameters.items():
        if parameter is not None:
            yield key, parameter, False
    if buffers:
        for key, buffer in part._buffers.items():
            if buffer is not None:
                yield key, buffer, True


def _identity(tensor: torch.Tensor) -> object:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.numel() == 0:
        return id(tensor)
    space, begin, _ = _extent(tensor)
    return space, begin, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _extent(tensor: torch.Tensor) -> tuple[object, int, int]:
    """The address space of a tensor, and the bytes there from its first to behind its last."""
    size = tensor.element_size()
    if tensor.device.type == "meta":
        # Tensors on meta have no address; those over one storage still share it.
        space: object = tensor.untyped_storage()._cdata
        begin = int(tensor.storage_offset()) * size
    else:
        space, begin = tensor.device, tensor.data_ptr()
    return space, begin, begin + (_reach(tensor) + 1) * size


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise TypeError(f"{name} has no shape yet: run the lazy module once before sharing it")
    if kind not in (torch.Tensor, nn.Parameter):
        raise TypeError(
            f"{name} is a {kind.__name__}: only plain parameters and tensors can be shared"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}): only dense tensors can be shared")
    if tensor.is_quantized:
        raise TypeError(f"{name} is a quantized tensor ({tensor.dtype}), which cannot be shared")
    if not tensor.is_leaf:
        raise ValueError(f"{name} is computed from other tensors, so it cannot be moved on its own")
    if _overlaps_itself(tensor):
        raise ValueError(f"{name} is expanded: several of its elements are one in memory")


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
    spaces: dict[object, list[tuple[int, int, Region]]] = {}
    for region in regions:
        if region.nbytes:
            space, begin, end = _extent(region.tensor)
            spaces.setdefault(space, []).append((begin, end, region))
    for pieces in spaces.values():
        pieces.sort(key=lambda piece: piece[:2])
        for index, (begin, end, region) in enumerate(pieces):
            for other_begin, _, other in pieces[index + 1 :]:
                if other_begin >= end:
                    break
                if _meet(region.tensor, other.tensor, other_begin - begin):
                    raise ValueError(
                        f"{region.names[0]} and {other.names[0]} overlap in memory but are not "
                        "the same elements, so they cannot be moved apart"
                    )


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
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
