"""What ``share_parameters`` returns, and how a tensor is found to be shared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from tpspan.errors import ClosedError
from tpspan.memory import Right
from tpspan.parallel.footprint import proportional_nbytes
from tpspan.spans.span import Span


@dataclass(frozen=True)
class Entry:
    """Where one tensor of a module lies in the span.

    Attributes:
        names: all its names in the module; more than one if it is tied.
        offset_bytes: of its first element in the span, a multiple of 256.
        shape, stride, dtype: of the tensor; strides in elements and without gaps.
    """

    names: tuple[str, ...]
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, span: Span) -> torch.Tensor:
        """The tensor in this rank's mapping of the span."""
        if not self.nbytes:
            # Nothing of it lies anywhere, and an offset at the span's very end would be outside.
            device = span.world.device
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return span.tensor(self.shape, self.dtype, self.offset_bytes, stride=self.stride)


class SharedParameters:
    """The parameters of a module that lie in one span; made by ``share_parameters``.

    It lives as long as one of the parameters does, also if nobody keeps it. As with everything in
    tpspan, only ``close`` or the end of the process gives the memory back.

    Attributes:
        span: the span.
        entries: where each tensor lies, by every one of its names.
        read_only: whether to map read-only once the parameters are filled.
    """

    def __init__(self, span: Span, entries: Iterable[Entry], *, read_only: bool) -> None:
        self.span = span
        self.read_only = read_only
        self._regions = tuple(entries)
        self.entries: Mapping[str, Entry] = MappingProxyType(
            {name: entry for entry in self._regions for name in entry.names}
        )
        self._tensors: list[tuple[TensorWeakRef, Entry]] = []
        self._frozen = False
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once: the size of the model."""
        return sum(entry.nbytes for entry in self._regions)

    @property
    def is_frozen(self) -> bool:
        """Whether this rank's mapping is read-only."""
        return self._frozen

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, without gradient.

        Raises:
            KeyError: there is no such name.
            ClosedError: after ``close``.
        """
        self._check_open()
        return self.entries[name].view(self.span)

    def freeze(self) -> None:
        """Map the span read-only on this rank: a write fails here and changes nothing.

        On the host a write ends the process with SIGSEGV; on CUDA it is an illegal memory access.
        """
        self._check_open()
        self.span.protect(Right.READ)
        self._frozen = True

    def thaw(self) -> None:
        """Map the span read-write on this rank again."""
        self._check_open()
        self.span.protect(Right.READ_WRITE)
        self._frozen = False

    def held_nbytes(self) -> int:
        """Bytes of physical memory that the parameters cost this rank.

        On CUDA those of the blocks it brings. On the host the proportional set size of the span: a
        page that n ranks have read counts one n-th on each, so the sum over the ranks is what is
        physically there.
        """
        self._check_open()
        world = self.span.world
        if world.device.type == "cuda":
            return self.span.stats().own_nbytes
        return proportional_nbytes(self.span.base_address, self.span.layout.span_nbytes)

    def adopt(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Remember that ``tensor`` stands for ``entry``."""
        self._tensors.append((TensorWeakRef(tensor), entry))
        _SHARED[tensor] = (self, entry)

    def close(self) -> None:
        """Collective. Give the span back; parameters that are still alive get copies of their own.

        Every parameter keeps its identity and its values, in private memory of ``world.device``, so
        that nothing dangles. To give back a model that would not fit on one rank, drop the module
        first: what is no longer alive is not copied. Idempotent.

        Raises:
            InUseError: other tensors over the span, such as a detached view, are still alive. The
                parameters are private already; drop those tensors and close again.
        """
        if self._closed:
            return
        self._make_private()
        self.span.close()
        self._closed = True

    def _make_private(self) -> None:
        """Give every parameter that is alive memory of its own."""
        copies: dict[Entry, torch.Tensor] = {}
        for reference, entry in self._tensors:
            tensor = reference()
            if tensor is None:
                continue
            if _SHARED.pop(tensor, None) is not None and _is_at(tensor, entry, self.span):
                if entry not in copies:
                    copies[entry] = _private_copy(tensor)
                tensor.data = copies[entry]
            del tensor
        self._tensors.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("these shared parameters were closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or self._closed:
            self.close()
            return
        self._make_private()
        self.span.__exit__(kind, error, trace)  # the other ranks may be elsewhere: it asks none
        self._closed = self.span.is_closed


def find_shared(tensor: torch.Tensor) -> tuple[SharedParameters, Entry] | None:
    """The sharing that a tensor belongs to, or None, also if its data was moved elsewhere since."""
    found: tuple[SharedParameters, Entry] | None = _SHARED.get(tensor)
    if found is None or found[0].span.is_closed:
        return None
    return found if _is_at(tensor, found[1], found[0].span) else None


# By identity, and weak: a module that is dropped takes its entry along.
_SHARED = WeakIdKeyDictionary()


def _is_at(tensor: torch.Tensor, entry: Entry, span: Span) -> bool:
    return not entry.nbytes or tensor.data_ptr() == span.base_address + entry.offset_bytes


def _private_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.detach()).copy_(tensor.detach())
