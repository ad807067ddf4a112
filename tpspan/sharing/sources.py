"""What can be published, as a layout's parts and the values to begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpspan.parallel.regions import Region, Slots, check_shareable, dense_stride, group
from tpspan.parallel.shared import SharedParameters, find_shared
from tpspan.sharing.adopted import devices_of, part_of
from tpspan.sharing.layout import Entry
from tpspan.sharing.tree import flatten
from tpspan.spans.span import Span


@dataclass(frozen=True)
class Source:
    """Tensors to publish.

    Attributes:
        parts: names, shapes and types, in the order in which they are packed.
        tensors: the values, one for each part; on meta if there are none yet.
        optional: names that a state dict would not hold.
        skeleton: what a tree holds besides tensors; empty for a module.
        slots, regions: of a module, whose tensors are moved into the publication.
    """

    parts: tuple[Entry, ...]
    tensors: tuple[torch.Tensor, ...]
    optional: frozenset[str]
    skeleton: bytes
    slots: Slots | None
    regions: tuple[Region, ...]

    @property
    def device(self) -> torch.device:
        """Where the tensors lie: on the GPU, if some are there and others on the CPU.

        Raises:
            ValueError: they lie on several GPUs.
        """
        found = devices_of(self.tensors)
        gpus = {device for device in found if device.type != "cpu"}
        if len(gpus) > 1:
            raise ValueError(
                f"the tensors lie on {', '.join(sorted(map(str, gpus)))}: give the device= that "
                "shall hold the published ones"
            )
        return gpus.pop() if gpus else torch.device("cpu")

    @property
    def has_values(self) -> bool:
        """Whether there is something to publish now."""
        return not any(tensor.is_meta for tensor in self.tensors)


def source_of(published: object) -> Source:
    """Take apart a module or a tree of tensors.

    Raises:
        TypeError: it is neither, or holds something that cannot be published.
        ValueError: tensors overlap without being tied.
    """
    if isinstance(published, nn.Module):
        slots = Slots(published, buffers=True)
        regions = tuple(group(slots.named))
        check_shareable(list(regions))
        return Source(
            tuple(part_of(region, dense_stride(region.tensor)) for region in regions),
            tuple(region.tensor for region in regions),
            slots.optional,
            b"",
            slots,
            regions,
        )
    if not isinstance(published, Mapping):
        raise TypeError(
            f"cannot publish a {type(published).__name__}: give a module, a dict of tensors, a "
            "span, or what share_parameters returned"
        )
    tensors, skeleton = flatten(published)
    regions = tuple(group((name, tensor.detach()) for name, tensor in tensors.items()))
    check_shareable(list(regions))
    return Source(
        tuple(part_of(region, dense_stride(region.tensor)) for region in regions),
        tuple(region.tensor for region in regions),
        frozenset(),
        skeleton,
        None,
        regions,
    )


def span_of(published: object) -> tuple[Span, tuple[Entry, ...]] | None:
    """The span in which all that is published lies already, and what lies where; or None."""
    if isinstance(published, Span):
        shape = published.shape
        stride = torch.empty(shape, device="meta").stride()
        return published, (Entry(("gathered",), 0, shape, stride, published.dtype),)
    if isinstance(published, SharedParameters):
        shared = dict.fromkeys(published.entries.values())
        return published.span, tuple(
            Entry(each.names, each.offset_bytes, each.shape, each.stride, each.dtype)
            for each in shared
        )
    if isinstance(published, nn.Module):
        found: Any = [find_shared(parameter) for parameter in published.parameters()]
        owners = {id(each[0]) for each in found if each is not None}
        if found and None not in found and len(owners) == 1:
            return span_of(found[0][0])
    return None
