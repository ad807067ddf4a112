"""The collective calls over one group: arguments checked, brought into shape, carried out.

Both the functions and the process group end here. Each call returns a work if it was asked for one,
None if not, and ``NotImplemented`` where spans do not serve: then the caller delegates. That
decision depends on what is the same on all ranks: the group, dtype, layout and operation.

If a rank refuses its arguments, it tells the others before it raises, so that they fail as well
instead of waiting (invariant 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpspan.distributed.domains import DomainsGroup
from tpspan.distributed.groups import GatheringEngine, Group
from tpspan.distributed.in_place import Engine, InPlace, place_in_span
from tpspan.distributed.requests import Reduction, check_reduction, reduction_of
from tpspan.distributed.tensors import alike, bring_back, readable, writable

WRONG_SIZE = "output tensor size must be equal to world_size times input tensor size"
WRONG_DTYPE = "output tensor must have the same type as input tensor"


def all_gather_single(
    group: Group, output: torch.Tensor, piece: torch.Tensor, async_op: bool
) -> Any:
    """Gather pieces of one size into one tensor.

    Raises:
        ValueError: the output has not ``size`` times the elements of the piece.
        TypeError: their dtypes differ.
    """
    known = group.in_place.get(id(output))
    if known is not None and known.is_for(output, piece):
        return known.engine.run(known.call, [output], async_op)
    engine = _gathering_engine(group, piece, output)
    if engine is None:
        return NotImplemented
    if output.dtype != piece.dtype:
        output, piece = alike(output, piece)
        if output.dtype != piece.dtype:
            raise _refused(engine, TypeError(WRONG_DTYPE))
    numel = piece.numel()
    if output.numel() != numel * group.size:
        raise _refused(engine, ValueError(WRONG_SIZE))
    if output.device != piece.device:
        raise _refused(engine, ValueError(_devices(output, piece)))
    source, target = readable(piece), writable(output)
    nbytes = numel * source.element_size()
    is_own_part = nbytes and source.data_ptr() == target.data_ptr() + group.rank * nbytes
    if is_own_part and not isinstance(engine, DomainsGroup):
        found = place_in_span(engine, target)
        if found is not None:
            known = InPlace(engine, output, piece, *found)
            group.remember(output, known)
            return engine.run(known.call, [output], async_op)

    def call() -> None:
        engine.all_gather(target, source)
        bring_back(output, target)

    return engine.run(call, [output], async_op, source, target)


def all_gather(
    group: Group, outputs: Sequence[torch.Tensor], piece: torch.Tensor, async_op: bool
) -> Any:
    """Gather pieces, of any sizes, into a list of tensors of those sizes.

    Raises:
        ValueError: not one output for each rank, or of another size than the piece where it is own.
        TypeError: the dtypes differ.
    """
    engine = _gathering_engine(group, piece, *outputs)
    if engine is None:
        return NotImplemented
    if len(outputs) != group.size:
        error = ValueError(f"tensor_list must have {group.size} tensors, not {len(outputs)}")
        raise _refused(engine, error)
    pairs = [alike(output, piece) for output in outputs]
    outputs, piece = [output for output, _ in pairs], pairs[group.rank][1]
    if any(output.dtype != piece.dtype for output in outputs):
        raise _refused(engine, TypeError(WRONG_DTYPE))
    if outputs[group.rank].numel() != piece.numel():
        error = ValueError(
            f"tensor_list[{group.rank}] must have the {piece.numel()} elements of this rank's "
            f"tensor, not {outputs[group.rank].numel()}"
        )
        raise _refused(engine, error)
    source, targets = readable(piece), [writable(output) for output in outputs]

    def call() -> None:
        engine.all_gather_list(targets, source)
        for output, target in zip(outputs, targets, strict=True):
            bring_back(output, target)

    return engine.run(call, list(outputs), async_op, source, *targets)


def broadcast(group: Group, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
    """Give the root's tensor to every rank."""
    engine = _engine(group, tensor)
    if engine is None:
        return NotImplemented
    if not 0 <= root < group.size:
        raise _refused(engine, ValueError(f"there is no rank {root} in a group of {group.size}"))
    target = readable(tensor)

    def call() -> None:
        engine.broadcast(target, root)
        bring_back(tensor, target)

    return engine.run(call, [tensor], async_op, target)


def all_reduce(group: Group, tensor: torch.Tensor, op: object, async_op: bool) -> Any:
    """Reduce in place, to the same bits on every rank.

    Raises:
        ValueError, TypeError: the operation has no meaning for this dtype.
    """
    reduction = reduction_of(op)
    engine = None if reduction is None else _engine(group, tensor)
    if engine is None or reduction is None:
        return NotImplemented
    _check_reduction(engine, "all_reduce", reduction, tensor.dtype)
    target = readable(tensor)

    def call() -> None:
        engine.all_reduce(target, reduction)
        bring_back(tensor, target)

    return engine.run(call, [tensor], async_op, target)


def reduce_scatter_single(
    group: Group, output: torch.Tensor, whole: torch.Tensor, op: object, async_op: bool
) -> Any:
    """Reduce inputs of ``size`` parts and give each rank its part.

    Raises:
        ValueError: the input has not ``size`` times the elements of the output, or the operation
            has no meaning for this dtype.
        TypeError: the dtypes differ, or as above.
    """
    reduction = reduction_of(op)
    engine = None if reduction is None else _engine(group, output, whole)
    if engine is None or reduction is None:
        return NotImplemented
    output, whole = alike(output, whole)
    if output.dtype != whole.dtype:
        error = TypeError("input tensor must be the same type as the output tensor")
        raise _refused(engine, error)
    if whole.numel() != output.numel() * group.size:
        text = "input tensor must be the same size as output size times world size"
        raise _refused(engine, ValueError(text))
    if output.device != whole.device:
        raise _refused(engine, ValueError(_devices(output, whole)))
    _check_reduction(engine, "reduce_scatter", reduction, output.dtype)
    source, target = readable(whole), writable(output)

    def call() -> None:
        engine.reduce_scatter(target, source, reduction)
        bring_back(output, target)

    return engine.run(call, [output], async_op, source, target)


def reduce_scatter(
    group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object, async_op: bool
) -> Any:
    """Reduce a list of inputs, of any sizes, the r-th of which is for rank r.

    Raises:
        ValueError, TypeError: as ``reduce_scatter_single``; or not one input for each rank.
    """
    reduction = reduction_of(op)
    engine = None if reduction is None else _engine(group, output, *inputs)
    if engine is None or reduction is None:
        return NotImplemented
    if len(inputs) != group.size:
        error = ValueError(f"input_list must have {group.size} tensors, not {len(inputs)}")
        raise _refused(engine, error)
    if inputs[group.rank].numel() != output.numel():
        error = ValueError(
            f"input_list[{group.rank}] must have the {output.numel()} elements of the output, "
            f"not {inputs[group.rank].numel()}"
        )
        raise _refused(engine, error)
    # Parts of one size, padded where the parts are uneven: their list is the same on all ranks.
    longest = max(each.numel() for each in inputs)
    whole = output.new_empty((group.size, longest), dtype=inputs[0].dtype)
    for row, each in zip(whole, inputs, strict=True):
        row[: each.numel()].copy_(each.detach().reshape(-1))
        row[each.numel() :].zero_()
    if all(each.numel() == longest for each in inputs):
        return reduce_scatter_single(group, output, whole, op, async_op)
    padded = output.new_empty(longest)

    def call() -> None:
        engine.reduce_scatter(padded, whole, reduction)
        bring_back(output, padded[: output.numel()])

    _check_reduction(engine, "reduce_scatter", reduction, output.dtype)
    return engine.run(call, [output], async_op, whole, padded)


def barrier(group: Group, async_op: bool) -> Any:
    """Hold the caller until every rank has come."""
    engine = group.engine(group.default_device())
    if engine is None:
        return NotImplemented
    return engine.run(engine.barrier, [], async_op)


def all_gather_object(group: Group, value: object) -> Any:
    """Every rank's object, by rank; anything that pickles."""
    engine = group.engine(group.default_device())
    if engine is None:
        return NotImplemented
    gathered: list[Any] = []
    engine.run(lambda: gathered.extend(engine.all_gather_object(value)), [], False)
    return gathered


def _engine(group: Group, *tensors: torch.Tensor) -> Engine | None:
    found = _gathering_engine(group, *tensors)
    return None if isinstance(found, DomainsGroup) else found


def _gathering_engine(group: Group, *tensors: torch.Tensor) -> GatheringEngine | None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return None
    device = tensors[0].device
    engine = group.gathering_engine(device)
    if engine is not None and engine.world.device != device:
        raise ValueError(
            f"the calls of this group are on {engine.world.device}, not on {device}: call "
            "torch.cuda.set_device before the group's first call"
        )
    return engine


def _check_reduction(
    engine: GatheringEngine, operation: str, reduction: Reduction, dtype: torch.dtype
) -> None:
    try:
        check_reduction(operation, reduction, dtype)
    except (ValueError, TypeError) as error:
        raise _refused(engine, error) from None


def _refused(engine: GatheringEngine, error: Exception) -> Exception:
    """Tell the other ranks, then let the caller raise its own error."""
    engine.run(engine.refuse, [], False)
    return error


def _devices(output: torch.Tensor, given: torch.Tensor) -> str:
    return f"the tensors are on different devices: {output.device} and {given.device}"
