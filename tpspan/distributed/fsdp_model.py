"""``use_spans``: every FSDP2 module of a model gathers and reduces over span memory.

torch has no public way from a module to the group that it gathers in: FSDP2's own state is asked,
and where releases of torch differ, which attributes there are.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule

from tpspan.distributed.fsdp import SpanAllGather, SpanReduceScatter
from tpspan.distributed.fsdp_memory import FsdpMemory
from tpspan.launch.world import World
from tpspan.spans.reads import Read, check_read

# What handles have put into modules and take out when they close, with the handle's own words.
_put_by: weakref.WeakKeyDictionary[SpanAllGather, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class FsdpStats:
    """What the modules of one model do over spans.

    Attributes:
        num_modules: FSDP2 modules that use spans.
        left: of those that do not, the name in the model and the reason.
        num_gathers, num_reduces: calls over spans so far.
        num_guards: meetings made only to write a buffer again. This and what follows is of all
            models of the same ranks, for they share their buffers.
        num_buffers: spans that are kept.
        held_nbytes, most_nbytes: physical memory of this rank in them, now and at most.
    """

    num_modules: int
    left: tuple[tuple[str, str], ...]
    num_gathers: int
    num_reduces: int
    num_guards: int
    num_buffers: int
    held_nbytes: int
    most_nbytes: int


class SpansInUse:
    """What ``use_spans`` returns: statistics, and the way back. A context manager."""

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._name = type(model).__name__
        self._read = read
        self._changed: list[tuple[FSDPModule, Any, Any]] = []
        self._made: list[tuple[SpanAllGather, SpanReduceScatter]] = []
        self._left: list[tuple[str, str]] = []
        self._memories: dict[int, FsdpMemory] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._is_closed = False

    def stats(self) -> FsdpStats:
        """What has been done so far, and with how much memory."""
        memories = list(self._memories.values())
        pools = [pool for memory in memories for pool in (memory.gathers, memory.reduces)]
        return FsdpStats(
            num_modules=len(self._changed),
            left=tuple(self._left),
            num_gathers=sum(gather.num_served for gather, _ in self._made),
            num_reduces=sum(reduce.num_served for _, reduce in self._made),
            num_guards=sum(pool.num_guards for pool in pools),
            num_buffers=sum(len(pool.buffers) for pool in pools),
            held_nbytes=sum(pool.held_nbytes for pool in pools),
            most_nbytes=sum(pool.most_nbytes for pool in pools),
        )

    def close(self) -> None:
        """Give torch's own communication back to the modules and free the spans. Collective.

        Once is enough. Memory that other models of the same ranks use stays.

        Raises:
            InUseError: FSDP2 holds gathered parameters that it has not copied out yet; nothing was
                done on this rank.
        """
        if self._is_closed:
            return
        last = [m for m in self._memories.values() if m.num_users == 1 and not m.world.is_closed]
        for memory in last:
            memory.refuse_if_in_use()
        self._restore()
        for memory in last:
            memory.close_buffers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return f"<SpansInUse by a {self._name}>"

    def _restore(self) -> None:
        """Give torch's own communication back, and the claims to memory up."""
        for module, all_gather, reduce_scatter in self._changed:
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        self._changed.clear()
        self._groups.clear()
        self._is_closed = True
        for memory in self._memories.values():
            memory.num_users -= 1

    def _add(self, name: str, module: FSDPModule, world: World | None) -> None:
        groups = _parameter_groups(module)
        if not groups:
            return
        if reason := _why_not(groups):
            self._left.append((name, reason))
            return
        (group,) = groups
        shards = group.mesh_info.shard_process_group
        used = [world or self._first_with_ranks_of(shards)]
        # Backward gathers among fewer ranks if the module was told to reshard to so many.
        if group._use_post_forward_mesh:
            fewer = group.post_forward_mesh_info.shard_process_group
            used.append(self._first_with_ranks_of(fewer))
        memories = [FsdpMemory.among(each, group.device, self._read) for each in used]
        found = [memory for memory in memories if memory is not None]
        if len(found) < len(memories):
            reason = "its ranks cannot map each other's memory: they are not in one domain"
            self._left.append((name, reason))
            return
        for memory in found:
            if id(memory) not in self._memories:
                self._memories[id(memory)] = memory
                memory.num_users += 1

        def current() -> Any:
            return used[0 if group._all_gather_process_group is shards else -1]

        self._changed.append((module, group._all_gather_comm, group._reduce_scatter_comm))
        gather = SpanAllGather(used[0], read=self._read, group_of=current)
        reduce = SpanReduceScatter(used[0], read=self._read)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        self._made.append((gather, reduce))
        _put_by[gather] = repr(self)

    def _first_with_ranks_of(self, group: ProcessGroup) -> ProcessGroup:
        """The first group of the same ranks: each resharded module has one of its own."""
        return self._groups.setdefault(tuple(get_process_group_ranks(group)), group)


def use_spans(model: nn.Module, world: World | None = None, *, read: Read = "auto") -> SpansInUse:
    """Let every FSDP2 module of a model gather and reduce over span memory. Collective.

    Call it after ``fully_shard``, outside a step. Gathered parameters are the same bits as before;
    gradients are added in the order of the ranks, in fp32 at least. With a mesh of two dimensions
    (HSDP) the group of the shards is served, and replicas are reduced by torch as before. Modules
    that spans cannot serve keep torch's communication, and ``stats().left`` says which and why.

    Args:
        model: with ``fully_shard`` applied to it or to modules in it.
        world: the ranks over which it is sharded; by default a world of the mesh's own group.
        read: ``"in_place"``: a gathered tensor is the ranks' own memory, so that a rank holds only
            its part, and FSDP2 copies out across the link. ``"staged"``: it is brought into this
            rank's memory beside the computation, as by NCCL and with as much memory. ``"auto"``:
            staged where every rank has a GPU of its own, in place where there is no link.

    Returns:
        A handle with ``stats`` and ``close``; the model does not need it.

    Raises:
        ValueError: there is no FSDP2 module in the model, its shards are those of other ranks
            than the world's, or one uses spans by an earlier call already; or ``read`` is none of
            the three.
        PeerError: other ranks did not come; the model is as it was on this rank.
    """
    modules = [(name, each) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise ValueError(
            f"no module of this {type(model).__name__} is sharded: call "
            "torch.distributed.fsdp.fully_shard on it first"
        )
    if world is not None:
        for name, module in modules:
            _check_world(name, module, world)
    for name, module in modules:
        for group in _parameter_groups(module):
            now = group._all_gather_comm
            if isinstance(now, SpanAllGather) and now in _put_by:
                raise ValueError(
                    f"module {name!r} uses spans already, by {_put_by[now]} of an earlier "
                    "use_spans: close that one, then call again"
                )
    used = SpansInUse(model, check_read(read))
    try:
        for name, module in modules:
            used._add(name, module, world)
    except BaseException:
        used._restore()
        raise
    return used


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of the parameters that it gathers together; most modules have one."""
    state: Any = module._get_fsdp_state()  # type: ignore[no-untyped-call]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _why_not(groups: list[Any]) -> str:
    if len(groups) > 1:
        return "it has several groups of parameters, for which torch takes no other communication"
    shards = getattr(groups[0].mesh_info, "shard_process_group", None)
    if shards is None:
        return "its parameters are replicated, not sharded"
    return "its shards are on one rank: there is nothing to gather" if shards.size() == 1 else ""


def _check_world(name: str, module: FSDPModule, world: World) -> None:
    for group in _parameter_groups(module):
        shards = getattr(group.mesh_info, "shard_process_group", None)
        if shards is None:
            continue
        theirs, ours = (shards.rank(), shards.size()), (world.rank, world.world_size)
        if theirs != ours:
            raise ValueError(
                f"module {name!r} is sharded over {theirs[1]} ranks, of which this is rank "
                f"{theirs[0]}; in the world it is rank {ours[0]} of {ours[1]}"
            )
