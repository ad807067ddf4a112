"""Who carries a call out, and what its arguments must be; refusals are told to the other ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as _c10d

from tpspan.distributed.domains import DomainsGroup
from tpspan.distributed.groups import GatheringEngine, Group
from tpspan.distributed.in_place import Engine
from tpspan.distributed.requests import Operation, Reduction, check_reduction, reduction_of
from tpspan.errors import TpspanError

c10d: Any = _c10d  # torch's annotations do not export all of it


def tell(engine: GatheringEngine | None, operation: Operation) -> None:
    """Tell the other ranks; whatever they answer, this rank's own error says more."""
    if engine is not None:
        with contextlib.suppress(TpspanError):
            engine.run(functools.partial(engine.refuse, operation), [], False)


def gathering_engine_of(group: Group, *given: object) -> GatheringEngine | None:
    """What carries out calls on the first tensor's device, or else the group's."""
    for tensor in given:
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            return group.gathering_engine(tensor.device)
    return group.gathering_engine(group.default_device())


def engine_of(group: Group, *given: object) -> Engine | None:
    """The same for calls that spans serve inside a domain only."""
    found = gathering_engine_of(group, *given)
    return None if isinstance(found, DomainsGroup) else found


def serves(engine: GatheringEngine | None, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether spans serve these tensors.

    Raises:
        NotImplementedError: nobody does: some have no data.
        ValueError: they are on different devices, or not on the group's.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or (engine is not None and device != engine.world.device):
            raise _misplaced(engine, tensors)
        if tensor.layout is not torch.strided:
            return False
    return engine is not None


def _misplaced(
    engine: GatheringEngine | None, tensors: tuple[torch.Tensor, ...]
) -> NotImplementedError | ValueError:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if "meta" in devices:
        return NotImplementedError("tensors on the device meta have no data to be exchanged")
    if len(devices) > 1:
        return ValueError(f"the tensors are on different devices: {' and '.join(devices)}")
    assert engine is not None
    return ValueError(
        f"the calls of this group are on {engine.world.device}, not on {devices[0]}: call "
        "torch.cuda.set_device before the group's first call"
    )


def check_tensor(value: object, name: str) -> None:
    """Refuse what is no tensor, in torch's words."""
    if not isinstance(value, torch.Tensor):
        c10d._check_single_tensor(value, name)


def listed(tensors: object) -> Iterable[object]:
    """What is in a list, if it is one."""
    return tensors if isinstance(tensors, list | tuple) else ()


def reduction_named(op: object) -> Reduction | None:
    """The reduction that an operation of torch names; None if spans do not serve it."""
    found = reduction_of(op)
    if found is None and not isinstance(op, ReduceOp | ReduceOp.RedOpType):
        raise TypeError(f"op must be one of torch's ReduceOp, not {op!r}")
    return found


def check_reduction_of(operation: str, reduction: Reduction, dtype: torch.dtype) -> None:
    """``check_reduction``, looked up: the same few are asked for again and again."""
    objection = _objection(operation, reduction, dtype)
    if objection is not None:
        kind, text = objection
        raise kind(text)


@functools.cache
def _objection(
    operation: str, reduction: Reduction, dtype: torch.dtype
) -> tuple[Callable[[str], Exception], str] | None:
    try:
        check_reduction(operation, reduction, dtype)
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    return None
