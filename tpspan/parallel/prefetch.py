"""The read policy of a whole model: the next layer's weight comes while this one multiplies.

A forward hook puts a local copy in the place of a linear layer's weight for the time of the call.
Two buffers take turns. Which layer comes next is learned from the last pass; one that comes
unexpectedly is copied first, and the prefetched one is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from tpspan.parallel.buffers import Buffers
from tpspan.parallel.policy import SMALLEST_NBYTES, How, choose
from tpspan.parallel.rates import KnownRates
from tpspan.parallel.reader import ReadStats
from tpspan.parallel.shared import find_shared
from tpspan.parallel.staging import SharedWeight
from tpspan.parallel.substitution import Layer, substitute
from tpspan.spans.reads import Read, check_read

_NO_TASK = -1


def read_policy(model: nn.Module, read: Read = "auto") -> ReadPolicy:
    """Set how the linear layers of a model under ``share_parameters`` read their weights.

    Not collective: each rank may have a policy of its own. What it concerns are the ``nn.Linear``
    modules whose weight is shared, row-major and at least 1 MiB; everything else, such as
    embeddings, of which only some rows are read, is read in place as before. A new policy replaces
    an old one; ``remove`` ends it. Set it after ``share_parameters``, and call the model itself,
    not its parts: one call of the model is one pass, and nothing is copied ahead beyond its end. So
    between calls weights may be written, with a barrier after it.

    With ``"auto"`` every layer decides by the rows of its input and by rates measured once on the
    machine. Where all memory is this machine's own, as on the host backend, that is in place. Local
    memory for copies: two buffers, of the largest weights that are staged, during a pass.

    Backward passes read the weights again, in the same way. Gradients are the ordinary ones, of
    this rank's loss and of the whole weight. A second derivative reads in place. With CUDA graphs,
    run the model once before the capture, so that order and rates are known; both ways can be
    captured. A copy of the model (``copy.deepcopy``) has no policy; pickling asks for ``remove``.

    Raises:
        ValueError: no such policy, or no parameter of the model is shared.
    """
    policy = ReadPolicy(model, check_read(read))
    for hook in tuple(model._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ReadPolicy):
            owner.remove()
    policy.install()
    return policy


class ReadPolicy:
    """The read policy of one model; made by ``read_policy``."""

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._model, self._read = model, read
        self._layers: dict[nn.Module, Layer] = {}
        worlds = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                found = find_shared(parameter)
                if found is not None:
                    span, entry = found[0].span, found[1]
                    worlds.append(span.world)
                    if _is_eligible(module, parameter):
                        shape = int(parameter.shape[0]), int(parameter.shape[1])
                        weight = SharedWeight(span, shape, parameter.dtype, entry.offset_bytes)
                        self._layers[module] = Layer(module, parameter, weight)
        if not worlds:
            raise ValueError("no parameter of the model is shared: call share_parameters first")
        self._buffers = Buffers(worlds[0])
        self._rates = KnownRates.of(worlds[0])
        self._counts: dict[How, int] = {"in_place": 0, "staged": 0}
        self._handles: list[Any] = []
        self._depth = 0
        self._task = _NO_TASK
        self._restore: tuple[nn.Module, Callable[[], None]] | None = None

    def install(self) -> None:
        """Hang the hooks into the model."""
        add = self._handles.append
        add(self._model.register_forward_pre_hook(self._begin))
        for module in self._layers:
            add(module.register_forward_pre_hook(self._enter))
            add(module.register_forward_hook(self._leave, always_call=True))
        add(self._model.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Read everything in place again; idempotent. Not during a pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def stats(self) -> ReadStats:
        """How the weights of the linear layers were read so far."""
        counts = self._counts
        return ReadStats(counts["in_place"], counts["staged"], self._buffers.most_nbytes)

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        if module is self._model:
            self._depth += 1
            if self._depth == 1 and not self._in_backward():
                self._task = _NO_TASK  # a backward pass that failed has not said so
                self._buffers.begin("forward")

    def _end(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if module is self._model:
            self._depth -= 1
            if self._depth == 0 and not self._in_backward():
                self._buffers.end(complete=result is not None)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        layer = self._layers.get(module)
        if layer is None or torch.compiler.is_compiling() or not layer.is_shared():
            return
        if self._restore is not None:  # inside another layer, whose copy has not been used yet
            self._counts["in_place"] += 1
            return
        x = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        rows = 0 if x is None else x.numel() // max(1, layer.weight.shape[1])
        copy = self._read_layer(layer, rows, "forward")
        if copy is not None:
            self._restore = module, substitute(layer, copy, rows, self._read_again)

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._restore is not None and self._restore[0] is module:
            restore = self._restore[1]
            self._restore = None
            restore()
            if self._depth == 0 and not self._in_backward():
                self._buffers.end(complete=False)

    def _in_backward(self) -> bool:
        return self._task != _NO_TASK and self._task == _graph_task()

    def _read_again(self, layer: Layer, rows: int) -> torch.Tensor | None:
        task = _graph_task()
        if task == _NO_TASK:  # no backward pass: somebody looks at what a node has saved
            return None
        if task != self._task:
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(self._end_backward)
            self._task = task
            self._buffers.begin("backward")
        return self._read_layer(layer, rows, "backward")

    def _end_backward(self) -> None:
        self._task = _NO_TASK
        self._buffers.end(complete=True)

    def _read_layer(self, layer: Layer, rows: int, phase: str) -> torch.Tensor | None:
        """A local copy for the next product, or None to read in place; the one after is begun."""
        is_pass = self._depth > 0 or self._in_backward()
        if not is_pass:
            self._buffers.begin("alone")
        how = self._decide(layer, rows)
        self._counts[how] += 1
        copy = self._buffers.take(layer.weight, layer.version) if how == "staged" else None
        if is_pass:
            ahead = self._buffers.follows((layer, phase))
            following = ahead[0] if isinstance(ahead, tuple) else None
            if (
                isinstance(following, Layer)
                and following.is_shared()
                and self._decide(following, rows) == "staged"
            ):
                self._buffers.prefetch(following.weight, following.version)
        return copy

    def _decide(self, layer: Layer, rows: int) -> How:
        # As if it were prefetched, whether it is or not: what is decided in a forward pass must
        # come out the same when activation checkpointing runs it again.
        rates = self._rates.get(layer.weight) if self._read == "auto" else None
        return choose(self._read, layer.weight.product(rows), rates, is_prefetched=True)

    def __deepcopy__(self, memo: object) -> ReadPolicy:
        return self  # the hooks of a copied model find none of their modules here

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a model with a read policy cannot be pickled: call its remove() first")


def _graph_task() -> int:
    """The backward pass that this thread works on."""
    return int(torch._C._current_graph_task_id())


def _is_eligible(module: nn.Module, parameter: nn.Parameter) -> bool:
    return (
        isinstance(module, nn.Linear)
        and parameter is module.weight
        and parameter.is_contiguous()
        and parameter.nbytes >= SMALLEST_NBYTES
    )
