"""The collective calls over one group: arguments checked, brought into shape, carried out.

Both the functions and the process group end here. Each call returns a work if it was asked for one,
None if not, and ``NotImplemented`` where spans do not serve: then the caller delegates. That
decision depends on what is the same on all ranks: the group, dtype, layout and operation.

If a rank refuses its arguments, it tells the others before it raises, so that they fail as well
instead of waiting (invariant 4): they see a mismatch that names it, it sees its own error.

Copies, of what does not lie side by side, are made when the call is carried out: with ``async_op``
the calls before it may not have written its inputs yet.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as _c10d

from tpspan.distributed.checks import (
    check_reduction_of,
    check_tensor,
    engine_of,
    gathering_engine_of,
    listed,
    reduction_named,
    serves,
    tell,
)
from tpspan.distributed.domains import DomainsGroup
from tpspan.distributed.groups import Group
from tpspan.distributed.in_place import InPlace, place_in_span
from tpspan.distributed.requests import Operation
from tpspan.distributed.tensors import (
    alike,
    apart,
    bring_back,
    check_memory,
    check_writable,
    is_plain,
    readable,
    writable,
)

c10d: Any = _c10d  # torch's annotations do not export all of it

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
    engine = gathering_engine_of(group, piece, output)
    try:
        check_tensor(piece, "input_tensor")
        check_tensor(output, "output_tensor")
        if not serves(engine, (output, piece)):
            return NotImplemented
        if output.dtype != piece.dtype:
            output, piece = alike(output, piece)
            if output.dtype != piece.dtype:
                raise TypeError(WRONG_DTYPE)
        if output.numel() != piece.numel() * group.size:
            raise ValueError(WRONG_SIZE)
        check_memory(piece)
        check_writable(output)
    except Exception:
        tell(engine, Operation.ALL_GATHER)
        raise
    assert engine is not None
    nbytes = piece.nbytes
    own_offset = group.rank * nbytes
    is_own_part = piece.data_ptr() == output.data_ptr() + own_offset and nbytes
    if is_own_part and not isinstance(engine, DomainsGroup) and is_plain(piece):
        found = place_in_span(engine, output) if is_plain(output) else None
        if found is not None:
            known = InPlace(engine, output, piece, *found)
            group.remember(output, known)
            return engine.run(known.call, [output], async_op)

    def call() -> None:
        source, target = readable(piece), writable(output)
        engine.all_gather(target, apart(source, target, own_offset))
        bring_back(output, target)

    return engine.run(call, [output], async_op, piece)


def all_gather(
    group: Group, outputs: Sequence[torch.Tensor], piece: torch.Tensor, async_op: bool
) -> Any:
    """Gather pieces, of any sizes, into a list of tensors of those sizes.

    Raises:
        ValueError: not one output for each rank, or of another size than the piece where it is own.
        TypeError: the dtypes differ.
    """
    engine = gathering_engine_of(group, piece, *listed(outputs))
    try:
        c10d._check_tensor_list(outputs, "tensor_list")
        check_tensor(piece, "tensor")
        c10d._ensure_all_tensors_same_dtype(outputs, piece)
        if not serves(engine, (*outputs, piece)):
            return NotImplemented
        if len(outputs) != group.size:
            raise ValueError(f"tensor_list must have {group.size} tensors, not {len(outputs)}")
        pairs = [alike(output, piece) for output in outputs]
        outputs, piece = [output for output, _ in pairs], pairs[group.rank][1]
        if any(output.dtype != piece.dtype for output in outputs):
            raise TypeError(WRONG_DTYPE)
        if outputs[group.rank].numel() != piece.numel():
            raise ValueError(
                f"tensor_list[{group.rank}] must have the {piece.numel()} elements of this rank's "
                f"tensor, not {outputs[group.rank].numel()}"
            )
        check_memory(piece)
        for output in outputs:
            check_writable(output)
    except Exception:
        tell(engine, Operation.ALL_GATHER_LIST)
        raise
    assert engine is not None

    def call() -> None:
        source, targets = readable(piece), [writable(output) for output in outputs]
        for rank, target in enumerate(targets):
            source = apart(source, target, 0 if rank == group.rank else None)
        engine.all_gather_list(targets, source)
        for output, target in zip(outputs, targets, strict=True):
            bring_back(output, target)

    return engine.run(call, list(outputs), async_op, piece)


def broadcast(group: Group, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
    """Give the root's tensor to every rank."""
    engine = engine_of(group, tensor)
    try:
        check_tensor(tensor, "tensor")
        if not serves(engine, (tensor,)):
            return NotImplemented
        if not 0 <= root < group.size:
            raise ValueError(f"there is no rank {root} in a group of {group.size}")
        check_writable(tensor)
    except Exception:
        tell(engine, Operation.BROADCAST)
        raise
    assert engine is not None

    def call() -> None:
        target = readable(tensor)
        engine.broadcast(target, root)
        bring_back(tensor, target)

    return engine.run(call, [tensor], async_op)


def all_reduce(group: Group, tensor: torch.Tensor, op: object, async_op: bool) -> Any:
    """Reduce in place, to the same bits on every rank.

    Raises:
        ValueError, TypeError: the operation has no meaning for this dtype, or is none.
    """
    engine = engine_of(group, tensor)
    try:
        check_tensor(tensor, "tensor")
        reduction = reduction_named(op)
        if reduction is None or not serves(engine, (tensor,)):
            return NotImplemented
        check_reduction_of("all_reduce", reduction, tensor.dtype)
        check_writable(tensor, may_share=True)
    except Exception:
        tell(engine, Operation.ALL_REDUCE)
        raise
    assert engine is not None

    def call() -> None:
        target = readable(tensor)
        engine.all_reduce(target, reduction)
        bring_back(tensor, target)

    return engine.run(call, [tensor], async_op)


def reduce_scatter_single(
    group: Group, output: torch.Tensor, whole: torch.Tensor, op: object, async_op: bool
) -> Any:
    """Reduce inputs of ``size`` parts and give each rank its part.

    Raises:
        ValueError: the input has not ``size`` times the elements of the output, or the operation
            has no meaning for this dtype.
        TypeError: the dtypes differ, or as above.
    """
    engine = engine_of(group, output, whole)
    try:
        check_tensor(output, "output")
        check_tensor(whole, "input")
        reduction = reduction_named(op)
        if reduction is None or not serves(engine, (output, whole)):
            return NotImplemented
        output, whole = alike(output, whole)
        if output.dtype != whole.dtype:
            raise TypeError("input tensor must be the same type as the output tensor")
        if whole.numel() != output.numel() * group.size:
            text = "input tensor must be the same size as output size times world size"
            raise ValueError(text)
        check_reduction_of("reduce_scatter", reduction, output.dtype)
        check_memory(whole)
        check_writable(output)
    except Exception:
        tell(engine, Operation.REDUCE_SCATTER)
        raise
    assert engine is not None
    own_offset = -group.rank * output.nbytes

    def call() -> None:
        source, target = readable(whole), writable(output)
        engine.reduce_scatter(target, apart(source, target, own_offset), reduction)
        bring_back(output, target)

    return engine.run(call, [output], async_op, whole)


def reduce_scatter(
    group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object, async_op: bool
) -> Any:
    """Reduce a list of inputs, of any sizes, the r-th of which is for rank r.

    Raises:
        ValueError, TypeError: as ``reduce_scatter_single``; or not one input for each rank.
    """
    engine = engine_of(group, output, *listed(inputs))
    try:
        check_tensor(output, "output")
        c10d._check_tensor_list(inputs, "input_list")
        c10d._ensure_all_tensors_same_dtype(output, inputs)
        reduction = reduction_named(op)
        if reduction is None or not serves(engine, (output, *inputs)):
            return NotImplemented
        if len(inputs) != group.size:
            raise ValueError(f"input_list must have {group.size} tensors, not {len(inputs)}")
        pairs = [alike(output, each) for each in inputs]
        output, inputs = pairs[0][0], [each for _, each in pairs]
        if inputs[group.rank].numel() != output.numel():
            raise ValueError(
                f"input_list[{group.rank}] must have the {output.numel()} elements of the output, "
                f"not {inputs[group.rank].numel()}"
            )
        check_reduction_of("reduce_scatter", reduction, output.dtype)
        for each in inputs:
            check_memory(each)
        check_writable(output)
    except Exception:
        tell(engine, Operation.REDUCE_SCATTER)
        raise
    assert engine is not None
    # Parts of one size, padded where the parts are uneven: their list is the same on all ranks.
    sizes = [each.numel() for each in inputs]
    longest = max(sizes)
    digest = 0 if len(set(sizes)) == 1 else zlib.crc32(repr(sizes).encode())

    def call() -> None:
        whole = output.new_empty((group.size, longest), requires_grad=False)
        for row, each in zip(whole, inputs, strict=True):
            row[: each.numel()].copy_(each.detach().reshape(-1))
            row[each.numel() :].zero_()
        is_whole = output.numel() == longest and is_plain(output)
        target = output if is_whole else output.new_empty(longest, requires_grad=False)
        engine.reduce_scatter(target, whole, reduction, digest)
        if target is not output:
            bring_back(output, target[: output.numel()])

    return engine.run(call, [output], async_op, *inputs)


def barrier(group: Group, async_op: bool) -> Any:
    """Hold the caller until every rank has come."""
    engine = group.engine(group.default_device())
    if engine is None:
        return NotImplemented
    return engine.run(engine.barrier, [], async_op)


def all_gather_object(group: Group, value: object) -> Any:
    """Every rank's object, by rank; anything that pickles.

    Raises:
        Exception: what pickling this rank's object raises.
    """
    engine = group.engine(group.default_device())
    if engine is None:
        return NotImplemented
    try:
        message = pickle.dumps(value)
    except Exception:
        tell(engine, Operation.ALL_GATHER_OBJECT)
        raise
    gathered: list[bytes] = []
    engine.run(lambda: gathered.extend(engine.all_gather_bytes(message)), [], False)
    return [pickle.loads(each) for each in gathered]


def refuse(group: Group, operation: Operation, *given: object) -> None:
    """Tell the other ranks that this one refuses a call; the caller then raises its own error.

    Args:
        given: the tensors of the call, as far as they are some.
    """
    find = gathering_engine_of if operation in _GATHERING else engine_of
    tell(find(group, *given), operation)


_GATHERING = (Operation.ALL_GATHER, Operation.ALL_GATHER_LIST)
