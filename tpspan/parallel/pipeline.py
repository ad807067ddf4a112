"""Stages for torch's pipeline schedules that hand activations over instead of sending them.

``SpanPipelineStage`` takes the place of ``torch.distributed.pipelining.PipelineStage``. The stage's
module writes its output into memory of the next stage's rank, and that stage reads it there; what a
schedule would send and receive it finds already done. Microbatches have a block each in a ring on
the reader's rank, from the moment they are written until their backward pass has used them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Self

import torch
import torch.distributed as torch_distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from tpspan.distributed.groups import resolve
from tpspan.errors import TpspanError
from tpspan.launch.world import World
from tpspan.parallel import torch_stages
from tpspan.parallel.pipeline_boundary import Boundary, Gathering, Together
from tpspan.parallel.pipeline_crossing import Counts
from tpspan.parallel.pipeline_order import Depths, ring_depths
from tpspan.parallel.pipeline_output import DirectOutput, as_tuple

# Letting an operation write elsewhere costs 0.1 ms, in which a core copies about so much.
_LEAST_DIRECT_NBYTES = 1 << 20


class SpanPipelineStage(PipelineStage):
    """A stage of a pipeline, for the schedules of ``torch.distributed.pipelining``.

    The channels are made in the schedule's first step, in the order of the stages, by the ranks on
    both sides of each boundary. Stages that share a rank, and ranks that cannot map each other's
    memory, go on as torch has it.

    Memory: for each boundary and direction one block for every microbatch that may be under way
    there, on the rank that reads; these blocks together take whole pages of 2 MiB. Without
    ``fit_rings`` that is every microbatch of a step, which is what torch's stage allocates; with
    it, only as many as the schedule needs.

    A received tensor is valid until the microbatch's backward pass is done, without one until the
    module returns: a module that keeps its input must copy it.

    Args:
        submodule, stage_index, num_stages, device, input_args, output_args, group: as for torch's
            stage; ``group`` may be a mesh of one dimension, too.
        direct: let the module's last operation write into the next stage's memory. Otherwise, and
            where that cannot be done, the output is copied there. None: where that is quicker,
            which is always on CUDA, and on the host for outputs from 1 MiB on.
        split_last: in the last backward pass of a step, which the stages before wait for, make the
            gradients of the inputs first, hand them over, and make those of the parameters then. A
            step is shorter by the latter, times the stages before; but splitting takes a few ms of
            host time, and for so long the memory of gradients between layers. The pass is split as
            zero bubble schedules split every one, so what does not work there, such as activation
            checkpoints, does not work with it; it is left whole where hooks of parameters have to
            be called, as with FSDP2 and DDP.
        timeout_s: the deadline of the host's waits for another stage; None for the world's, which
            those of streams have.
        world: the world of the group's ranks, in their order; None to find or make it.
        more: what else torch's stage takes, by keyword.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        *,
        group: Any = None,
        direct: bool | None = None,
        split_last: bool = False,
        timeout_s: float | None = None,
        world: World | None = None,
        **more: Any,
    ) -> None:
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        super().__init__(
            submodule, stage_index, num_stages, device, input_args, output_args, group=group, **more
        )
        self._direct = direct
        self._split_last = split_last
        self._direct_output: DirectOutput | None = None  # once a step is prepared
        self._timeout_s = timeout_s
        self._world = world
        self._depths: Sequence[Depths] | None = None
        self._before: Boundary | None = None
        self._after: Boundary | None = None
        self._together: Together | None = None
        self._gathering: Gathering | None = None
        # Which of the outputs and inputs have gradients; known once a step is prepared, too.
        self._output_gradients: tuple[bool, ...] = ()
        self._input_gradients: tuple[bool, ...] = ()
        self._nothing = torch.empty(0, device=device)
        self._microbatch = -1

    def set_depths(self, depths: Sequence[Depths]) -> None:
        """How many blocks the rings of all boundaries have; the same on all ranks. See fit_rings.

        Raises:
            ValueError: it is not one for each boundary, or the channels are made already.
        """
        if len(depths) != self.num_stages - 1:
            raise ValueError(f"{self.num_stages} stages have not {len(depths)} boundaries")
        if self._before is not None or self._after is not None:
            raise ValueError("the channels are made already: call it before the first step")
        self._depths = tuple(depths)

    def stats(self) -> Counts:
        """What this stage has handed over so far; gradients count as ``gradient_nbytes``."""
        counts = [each.counts() for each in (self._before, self._after) if each is not None]
        totals = {
            field.name: sum(getattr(each, field.name) for each in counts)
            for field in fields(Counts)
        }
        return Counts(**totals)

    def ring_nbytes(self) -> int:
        """Memory of this rank in the rings that this stage reads from."""
        boundaries = (each for each in (self._before, self._after) if each is not None)
        return sum(each.ring_nbytes() for each in boundaries)

    def close(self, *, force: bool = False) -> None:
        """Collective among the ranks of the pipeline; idempotent.

        It closes all stages that this rank has in the pipeline. What the last stage has returned
        stays valid. With ``force`` no other rank is waited for.

        Raises:
            InUseError: a tensor over a channel's memory is still alive.
            PeerError: a neighbour did not come before the deadline.
        """
        if self._together is not None:
            self._together.close(force=force)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(force=error is not None)

    # What the schedules call. They ask for operations of torch.distributed and get none.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[torch_distributed.P2POp]:
        """None if the stage before hands over."""
        return super().get_fwd_recv_ops(fwd_chunk_id) if self._before is None else []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[torch_distributed.P2POp]:
        """None if the output was handed over."""
        return super().get_fwd_send_ops(fwd_chunk_id) if self._after is None else []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[torch_distributed.P2POp]:
        """None if the stage behind hands gradients over."""
        return super().get_bwd_recv_ops(bwd_chunk_id) if self._after is None else []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[torch_distributed.P2POp]:
        """None if the gradients were handed over."""
        return super().get_bwd_send_ops(bwd_chunk_id) if self._before is None else []

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """One microbatch forward: take its input, run the module, hand its output over.

        Raises:
            PeerError: a neighbour did not come before the deadline.
        """
        self._microbatch = fwd_chunk_id
        together, before = self._together, self._before
        if together is not None and not together.is_open:
            if self._gathering is not None:
                self._gathering.done()
            together.open()
        if before is not None:
            tensors = self.receive(before, fwd_chunk_id)
            if torch_stages.wants_gradient(self):
                tensors = [each.requires_grad_(each.is_floating_point()) for each in tensors]
            torch_stages.put(self.args_recv_info[fwd_chunk_id], tensors)
            del tensors
        try:
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **options)
        except RuntimeError as error:
            if isinstance(error.__cause__, TpspanError):  # torch wraps what happens in a module
                raise error.__cause__ from error
            raise
        if before is not None:
            torch_stages.forget(self.args_recv_info[fwd_chunk_id], self._nothing)
            if not self.has_backward:
                before.receiver.release(fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; its outputs lie with the next stage at the end."""
        if self._after is None:
            output = self.run_module(*args, **kwargs)
            return self._kept(output)
        sender = self._after.sender
        left: Sequence[int]
        direct = self._direct_output
        if direct is None:
            output = self.run_module(*args, **kwargs)
            values = as_tuple(output)
            left = range(len(values))
        else:
            output, left = direct.call(lambda: self.run_module(*args, **kwargs), sender.place)
            values = as_tuple(output)
        self.hand_over(self._after, values, left)
        return output

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch's stage does."""
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def receive(self, boundary: Boundary, microbatch: int) -> list[torch.Tensor]:
        """Wait for what a neighbour hands over; on CUDA only the current stream waits."""
        return boundary.receiver.take(microbatch)

    def hand_over(self, boundary: Boundary, values: Sequence[Any], left: Sequence[int]) -> None:
        """Give a neighbour what lies there already, and copy the values in ``left``."""
        boundary.sender.send(values, left)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """One microbatch backward: take the gradients, compute, hand those of the inputs over.

        Raises:
            PeerError: a neighbour did not come before the deadline.
        """
        if not self.has_backward:
            return
        if full_backward and last_backward and self._may_split():
            self.backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
            self.backward_weight_one_chunk(bwd_chunk_id, last_backward)
            return
        if self._after is not None:
            taken = iter(self.receive(self._after, bwd_chunk_id))
            gradients = [next(taken) if has_one else None for has_one in self._output_gradients]
            torch_stages.put(self.grad_recv_info[bwd_chunk_id], gradients)
            del gradients, taken
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self._after is not None:
            torch_stages.forget(self.grad_recv_info[bwd_chunk_id], self._nothing)
        if full_backward:
            self._release(bwd_chunk_id)
        if self._before is not None:
            found = self.bwd_cache.pop(bwd_chunk_id)
            having = self._input_gradients
            values = [value for value, has_one in zip(found, having, strict=False) if has_one]
            self.hand_over(self._before, values, range(len(values)))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weights' part of a backward pass that was split."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if not self.has_backward:
            return
        if self._after is not None:
            # Only here torch may set a gradient to the very tensor that came in.
            for parameter in self.submod.parameters():
                gradient = parameter.grad
                if gradient is not None and self._after.receiver.covers(gradient, bwd_chunk_id):
                    parameter.grad = gradient.clone()
        self._release(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        super().clear_runtime_states()
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.drop_held()

    def _release(self, microbatch: int) -> None:
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.receiver.release(microbatch)

    def _kept(self, output: Any) -> Any:
        """An output that outlives the input, even if the module returned the input itself."""
        if self._before is None:
            return output
        receiver, microbatch = self._before.receiver, self._microbatch

        def keep(value: Any) -> Any:
            is_input = isinstance(value, torch.Tensor) and receiver.covers(value, microbatch)
            return value.clone() if is_input else value

        if isinstance(output, (tuple, list)):
            return type(output)(keep(each) for each in output)
        return keep(output)

    def forget(self) -> None:
        """Keep no tensor of a step; for ``close``."""
        super().clear_runtime_states()
        self.bwd_cache.clear()
        self.backward_state.clear()
        self.dw_runner.clear()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            torch_stages.forget(infos, self._nothing)

    # What a schedule's first step calls. Every rank opens channels in one order of boundaries.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        world = self._find_world()
        before = self._boundary(world, self._before, self.stage_index - 1)
        after = self._boundary(world, self._after, self.stage_index)
        num_prepared = num_microbatches if before is None else 1
        made = super()._prepare_forward_infra(num_prepared, *args, **kwargs)
        self._before, self._after = before, after
        if before is not None:
            torch_stages.repeat(self.args_recv_info, num_microbatches, self.device)
            depth = self._depths_at(before.number, num_microbatches).forward
            before.want(torch_stages.inputs_of(self), depth, backward=False)
        if after is not None:
            depth = self._depths_at(after.number, num_microbatches).forward
            outputs = torch_stages.outputs_of(self)
            after.want(outputs, depth, backward=False)
            self._choose_direct(sum(each.nbytes for each in outputs))
        self._join(world)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        num_prepared = num_microbatches if self._after is None else 1
        made = super()._prepare_backward_infra(num_prepared, *args, **kwargs)
        self.chunks = num_microbatches
        if self._after is not None:
            torch_stages.repeat(self.grad_recv_info, num_microbatches, self.device)
        of_inputs = torch_stages.input_gradients_of(self)
        of_outputs = torch_stages.output_gradients_of(self)
        self._input_gradients = tuple(each is not None for each in of_inputs)
        self._output_gradients = tuple(each is not None for each in of_outputs)
        for boundary, wanted in ((self._before, of_inputs), (self._after, of_outputs)):
            if boundary is not None:
                depth = self._depths_at(boundary.number, num_microbatches).backward
                tensors = [each for each in wanted if each is not None]
                boundary.want(tensors, depth, backward=True)
        self._join(self._world)
        return made

    def _join(self, world: World | None) -> None:
        if world is not None and (self._before is not None or self._after is not None):
            if self._together is None:
                self._gathering = world.resource("pipeline stages", Gathering)
                self._together = self._gathering.current()
            self._together.join(self, (self._before, self._after))

    def _may_split(self) -> bool:
        """Whether the gradients of the inputs, for which a rank waits, may be made first."""
        if not self._split_last or self._before is None or not any(self._input_gradients):
            return False
        return self.dw_builder is None and torch_stages.may_split(self.submod)

    def _choose_direct(self, nbytes: int) -> None:
        wanted = self._direct
        if wanted is None:
            wanted = torch.device(self.device).type == "cuda" or nbytes >= _LEAST_DIRECT_NBYTES
        if not wanted:
            self._direct_output = None
        elif self._direct_output is None:
            self._direct_output = DirectOutput(self.submod)

    def _get_init_p2p_neighbors_ops(self) -> list[torch_distributed.P2POp]:
        # gloo cannot send to the rank itself, which older releases ask for in V-shaped schedules
        me = torch_distributed.get_rank()
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.peer != me]

    def _find_world(self) -> World | None:
        if self._world is None:
            group = resolve(self.group or torch_distributed.group.WORLD)
            self._world = None if group is None else group.world(torch.device(self.device))
        return self._world

    def _boundary(self, world: World | None, made: Boundary | None, number: int) -> Boundary | None:
        """What is between stages ``number`` and the next; None if torch has to send."""
        if made is not None or not 0 <= number < self.num_stages - 1 or world is None:
            return made
        earlier, later = (self.stage_index_to_group_rank[number + each] for each in (0, 1))
        if earlier == later or not {earlier, later} <= set(world.domain):
            return None
        return Boundary(world, number, earlier, later, self._timeout_s)

    def _depths_at(self, number: int, num_microbatches: int) -> Depths:
        if self._depths is None:
            return Depths(num_microbatches, num_microbatches)
        return self._depths[number]


def fit_rings(schedule: Any) -> None:
    """Give the rings of a schedule's stages as many blocks as the schedule needs, and no more.

    To be called on every rank before the first step; a forward-only use of the same stages, such as
    ``schedule.eval``, then waits where it would run further ahead.

    Args:
        schedule: of torch.distributed.pipelining, over stages of which some are
            ``SpanPipelineStage``.

    Raises:
        ValueError: the schedule tells no order, or it has been in use already.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    num_stages = stages[0].num_stages
    depths = ring_depths(torch_stages.order_of(schedule, num_stages), num_stages)
    for stage in stages:
        if isinstance(stage, SpanPipelineStage):
            stage.set_depths(depths)
