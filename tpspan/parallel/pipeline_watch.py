"""Which operation of a module makes the memory of each of its outputs: one run, watched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpspan.parallel.out_forms import OutForm, is_plain, out_form, signature

_DETACH = torch.ops.aten.detach.default


class Source:
    """The operation that makes the memory of one output.

    Attributes:
        part, call: the module in whose ``forward`` it happens, None for outside of all parts, and
            the how many-th call that is.
        after: the part that was called in there last before, and the how many-th time.
        trail: stands for all operations of that call since then, up to this one.
        form: how it is told where to write.
        signature: of its arguments.
        shape, dtype: of what it makes.
    """

    def __init__(self, call: Call, form: OutForm, arguments: object, made: torch.Tensor) -> None:
        self.part, self.call = call.part, call.number
        self.after, self.trail = call.after, call.trail
        self.form, self.signature = form, arguments
        self.shape, self.dtype = made.shape, made.dtype


class Call:
    """A call of a part that has begun, and its own operations since a part of it was called."""

    def __init__(self, part: nn.Module | None, number: int) -> None:
        self.part, self.number = part, number
        self.after: tuple[nn.Module, int] | None = None
        self.trail = 0
        self._num_calls: dict[nn.Module, int] = {}

    def add(self, operation: Any) -> None:
        """Note an operation. Autograd detaches what it saves, unless hooks watch what it saves."""
        if operation is not _DETACH:
            self.trail = hash((self.trail, operation))

    def ended(self, inner: nn.Module) -> None:
        """Note that a part that was called in this call has returned."""
        number = self._num_calls[inner] = self._num_calls.get(inner, 0) + 1
        self.after, self.trail = (inner, number), 0


class Follower(Protocol):
    """What is told of the calls of parts."""

    def enter(self, part: nn.Module) -> None:
        """A call begins."""

    def leave(self, part: nn.Module) -> None:
        """It ends, or has failed."""


class Watch(TorchDispatchMode):
    """Notes who makes which memory, and what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = [Call(None, 0)]
        self._counts: dict[nn.Module, int] = {}
        self._makers: dict[int, Source | None] = {}
        self._saved: set[int] = set()

    def enter(self, part: nn.Module) -> None:
        number = self._counts[part] = self._counts.get(part, -1) + 1
        self._calls.append(Call(part, number))

    def leave(self, part: nn.Module) -> None:
        self._calls.pop()
        self._calls[-1].ended(part)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook for what autograd saves."""
        if is_plain(tensor):
            self._saved.add(_memory(tensor))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._calls[-1].add(func)
        made = func(*args, **kwargs)
        if not is_plain(made) or _memory(made) in _memories((args, kwargs)):
            return made
        arguments = signature((args, kwargs))
        form = out_form(func)
        if form is not None and arguments is not None and made.is_contiguous():
            self._makers[_memory(made)] = Source(self._calls[-1], form, arguments, made)
        else:
            self._makers[_memory(made)] = None
        return made

    def sources(self, outputs: Sequence[Any]) -> dict[int, Source]:
        """By the number of the output, for those that can be made in place."""
        found = {}
        memories = [_memory(each) if is_plain(each) else 0 for each in outputs]
        for number, (output, memory) in enumerate(zip(outputs, memories, strict=True)):
            source = self._makers.get(memory)
            if source is None or memory in self._saved or memories.count(memory) > 1:
                continue
            whole = output.untyped_storage().nbytes() == output.numel() * output.element_size()
            if whole and output.is_contiguous() and output.dtype == source.dtype:
                found[number] = source
        return found


def follow(stack: ExitStack, parts: Iterable[nn.Module], follower: Follower) -> None:
    """Tell of calls of these parts; innermost of what else hooks into them, such as FSDP2."""
    for part in parts:
        begin: Any = part.register_forward_pre_hook(lambda part, args: follower.enter(part))
        end: Any = part.register_forward_hook(
            lambda part, args, output: follower.leave(part), prepend=True, always_call=True
        )
        handles: tuple[AbstractContextManager[Any], ...] = (begin, end)
        for handle in handles:
            stack.enter_context(handle)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memories(value: Any) -> set[int]:
    """Of all tensors in the arguments of an operation."""
    if is_plain(value):
        return {_memory(value)}
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return set()
    return {memory for each in value for memory in _memories(each)}
