"""The parameters of any module, once in the world: one packed span that every rank reads.

The span is striped, so owners alternate and all ranks can read a model in order without meeting at
one owner. Tensors follow each other in order of registration, which is the order of use in nearly
every module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from tpspan.errors import CollectiveMismatch
from tpspan.launch.votes import attempt, settle, together
from tpspan.launch.world import World
from tpspan.parallel.regions import Region, Slots, check_shareable, dense_stride, group
from tpspan.parallel.shared import Entry, SharedParameters, find_shared
from tpspan.spans.layout import Layout, pack
from tpspan.spans.span import Span

_MAX_STRIPE_NBYTES = 64 << 20
_STRIPES_PER_RANK = 20
"""A rank owns at most one stripe more than its part: with 20 that is 5 % of the part."""


def share_parameters(
    module: nn.Module,
    world: World,
    *,
    buffers: bool = False,
    read_only: bool = False,
    stripe_nbytes: int | None = None,
) -> SharedParameters:
    """Collective. Move all parameters of a module into one span, once in the world.

    The module may lie on the meta device or be real. Parameters get the values that rank 0 has; if
    rank 0's are on meta they stay undefined until ``load_weights``. A real Parameter stays the same
    object, a meta one is replaced wherever the module registers it. Tied weights stay tied, and
    strides stay as they are (those of rank 0). Afterwards the parameters lie on ``world.device``.

    On every rank the parameters are ordinary tensors over the same memory: what one rank writes,
    all ranks read, without any order but that of the barriers you put between.

    Args:
        module: the same structure on all ranks of ``world``.
        world: the ranks that share; all of them must call.
        buffers: share the buffers too; otherwise they stay as and where they are, and
            ``module.to(world.device)`` moves them.
        read_only: map the parameters read-only once they are filled, that is now if rank 0's are
            real and after ``load_weights`` otherwise. A write then fails where it is made.
        stripe_nbytes: pages of one owner in a row; chosen so that no rank holds more than 1.05 of
            its part, and at most 64 MiB, if not given.

    Returns:
        What is shared: the span, where each tensor lies, and ``close()``.

    Raises:
        CollectiveMismatch: names, shapes, types, ties or options differ between the ranks.
        TypeError: a parameter is a tensor subclass (DTensor among them), sparse, quantized or lazy.
        ValueError: parameters overlap without being tied, or are shared already.
        PeerError: another rank refused or failed. In all these cases every module is unchanged.
    """
    slots = Slots(module, buffers=buffers)
    regions = group(slots.named)
    options = f"buffers={buffers}, read_only={read_only}, stripe_nbytes={stripe_nbytes}"
    plan = _agree(world, regions, options)
    sizes = [part.nbytes for part in plan]
    offsets, nbytes = pack(sizes)
    page_nbytes = world.driver.page_nbytes
    stripe = _stripe_nbytes(nbytes, world.world_size, page_nbytes, stripe_nbytes)
    layout = Layout.striped(
        max(nbytes, page_nbytes),  # a module without any element still has a span
        world.world_size,
        stripe_nbytes=stripe,
        page_nbytes=page_nbytes,
    )
    with ExitStack() as undo:
        span = Span.allocate_bytes(world, layout)
        undo.callback(span.close, force=True)
        entries = [
            Entry(region.names, offset, part.shape, part.stride, part.dtype)
            for region, offset, part in zip(regions, offsets, plan, strict=True)
        ]
        _fill(world, span, regions, entries)
        undo.pop_all()
    shared = SharedParameters(span, entries, read_only=read_only)
    for region, entry in zip(regions, entries, strict=True):
        for tensor in region.tensors:
            _move(slots, shared, tensor, entry)
    if read_only and not any(part.is_meta for part in plan):
        shared.freeze()
    return shared


@dataclass(frozen=True)
class _Part:
    """One region as rank 0 sees it; the others compare with it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool

    @classmethod
    def of(cls, region: Region) -> _Part:
        tensor = region.tensor
        return cls(
            region.names, tuple(tensor.shape), dense_stride(tensor), tensor.dtype, tensor.is_meta
        )

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{' = '.join(self.names)} {self.shape} {self.dtype}"


def _agree(world: World, regions: list[Region], options: str) -> list[_Part]:
    """Collective. Refuse what cannot be shared or differs; return the plan of rank 0."""

    def inspect() -> list[_Part]:
        check_shareable(regions)
        _check_not_shared(regions)
        return [_Part.of(region) for region in regions]

    mine, caught, vote = attempt(world.rank, inspect)
    plan, theirs = world.control.broadcast((mine, options))
    difference = None
    if mine is not None and plan is not None:
        difference = _difference(plan, mine, theirs, options)
    answers = world.control.all_gather((vote, difference))
    settle("share_parameters", caught, [answer[0] for answer in answers])
    differing = {rank: answer[1] for rank, answer in enumerate(answers) if answer[1]}
    if differing:
        requests = {0: "what the others are compared with", **differing}
        raise CollectiveMismatch("share_parameters", requests)
    return list(plan)


def _difference(
    plan: Sequence[_Part], mine: Sequence[_Part], theirs: str, options: str
) -> str | None:
    """The first thing in which this rank's request differs from that of rank 0."""
    if options != theirs:
        return f"{options}, rank 0: {theirs}"
    for wanted, part in zip(plan, mine, strict=False):
        if (wanted.names, wanted.shape, wanted.dtype) != (part.names, part.shape, part.dtype):
            return f"{part}, rank 0: {wanted}"
    if len(plan) != len(mine):
        return f"{len(mine)} different tensors, rank 0: {len(plan)}"
    return None


def _check_not_shared(regions: list[Region]) -> None:
    for region in regions:
        for tensor in region.tensors:
            if find_shared(tensor) is not None:
                raise ValueError(f"{region.names[0]} is shared already; close that sharing first")


def _stripe_nbytes(nbytes: int, world_size: int, page_nbytes: int, asked: int | None) -> int:
    if asked is not None:
        return asked
    part = nbytes // (world_size * _STRIPES_PER_RANK)
    return max(page_nbytes, min(part, _MAX_STRIPE_NBYTES) // page_nbytes * page_nbytes)


def _fill(world: World, span: Span, regions: list[Region], entries: list[Entry]) -> None:
    """Collective. Let rank 0 write its values; returns on all ranks once they are there."""

    def write() -> None:
        if world.rank != 0:
            return
        with torch.no_grad():
            for region, entry in zip(regions, entries, strict=True):
                if not region.tensor.is_meta and entry.nbytes:
                    entry.view(span).copy_(region.tensor.detach())
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    together("share_parameters", world.rank, write, world.control.all_gather)


def _move(slots: Slots, shared: SharedParameters, tensor: torch.Tensor, entry: Entry) -> None:
    """Make one tensor object of the module stand for its place in the span."""
    view = entry.view(shared.span)
    if not tensor.is_meta:
        gradient = tensor.grad
        if gradient is not None and gradient.device != view.device:
            tensor.grad = None
            tensor.data = view
            tensor.grad = gradient.to(view.device)
        else:
            tensor.data = view
        shared.adopt(tensor, entry)
        return
    # A meta tensor cannot take real memory: torch refuses ``.data =`` between the two.
    # ``.data`` forgets what the view was made from, which would keep the span in use after close.
    is_parameter = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(view, tensor.requires_grad) if is_parameter else view.data
    new.__dict__.update(tensor.__dict__)
    slots.put(tensor, new)
    shared.adopt(new, entry)
