"""``torch.distributed.init_process_group("tpspan")``: the collectives of whole programs over spans.

torch lets Python implement a whole process group, not one of its backends. This one holds, besides
its spans, an inner backend for each kind of device, gloo or NCCL: sends, all-to-all, scatters and
whatever spans do not serve go there and are counted. Subgroups are made like the first one, each
over its own part of the store, so ``new_group`` and device meshes need nothing more.

torch calls the methods by two sets of names, older and newer; both are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from tpspan.distributed import calls, counts
from tpspan.distributed.groups import Group
from tpspan.distributed.inner import InnerBackends, c10d
from tpspan.distributed.registration import NAME
from tpspan.distributed.requests import Operation
from tpspan.distributed.work import HostWork, JoinedWork

# torch's annotations do not know of process groups written in Python.
_Base: Any = ProcessGroup


class SpanProcessGroup(_Base):  # type: ignore[misc]
    """A process group whose collectives run over spans. Collective to make.

    Args:
        store: this group's own part of a store.
        rank, size: in the group.
        timeout: how long a call waits for other ranks, a ``timedelta``.
        name: of the group, the same on all ranks.

    Attributes:
        span_group: what the functions of ``tpspan.distributed`` make of this group.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: Any, name: str) -> None:
        super().__init__(rank, size)  # the one constructor whose methods Python may replace
        self._group_store = store
        self._inner = InnerBackends(store, rank, size, timeout)
        for kind, backend in self._inner.registrable():
            is_gloo = isinstance(backend, c10d.ProcessGroupGloo)
            types = ProcessGroup.BackendType
            backend_type = types.GLOO if is_gloo else types.NCCL
            self._register_backend(torch.device(kind), backend_type, backend)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        # Works of the calls since _start_coalescing; None outside of that.
        self._coalesced: list[Any] | None = None
        self.span_group = Group(
            rank,
            size,
            store=PrefixStore("spans/", store),
            name=name,
            delegate=self,
            timeout_s=timeout.total_seconds(),
        )

    def getBackendName(self) -> str:  # noqa: N802
        """The name that it was registered under."""
        return NAME

    def get_group_store(self) -> Store:
        """This group's own part of the store."""
        return self._group_store

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor in place."""
        opts = _options(c10d.AllreduceOptions, opts, "reduceOp")
        return self._each(
            "all_reduce",
            Operation.ALL_REDUCE,
            [(tensor,) for tensor in _listed(tensors)],
            lambda tensor, is_async: calls.all_reduce(
                self.span_group, tensor, opts.reduceOp, is_async
            ),
            opts,
            lambda inner: inner.allreduce(_listed(tensors), opts),
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor in place."""
        plain = c10d.AllreduceOptions()
        if opts is not None:
            plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
            if hasattr(plain, "asyncOp"):
                plain.asyncOp = opts.asyncOp
        return self.allreduce(tensors, plain)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather into lists of tensors."""
        opts = _options(c10d.AllgatherOptions, opts)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._each(
            "all_gather",
            Operation.ALL_GATHER_LIST,
            list(zip(outputs, inputs, strict=True)),
            lambda out, piece, is_async: calls.all_gather(self.span_group, out, piece, is_async),
            opts,
            lambda inner: inner.allgather(outputs, inputs, opts),
        )

    def all_gather_single(
        self, output: torch.Tensor, piece: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Gather pieces of one size into one tensor."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._each(
            "all_gather_into_tensor",
            Operation.ALL_GATHER,
            [(output, piece)],
            lambda out, piece, is_async: calls.all_gather_single(
                self.span_group, out, piece, is_async
            ),
            opts,
            lambda inner: inner._allgather_base(output, piece, opts),
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather each piece into its tensor."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._each(
            "all_gather_into_tensor",
            Operation.ALL_GATHER,
            list(zip(outputs, inputs, strict=True)),
            lambda out, piece, is_async: calls.all_gather_single(
                self.span_group, out, piece, is_async
            ),
            opts,
            lambda inner: JoinedWork(
                [
                    inner._allgather_base(output, piece, opts)
                    for output, piece in zip(outputs, inputs, strict=True)
                ]
            ),
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce lists of tensors, the r-th of each for rank r."""
        opts = _options(c10d.ReduceScatterOptions, opts, "reduceOp")
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._each(
            "reduce_scatter",
            Operation.REDUCE_SCATTER,
            list(zip(outputs, inputs, strict=True)),
            lambda out, whole, is_async: calls.reduce_scatter(
                self.span_group, out, whole, opts.reduceOp, is_async
            ),
            opts,
            lambda inner: inner.reduce_scatter(outputs, inputs, opts),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce inputs of ``size`` parts, one for each rank."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce each input, part by part."""
        opts = _options(c10d.ReduceScatterOptions, opts, "reduceOp")
        return self._each(
            "reduce_scatter_tensor",
            Operation.REDUCE_SCATTER,
            list(zip(outputs, inputs, strict=True)),
            lambda out, whole, is_async: calls.reduce_scatter_single(
                self.span_group, out, whole, opts.reduceOp, is_async
            ),
            opts,
            lambda inner: JoinedWork(
                [
                    inner._reduce_scatter_base(output, whole, opts)
                    for output, whole in zip(outputs, inputs, strict=True)
                ]
            ),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Give the root's tensors to all."""
        opts = _options(c10d.BroadcastOptions, opts, "rootRank")
        return self._each(
            "broadcast",
            Operation.BROADCAST,
            [(tensor,) for tensor in _listed(tensors)],
            lambda tensor, is_async: calls.broadcast(
                self.span_group, tensor, opts.rootRank, is_async
            ),
            opts,
            lambda inner: inner.broadcast(_listed(tensors), opts),
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait until every rank has come."""
        opts = _options(c10d.BarrierOptions, opts)
        work = calls.barrier(self.span_group, getattr(opts, "asyncOp", True))
        if work is NotImplemented:
            counts.count_delegated("barrier")
            return self._note(self._inner.of(torch.device("cpu")).barrier(opts))
        return self._note(HostWork([], is_done=True) if work is None else work)

    def _start_coalescing(self, device: torch.device) -> None:
        """Let one work stand for all calls until ``_end_coalescing``.

        Calls over spans happen at once and in order, as always. What goes to an inner backend that
        can group its calls, such as NCCL's sends and receives, is grouped there.
        """
        self._inner.start_grouping(torch.device(device))
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """The work of all calls since ``_start_coalescing``; None if there were none."""
        works, self._coalesced = self._coalesced or [], None
        works = self._inner.end_grouping(torch.device(device), works)
        return JoinedWork(works) if works else None

    def shutdown(self) -> None:
        """Give everything back; torch's ``destroy_process_group`` calls it."""
        self.span_group.close()
        for backend in self._inner.all():
            backend.shutdown()

    def abort(self) -> None:
        """As ``shutdown``, and what the inner backends have under way fails."""
        self.span_group.close()
        for backend in self._inner.all():
            backend.abort()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Send to one rank, by the inner backend."""
        counts.count_delegated("send")
        inner = self._inner.between(tensors[0].device, peer, sending=True)
        return self._note(inner.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Receive from one rank, by the inner backend."""
        counts.count_delegated("recv")
        inner = self._inner.between(tensors[0].device, peer, sending=False)
        return self._note(inner.recv(tensors, peer, tag))

    def _each(
        self,
        name: str,
        operation: Operation,
        items: Sequence[Any],
        call: Any,
        opts: Any,
        inner: Any,
    ) -> Any:
        """Make the calls one after another; one work stands for all of them.

        Args:
            name: torch's, to be counted.
            items: the arguments of each call, the output or the list of outputs first.
        """
        is_async = getattr(opts, "asyncOp", True)
        works: list[Any] = []
        tensors: list[torch.Tensor] = []
        if len(items) > 1:
            self._check_uniform(name, operation, items)
        for item in items:
            outputs = _listed(item[0])
            work = call(*item, is_async)
            if work is NotImplemented:
                counts.count_delegated(name)
                return self._note(inner(self._inner.of(outputs[0].device)))
            works += [] if work is None else [work]
            tensors += outputs
        if not works:
            return self._note(HostWork(tensors, is_done=True))
        return self._note(works[0] if len(works) == 1 else JoinedWork(works))

    def _check_uniform(self, name: str, operation: Operation, items: Sequence[Any]) -> None:
        """Spans serve all tensors of a call or none: refuse what is neither, before any is made."""
        first = _listed(items[0][0])[0]
        for item in items:
            for tensor in _listed(item[0]):
                if tensor.layout is not first.layout or tensor.device != first.device:
                    calls.refuse(self.span_group, operation, first)
                    raise ValueError(
                        f"{name}: the tensors of one call must have one layout and be on one "
                        f"device, not {first.layout} on {first.device} and {tensor.layout} on "
                        f"{tensor.device}"
                    )

    def _note(self, work: Any) -> Any:
        if self._coalesced is not None and work is not None:
            self._coalesced.append(work)
        return work


def _delegating(name: str, inner_name: str) -> Any:
    def method(self: SpanProcessGroup, *arguments: Any, **options: Any) -> Any:
        counts.count_delegated(name)
        tensor = arguments[0] if arguments else next(iter(options.values()))
        while not isinstance(tensor, torch.Tensor) and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, torch.Tensor):  # a gather's outputs, where this rank has none
            tensor = arguments[1][0]
        inner = self._inner.of(tensor.device)
        return self._note(getattr(inner, inner_name)(*arguments, **options))

    method.__name__ = name
    method.__doc__ = "Carried out by the inner backend."
    return method


for _name in ("recv_anysource", "reduce", "gather", "scatter", "alltoall"):
    setattr(SpanProcessGroup, _name, _delegating(_name, _name))
for _name in ("alltoall_base", "all_to_all_single"):
    setattr(SpanProcessGroup, _name, _delegating(_name, "alltoall_base"))


def _options(kind: Any, given: Any, attribute: str = "") -> Any:
    """The options of a call; torch also takes the operation or the root in their place."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None and attribute:
        setattr(options, attribute, given)
    return options


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
