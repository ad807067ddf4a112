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
from tpspan.distributed.inner import c10d, inner_backends
from tpspan.distributed.registration import NAME
from tpspan.distributed.work import HostWork

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
        self._inner = inner_backends(store, rank, size, timeout)
        for kind, backend in self._inner.items():
            is_gloo = isinstance(backend, c10d.ProcessGroupGloo)
            types = ProcessGroup.BackendType
            backend_type = types.GLOO if is_gloo else types.NCCL
            self._register_backend(torch.device(kind), backend_type, backend)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
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
            "allreduce",
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
            "allgather",
            list(zip(inputs, outputs, strict=True)),
            lambda piece, out, is_async: calls.all_gather(self.span_group, out, piece, is_async),
            opts,
            lambda inner: inner.allgather(outputs, inputs, opts),
        )

    def all_gather_single(
        self, output: torch.Tensor, piece: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Gather pieces of one size into one tensor."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._each(
            "all_gather_single",
            [(piece, output)],
            lambda piece, out, is_async: calls.all_gather_single(
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
            "all_gather_single",
            list(zip(inputs, outputs, strict=True)),
            lambda piece, out, is_async: calls.all_gather_single(
                self.span_group, out, piece, is_async
            ),
            opts,
            lambda inner: _last(
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
            "reduce_scatter_single",
            list(zip(outputs, inputs, strict=True)),
            lambda out, whole, is_async: calls.reduce_scatter_single(
                self.span_group, out, whole, opts.reduceOp, is_async
            ),
            opts,
            lambda inner: _last(
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
            return self._inner["cpu"].barrier(opts)
        return HostWork([], is_done=True) if work is None else work

    def shutdown(self) -> None:
        """Give everything back; torch's ``destroy_process_group`` calls it."""
        self.span_group.close()
        for backend in self._inner.values():
            backend.shutdown()

    def abort(self) -> None:
        """As ``shutdown``, and what the inner backends have under way fails."""
        self.span_group.close()
        for backend in self._inner.values():
            backend.abort()

    def _each(self, operation: str, items: Sequence[Any], call: Any, opts: Any, inner: Any) -> Any:
        """Make the calls one after another; the last one's work stands for all of them."""
        is_async = getattr(opts, "asyncOp", True)
        work: Any = None
        tensors: list[torch.Tensor] = []
        for number, item in enumerate(items):
            work = call(*item, is_async)
            if work is NotImplemented:
                assert number == 0, "spans serve all tensors of a call or none"
                counts.count_delegated(operation)
                first = item[0]
                return inner(self._inner[first.device.type])
            tensors.append(item[0])
        return HostWork(tensors, is_done=True) if work is None else work


def _delegating(name: str, inner_name: str) -> Any:
    def method(self: SpanProcessGroup, *arguments: Any, **options: Any) -> Any:
        counts.count_delegated(name)
        tensor = arguments[0] if arguments else next(iter(options.values()))
        while not isinstance(tensor, torch.Tensor) and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, torch.Tensor):  # a gather's outputs, where this rank has none
            tensor = arguments[1][0]
        return getattr(self._inner[tensor.device.type], inner_name)(*arguments, **options)

    method.__name__ = name
    method.__doc__ = "Carried out by the inner backend."
    return method


for _name in ("send", "recv", "recv_anysource", "reduce", "gather", "scatter", "alltoall"):
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


def _last(works: Sequence[Any]) -> Any:
    for work in works[:-1]:
        work.wait()
    return works[-1]
