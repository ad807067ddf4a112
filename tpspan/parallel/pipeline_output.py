"""A module's last operations write straight into memory that is given, and nothing is copied.

Which operation makes the memory of an output is known only once the module has run. So its first
run is watched: the operation, in which call of which part of the module it happens, behind which
call of a part of that one, and what has happened since. From then on only that stretch is watched,
which is a few operations of many (each costs some 15 µs), and if they are the same, that one is
called by its ``out=`` form with the memory in question. Autograd stands above this and notices
nothing.

An output is left to be copied if its operation has no ``out=`` form, if it is a view of something
larger, if it is an input of the module, or if autograd saved it for the backward pass, before which
the reader gives the memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tpspan.errors import TpspanError
from tpspan.parallel.out_forms import is_plain, signature
from tpspan.parallel.pipeline_watch import Call, Source, Watch, follow

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
        self._plans: dict[tuple[bool, bool], dict[int, Source]] = {}
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
            watch = Watch()
            with ExitStack() as stack:
                follow(stack, self._module.modules(), watch)
                stack.enter_context(saved_tensors_hooks(watch.save, lambda saved: saved))
                stack.enter_context(watch)
                result = run()
            outputs = as_tuple(result)
            self._plans[key] = watch.sources(outputs)
            return result, list(range(len(outputs)))
        redirect = _Redirect(plan, place)
        with ExitStack() as stack:
            follow(stack, redirect.parts(), redirect)
            stack.callback(redirect.end)
            redirect.enter(None)
            result = run()
        return result, redirect.left(as_tuple(result))


def as_tuple(output: Any) -> tuple[Any, ...]:
    """A module's output as torch's stages take it: lists count as tuples, one tensor as one."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


class _Redirect(TorchDispatchMode):
    """Lets the operations that make the outputs write where they belong.

    It is active from the last call before such an operation to the end of the part around it.
    """

    def __init__(self, plan: dict[int, Source], place: Place) -> None:
        super().__init__()
        self._place = place
        self._waiting = dict(plan)
        self._placed: dict[int, int] = {}
        self._counts: dict[nn.Module, int] = {}
        self._calls: list[Call] = []
        self._active: Call | None = None  # the call at whose end this ends

    def parts(self) -> set[nn.Module]:
        """Of whose calls this has to be told."""
        around = {source.part for source in self._waiting.values() if source.part is not None}
        return around | {source.after[0] for source in self._waiting.values() if source.after}

    def enter(self, part: nn.Module | None) -> None:
        number = 0
        if part is not None:
            number = self._counts[part] = self._counts.get(part, -1) + 1
        self._calls.append(Call(part, number))
        self._begin()

    def leave(self, part: nn.Module) -> None:
        if self._calls.pop() is self._active:
            self.end()
        self._calls[-1].ended(part)
        self._begin()

    def end(self) -> None:
        """Be active no longer."""
        if self._active is not None:
            self._active = None
            self.__exit__(None, None, None)

    def _begin(self) -> None:
        call = self._calls[-1]
        if self._active is None and any(
            source.part is call.part and source.call == call.number and source.after == call.after
            for source in self._waiting.values()
        ):
            self._active = call
            self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._calls[-1]
        call.add(func)
        for number, source in self._waiting.items():
            if (
                source.trail == call.trail
                and source.part is call.part
                and source.call == call.number
                and source.after == call.after
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


def _is_compiled(part: nn.Module) -> bool:
    name = type(part).__name__
    return name == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
