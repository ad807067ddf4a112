"""A module's last operations write straight into memory that is given, and nothing is copied.

Which operation makes the memory of an output is known only once the module has run. So its first
run is watched: the operation, and the how many-th it is in which call of which part of the module.
From then on only that part is watched, and if its operations have been the same up to there, that
one is called by its ``out=`` form with the memory in question. Autograd stands above this and
notices nothing.

An output is left to be copied if its operation has no ``out=`` form, if it is a view of something
larger, if it is an input of the module, or if autograd saved it for the backward pass, before which
the reader gives the memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tpspan.errors import TpspanError
from tpspan.parallel.out_forms import OutForm, is_plain, out_form, signature

_DETACH = torch.ops.aten.detach.default
Place = Callable[[int, torch.Size, torch.dtype], torch.Tensor]
"""Gives the memory of the n-th output as a contiguous tensor of a shape."""


class MovedOutput(TpspanError, RuntimeError):
    """An operation wrote into memory meant for an output, and was not the one that makes it."""


class DirectOutput:
    """Runs a module so that its outputs lie in given memory, where that can be had.

    Args:
        module: what is run; if a part of it is compiled, all its outputs are left to be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plans: dict[tuple[bool, bool], dict[int, _Source]] = {}
        self._is_opaque = any(_is_compiled(part) for part in module.modules())

    def call(self, run: Callable[[], Any], place: Place) -> tuple[Any, list[int]]:
        """Return what ``run`` returns, and which of its outputs do not lie in their place.

        Args:
            run: calls the module once and returns its output: a tensor, or a tuple or list.
            place: called at most once for each output, when its operation is reached.

        Raises:
            MovedOutput: the module's first run let expect something else of this one.
        """
        key = self._module.training, torch.is_grad_enabled()
        plan = self._plans.get(key)
        if self._is_opaque or plan == {}:
            result = run()
            return result, list(range(len(as_tuple(result))))
        if plan is None:
            watch = _Watch()
            with ExitStack() as stack:
                _follow(stack, self._module.modules(), watch)
                stack.enter_context(saved_tensors_hooks(watch.save, lambda saved: saved))
                stack.enter_context(watch)
                result = run()
            outputs = as_tuple(result)
            self._plans[key] = watch.sources(outputs)
            return result, list(range(len(outputs)))
        redirect = _Redirect(plan, place)
        with ExitStack() as stack:
            parts = {source.part for source in plan.values()}
            if None in parts:
                redirect.enter(None)
                stack.enter_context(redirect)
            else:
                _follow(stack, (part for part in parts if part is not None), redirect)
            result = run()
        return result, redirect.left(as_tuple(result))


def as_tuple(output: Any) -> tuple[Any, ...]:
    """A module's output as torch's stages take it: lists count as tuples, one tensor as one."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


class _Source:
    """The operation that makes the memory of one output.

    Attributes:
        part, call: the module in whose ``forward`` it happens, None for outside of all parts, and
            the how many-th call that is.
        trail: stands for all operations of that call up to this one.
        form: how it is told where to write.
        signature: of its arguments.
        shape, dtype: of what it makes.
    """

    def __init__(self, call: _Call, form: OutForm, arguments: object, made: torch.Tensor) -> None:
        self.part, self.call, self.trail = call.part, call.number, call.trail
        self.form, self.signature = form, arguments
        self.shape, self.dtype = made.shape, made.dtype


class _Call:
    """A call of a part that has begun, and the operations in it so far."""

    def __init__(self, part: nn.Module | None, number: int) -> None:
        self.part, self.number = part, number
        self.trail = 0

    def add(self, operation: Any) -> None:
        """Note an operation. Autograd detaches what it saves, unless hooks watch what it saves."""
        if operation is not _DETACH:
            self.trail = hash((self.trail, operation))


class _Follower(Protocol):
    """What is told of the calls of parts."""

    def enter(self, part: nn.Module | None) -> None:
        """A call begins."""

    def leave(self, part: nn.Module) -> None:
        """It ends, or has failed."""


class _Watch(TorchDispatchMode):
    """Notes who makes which memory, and what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = [_Call(None, 0)]
        self._counts: dict[nn.Module, int] = {}
        self._makers: dict[int, _Source | None] = {}
        self._saved: set[int] = set()

    def enter(self, part: nn.Module | None) -> None:
        assert part is not None
        number = self._counts[part] = self._counts.get(part, -1) + 1
        self._calls.append(_Call(part, number))

    def leave(self, part: nn.Module) -> None:
        self._calls.pop()

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook for what autograd saves."""
        if is_plain(tensor):
            self._saved.add(_memory(tensor))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for call in self._calls:
            call.add(func)
        made = func(*args, **kwargs)
        if not is_plain(made) or _memory(made) in _memories((args, kwargs)):
            return made
        arguments = signature((args, kwargs))
        form = out_form(func)
        if form is not None and arguments is not None and made.is_contiguous():
            self._makers[_memory(made)] = _Source(self._calls[-1], form, arguments, made)
        else:
            self._makers[_memory(made)] = None
        return made

    def sources(self, outputs: Sequence[Any]) -> dict[int, _Source]:
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


class _Redirect(TorchDispatchMode):
    """Lets the operations that make the outputs write where they belong; active in their parts."""

    def __init__(self, plan: dict[int, _Source], place: Place) -> None:
        super().__init__()
        self._place = place
        self._waiting = dict(plan)
        self._placed: dict[int, int] = {}
        self._counts: dict[nn.Module, int] = {}
        self._calls: list[_Call] = []

    def enter(self, part: nn.Module | None) -> None:
        if part is None:
            self._calls.append(_Call(None, 0))
            return
        number = self._counts[part] = self._counts.get(part, -1) + 1
        self._calls.append(_Call(part, number))
        self.__enter__()

    def leave(self, part: nn.Module) -> None:
        self._calls.pop()
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._calls[-1]
        for each in self._calls:
            each.add(func)
        for number, source in self._waiting.items():
            if (
                source.trail == call.trail
                and source.part is call.part
                and source.call == call.number
                and source.signature == signature((args, kwargs))
            ):
                del self._waiting[number]
                out = self._place(number, source.shape, source.dtype)
                self._placed[number] = out.data_ptr()
                return source.form.call(args, kwargs, out)
        return func(*args, **kwargs)

    def left(self, outputs: Sequence[Any]) -> list[int]:
        """The numbers of the outputs that do not lie in their place."""
        for number, address in self._placed.items():
            output = outputs[number] if number < len(outputs) else None
            if not is_plain(output) or output.data_ptr() != address or not output.is_contiguous():
                raise MovedOutput(
                    f"output {number} is no longer made by the operation that made it when the "
                    "module first ran, which has written into its place: the module does not "
                    "always do the same; give the stage direct=False"
                )
        return [number for number in range(len(outputs)) if number not in self._placed]


def _follow(stack: ExitStack, parts: Iterable[nn.Module], follower: _Follower) -> None:
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


def _is_compiled(part: nn.Module) -> bool:
    name = type(part).__name__
    return name == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
