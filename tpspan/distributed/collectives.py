"""torch.distributed's collective functions, over spans where the ranks can map each other's memory.

Names, signatures, semantics and errors are torch's. ``group`` may also be a ``World`` of tpspan;
None is the default world, or else torch's default group. What spans do not serve goes to torch's
own function, and ``stats()`` counts it.

A call without ``async_op`` returns when its outputs are complete: on the host when the call
returns, on CUDA in the order of the current stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ReduceOp

from tpspan.distributed import calls, counts
from tpspan.distributed.groups import Group, group_rank, resolve
from tpspan.distributed.renamed import torch_function
from tpspan.distributed.requests import Operation
from tpspan.errors import LaunchError


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather tensors of one size into one, concatenated or stacked along dim 0. Collective.

    If the output is a view of a span and the input is this rank's part of that view, nothing is
    copied: the call is a barrier. The output then is the other ranks' own memory: before a rank
    writes its part again, all of them have to say that they have read it, by a barrier. Either all
    ranks gather in place, into the same view of the same span, or none: this is compared as sizes
    and dtypes are, since those that copy would otherwise wait for bytes that nobody sends.

    Returns:
        A work if ``async_op``, else None.

    Raises:
        ValueError: the output has not the size of all inputs.
        TypeError: the dtypes differ.
        NotImplementedError: a tensor has no data, being on the device meta.
        CollectiveMismatch: the ranks asked for different things, or another rank's arguments were
            wrong; nothing was done.
        PeerError: ranks did not come before the deadline, or ended.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(all_gather_into_tensor, output_tensor, input_tensor, group, async_op)
    name, ours = "all_gather_into_tensor", calls.all_gather_single
    return _call(name, group, ours, output_tensor, input_tensor, async_op=async_op)


all_gather_single = all_gather_into_tensor


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather tensors, of any sizes, into a list of tensors of those sizes. Collective.

    Returns and raises as ``all_gather_into_tensor``.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(all_gather, tensor_list, tensor, group, async_op)
    return _call("all_gather", group, calls.all_gather, tensor_list, tensor, async_op=async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Gather objects that pickle into a list. Collective.

    Raises:
        Exception: what pickling this rank's object raised; the others get CollectiveMismatch.
        CollectiveMismatch, PeerError: as ``all_gather_into_tensor``.
        LaunchError: there is no group.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(all_gather_object, object_list, obj, group)
    found = resolve(group)
    if found is None:
        return _not_in_group("all_gather_object")
    gathered = calls.all_gather_object(found, obj)
    if gathered is NotImplemented:
        _delegate("all_gather_object", found)(object_list, obj)
        return None
    for rank, value in enumerate(gathered):
        object_list[rank] = value
    return None


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce the ranks' inputs; give each rank its part of the result. Collective.

    Sums of bf16, fp16 and fp8 are accumulated in fp32 and rounded once.

    Returns and raises as ``all_gather_into_tensor``.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(reduce_scatter_tensor, output, input, op, group, async_op)
    name, ours = "reduce_scatter_tensor", calls.reduce_scatter_single
    return _call(name, group, ours, output, input, op, async_op=async_op)


reduce_scatter_single = reduce_scatter_tensor


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce a list of inputs, of any sizes, the r-th of which is for rank r. Collective.

    Returns and raises as ``reduce_scatter_tensor``.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(reduce_scatter, output, input_list, op, group, async_op)
    name, ours = "reduce_scatter", calls.reduce_scatter
    return _call(name, group, ours, output, input_list, op, async_op=async_op)


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce in place; every rank gets the same bits. Collective.

    Sums of bf16, fp16 and fp8 are accumulated in fp32 and rounded once.

    Returns and raises as ``all_gather_into_tensor``.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(all_reduce, tensor, op, group, async_op)
    return _call("all_reduce", group, calls.all_reduce, tensor, op, async_op=async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Give one rank's tensor to all. Collective.

    Args:
        src: the rank in torch's default group, as torch has it; in a ``World`` its rank there.
        group_src: the rank in the group, instead of ``src``.

    Returns and raises as ``all_gather_into_tensor``; ValueError if there is no such rank.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(broadcast, tensor, src, group, async_op, group_src)
    found = resolve(group)
    if found is None:
        return _not_in_group("broadcast")
    try:
        root = group_rank(group, src, group_src)
    except Exception:
        calls.refuse(found, Operation.BROADCAST, tensor)
        raise
    work = calls.broadcast(found, tensor, root, async_op)
    if work is NotImplemented:
        return _delegate("broadcast", found)(tensor, async_op=async_op, group_src=root)
    return work


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Wait until every rank of the group has come. Collective.

    Args:
        device_ids, timeout: accepted as torch does; the group's own device and deadline count.

    Raises:
        CollectiveMismatch, PeerError: as ``all_gather_into_tensor``.
        LaunchError: there is no group.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(barrier, group, async_op, device_ids, timeout)
    found = resolve(group)
    if found is None:
        return _not_in_group("barrier")
    work = calls.barrier(found, async_op)
    if work is NotImplemented:
        return _delegate("barrier", found)(async_op=async_op, device_ids=device_ids)
    return work


def _call(operation: str, group: Any, ours: Callable[..., Any], *given: Any, async_op: bool) -> Any:
    """The call over spans, or torch's own of this name where spans do not serve."""
    found = resolve(group)
    if found is None:
        return _not_in_group(operation, stacklevel=4)
    work = ours(found, *given, async_op)
    if work is NotImplemented:
        return _delegate(operation, found)(*given, async_op=async_op)
    return work


def _run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


# torch.compile breaks its graph here and traces nothing of what is called. torch.compiler.disable
# would do the same, but import the compiler, which takes a second, into programs without one.
_outside_graph: Callable[..., Any] = _disable_dynamo(_run)


def _not_in_group(operation: str, stacklevel: int = 3) -> None:
    what = f"Running {operation} on a rank which does not belong to the given group."
    warnings.warn(what, stacklevel=stacklevel)


def _delegate(operation: str, group: Group) -> Callable[..., Any]:
    """torch's own function over torch's own group; counted."""
    target = group.delegate
    if target is None:
        raise LaunchError(
            f"{operation}: spans do not serve these tensors or ranks, and there is no process "
            "group of torch that could: call torch.distributed.init_process_group, or "
            "tpspan.init(torch_distributed=True), and give its group"
        )
    # A group of spans counts what it hands on itself; objects travel over its own gathers.
    if operation == "all_gather_object" or getattr(target, "span_group", None) is None:
        counts.count_delegated(operation)
    function = torch_function(operation)

    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, group=target, **options)

    return call
