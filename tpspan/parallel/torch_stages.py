"""What differs between torch's releases in the inside of their pipeline stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from tpspan.parallel.pipeline_crossing import Wanted
from tpspan.parallel.pipeline_order import Action, one_forward_one_backward


def inputs_of(stage: Any) -> list[Wanted]:
    """What arrives at a stage; known once its forward pass is prepared."""
    meta = getattr(stage, "_stage_meta", None)
    return [_wanted(each) for each in (stage.inputs_meta if meta is None else meta.inputs)]


def outputs_of(stage: Any) -> list[Wanted]:
    """What leaves it."""
    meta = getattr(stage, "_stage_meta", None)
    return [_wanted(each) for each in (stage.get_outputs_meta() if meta is None else meta.outputs)]


def input_gradients_of(stage: Any) -> list[Wanted | None]:
    """What a stage sends back for each input, None for nothing; known once backward is prepared."""
    return _gradients(stage, inputs_of(stage), "input_grads")


def output_gradients_of(stage: Any) -> list[Wanted | None]:
    """What comes back to it for each output."""
    return _gradients(stage, outputs_of(stage), "output_grads")


def wants_gradient(stage: Any) -> bool:
    """Whether received activations are to be marked as requiring gradients; newer releases do."""
    marks = not hasattr(stage, "_stage_meta")
    return marks and bool(stage.has_backward) and torch.is_grad_enabled()


def may_split(module: nn.Module) -> bool:
    """Whether nobody waits to be told when a parameter of a module has its gradient."""
    if isinstance(module, DistributedDataParallel):
        return False
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return False
    return not any(
        each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None)
        for each in module.parameters()
    )


def order_of(schedule: Any, num_stages: int) -> dict[int, list[Action]]:
    """What each rank computes in which order; nothing else of the schedule.

    Raises:
        ValueError: the schedule does not tell.
    """
    if isinstance(schedule, Schedule1F1B):
        # What it tells itself has the last stage one microbatch late, from 1 to n instead of 0.
        return one_forward_one_backward(num_stages, schedule._n_microbatches)
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not order:
        raise ValueError(f"{type(schedule).__name__} does not tell the order of its work")
    found: dict[int, list[Action]] = {}
    for rank, actions in order.items():
        parts = [part for each in actions if each for part in each.sub_actions or (each,)]
        found[rank] = [
            Action(part.stage_index, part.computation_type.value, part.microbatch_index)
            for part in parts
            if part.computation_type.value in ("F", "B", "I", "W")
        ]
    return found


def repeat(infos: dict[int, tuple[Any, ...]], num_microbatches: int, device: Any) -> None:
    """Spread what was prepared for one microbatch to all of them, without memory to receive into.

    torch would allocate that for every microbatch and keep it.
    """
    first = infos[0]
    nothing = torch.empty(0, device=device)
    for microbatch in range(num_microbatches):
        infos[microbatch] = tuple(_without_memory(each, nothing) for each in first)


def put(infos: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> None:
    """Let a stage find these as what it has received."""
    for info, tensor in zip(infos, tensors, strict=True):
        if tensor is not None:
            info.buffer = tensor


def forget(infos: Sequence[Any], nothing: torch.Tensor) -> None:
    """Keep no tensor of what was received; ``nothing`` takes its place."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = nothing


def _gradients(stage: Any, values: list[Wanted], name: str) -> list[Wanted | None]:
    meta = getattr(stage, "_stage_meta", None)
    if meta is None:
        return [each if each.dtype.is_floating_point else None for each in values]
    found = getattr(meta, name)
    if found is None:  # the last stage has no gradients of outputs, the first none of inputs
        return [None] * len(values)
    return [None if each is None else _wanted(each) for each in found]


def _wanted(meta: Any) -> Wanted:
    return Wanted(torch.Size(meta.shape), meta.dtype)


def _without_memory(info: Any, nothing: torch.Tensor) -> Any:
    made = copy.copy(info)
    if getattr(made, "buffer", None) is not None:
        made.buffer = nothing
    return made
