"""A linear layer whose weight the ranks hold together, each some of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from tpspan.errors import ClosedError
from tpspan.launch import start
from tpspan.launch.world import World
from tpspan.parallel.gathered import gathered_linear, own_part
from tpspan.parallel.reader import Reader, ReadStats
from tpspan.parallel.staging import SharedWeight
from tpspan.spans.reads import Read, check_read
from tpspan.spans.span import Span

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class GatheredLinear(nn.Module):
    """``torch.nn.Linear`` with its weight in a span: every rank computes all of ``x @ W.T + b``.

    ``weight`` is a parameter over this rank's rows alone, in the span itself, and an optimizer of
    each rank updates its own rows in place. ``bias`` lies on every rank. A backward pass is
    collective: all ranks run it, in the same order of layers, and gradients are those of the sum of
    the ranks' losses, reduce-scattered to the owners of the rows (the bias's to everyone). When a
    backward pass has finished, no rank reads for it any more; put ``layer.barrier()`` between
    ``optimizer.step()`` and the next forward pass, so that every rank reads the new rows.

    How a product reads the weight is decided per call and per rank (see ``read_policy``); within a
    CUDA graph both ways can be captured. The dtype of x must be that of the weight, unless autocast
    converts both. There is no second derivative.

    ``state_dict`` has this rank's rows; ``load_state_dict`` takes these or the whole weight. To
    save the whole, use ``gathered``. Copies and pickles are refused, and so is what takes the rows
    out of the span: another dtype or device, ``to_empty`` and ``share_memory``, and a forward pass
    with another weight in their place (``functional_call``, pruning, ``weight.data = ...``).

    Collective: construction and ``close``.

    Args:
        in_features, out_features, bias: as in ``torch.nn.Linear``.
        world: the ranks; by default that of ``tpspan.init``.
        span: an existing span of shape (out_features, in_features), which stays the caller's to
            close; its content is kept. Otherwise one is allocated and gets ``nn.Linear``'s initial
            distribution.
        dtype: float16, bfloat16, float32 or float64; torch's default if not given.
        layout, rows: of the span, as in ``Span.allocate``. Blocked keeps each rank's rows together,
            which staging prefers; in place, striped spreads the readers better.
        read: ``"in_place"``, ``"staged"``, or ``"auto"``, which takes what is faster.

    Raises:
        ValueError, TypeError: the arguments do not fit together.
        CollectiveMismatch, OutOfMemoryError, PeerError: as ``Span.allocate``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        world: World | None = None,
        span: Span | None = None,
        dtype: torch.dtype | None = None,
        layout: str = "blocked",
        rows: Sequence[int] | None = None,
        read: Read = "auto",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        check_read(read)
        self._closed = False
        self._owns_span = span is None
        dtype = dtype or (torch.get_default_dtype() if span is None else span.dtype)
        if dtype not in DTYPES:
            raise TypeError(f"a weight of {dtype} cannot be multiplied: give one of {DTYPES}")
        shape = (out_features, in_features)
        if span is None:
            world = world or start.world()
            span = Span.allocate(world, shape, dtype, layout=layout, rows=rows)
        elif (span.shape, span.dtype) != (shape, dtype) or world not in (None, span.world):
            raise ValueError(f"{span!r} is no weight of shape {shape} and {dtype} of this world")
        self.span = span
        self.reader = Reader(SharedWeight(span, shape, dtype), read)
        self.weight = nn.Parameter(span.local)
        self._weight_address = self.weight.data_ptr()
        empty = torch.empty(out_features, dtype=dtype, device=span.world.device) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))
        self.reset_parameters(weight=self._owns_span)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        world: World | None = None,
        *,
        layout: str = "blocked",
        rows: Sequence[int] | None = None,
        read: Read = "auto",
    ) -> Self:
        """Collective. A layer with the values of an ordinary one, which every rank has.

        Each rank writes its own rows, from its own ``linear``; no rank needs them all at once.
        """
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            world=world,
            dtype=linear.weight.dtype,
            layout=layout,
            rows=rows,
            read=read,
        )
        with torch.no_grad():
            made.weight.copy_(made._own_part(linear.weight.detach()))
            if made.bias is not None and linear.bias is not None:
                made.bias.copy_(linear.bias)
        made.weight.requires_grad_(linear.weight.requires_grad)
        made.barrier()
        return made

    def reset_parameters(self, *, weight: bool = True) -> None:
        """Collective. Draw new values as ``nn.Linear`` does, the same bias on every rank."""
        world = self.span.world
        seed = int(world.control.broadcast(int(torch.randint(1 << 62, ()))))
        bound = self.in_features**-0.5 if self.in_features else 0.0
        with torch.no_grad():
            for tensor, of_rank in ((self.weight if weight else None, world.rank), (self.bias, -1)):
                if tensor is not None:
                    random = torch.Generator(world.device).manual_seed(seed + of_rank + 1)
                    tensor.uniform_(-bound, bound, generator=random)
        self.barrier()

    @property
    def gathered(self) -> torch.Tensor:
        """The whole weight in place, (out_features, in_features), without gradient.

        Raises:
            ClosedError: after ``close``.
            RuntimeError: as ``forward``.
        """
        self._check_open()
        self._check_in_span()
        return self.reader.weight.in_place()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + b``, (\\*, in_features) to (\\*, out_features).

        Raises:
            ClosedError: after ``close``.
            TypeError: the dtypes differ and no autocast is active.
            ValueError: x has other features, or lies on another device.
            RuntimeError: ``weight`` was replaced: it is not this rank's rows of the span any more.
        """
        self._check_open()
        self._check_in_span()
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be (*, {self.in_features}), not {tuple(x.shape)}")
        if x.device != self.weight.device:
            raise ValueError(f"x must be on {self.weight.device}, not on {x.device}")
        kind, bias = x.device.type, self.bias
        if torch.is_autocast_enabled(kind) and self.weight.dtype != torch.float64:
            target = torch.get_autocast_dtype(kind)
            x = x.to(target)
            bias = None if bias is None else bias.to(target)  # type: ignore[assignment]
        elif x.dtype != self.weight.dtype:
            raise TypeError(f"x is of {x.dtype}, the weight of {self.weight.dtype}: convert one")
        x_MK = x.reshape(x.shape[:-1].numel(), self.in_features)
        y_MN = gathered_linear(x_MK, self.weight, bias, self.reader)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def barrier(self) -> None:
        """Collective. Hold the stream (on the host, the caller) until all ranks have come here."""
        self.span.barrier()

    def stats(self) -> ReadStats:
        """How the weight was read so far."""
        return self.reader.stats()

    def close(self) -> None:
        """Collective. Give the span back, unless it was given; idempotent.

        ``weight`` gets memory of its own for this rank's rows. The layer cannot be called again.

        Raises:
            InUseError: tensors over the span, such as ``gathered``, are still alive: drop them and
                close again. The layer is as it was.
            PeerError: the same on another rank.
        """
        if self._closed:
            return
        was_in_span = self._is_in_span()
        # Before the span closes, which asks whether tensors over it live: the weight is one.
        self.weight.data = self.weight.detach().clone()
        try:
            if self._owns_span:
                self.span.close()
        except BaseException:
            if was_in_span and not self.span.is_closed:
                self.weight.data = self.span.local
            raise
        self._closed = True

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"ranks={self.span.world.world_size}, read={self.reader.read!r}"
        )

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        return own_part(whole, self.span).view(self.weight.shape)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        given = state_dict.get(prefix + "weight")
        shape = (self.out_features, self.in_features)
        if isinstance(given, torch.Tensor) and given.shape == shape != self.weight.shape:
            state_dict = {**state_dict, prefix + "weight": self._own_part(given)}
        # Values are copied, also with assign=True: the rows stay in the span.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        if not self._closed:
            with torch.no_grad():
                probe = self.weight.new_empty(1)
                address, became = probe.data_ptr(), fn(probe)
            if (became.dtype, became.device) != (self.weight.dtype, self.weight.device):
                raise TypeError(
                    f"the weight lies in a span of {self.weight.dtype} on {self.weight.device} and "
                    f"cannot become {became.dtype} on {became.device}: make another layer"
                )
            if became.data_ptr() != address:
                raise TypeError(
                    "the weight lies in a span and cannot be moved to other memory, as to_empty "
                    "and share_memory do; the span is shared by all ranks already"
                )
        return super()._apply(fn, recurse)

    def _check_in_span(self) -> None:
        if not self._is_in_span():
            raise RuntimeError(
                "the weight of this GatheredLinear was replaced by one that no other rank can see, "
                "as functional_call, pruning, parametrizations and `weight.data = ...` do. Write "
                "new values into it: `weight.copy_(rows)` under torch.no_grad(), or load_state_dict"
            )

    def _is_in_span(self) -> bool:
        try:
            return self.weight.data_ptr() == self._weight_address
        except RuntimeError:  # torch.func put a tensor without memory in its place
            return False

    def _check_open(self) -> None:
        if self._closed or self.span.is_closed:
            raise ClosedError("this GatheredLinear was closed, or its span was")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "a GatheredLinear cannot be copied or pickled, since its rows lie with all ranks: make "
            "another one on all of them, or save `state_dict()` or `gathered`"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__deepcopy__(protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
