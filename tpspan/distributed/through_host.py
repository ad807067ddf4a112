"""gloo for tensors on a GPU that ranks share, where NCCL refuses: by way of host memory.

gloo takes CUDA tensors in some of its calls; in others it would read their addresses as the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

_FOREVER = timedelta(0)
# Every call has its outputs first, but for this one, which has none.
_WITHOUT_OUTPUT = "send"
_MOVED = {"cuda"}  # tensors of these devices; a test adds the CPU

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class CopiedWork(Work):  # type: ignore[misc]
    """A call over copies in host memory; waiting for it brings the results back.

    Args:
        inner: gloo's work.
        outputs: each tensor on the GPU with its copy, to be brought back.
        kept: what gloo reads or writes until then, and does not keep itself.
    """

    def __init__(self, inner: Any, outputs: Pairs, kept: object) -> None:
        super().__init__()
        self._inner = inner
        self._outputs = outputs
        self._kept = kept
        self._is_back = False

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Hold the caller until gloo is done, then copy in the order of the current stream."""
        self._inner.wait(timeout)
        if not self._is_back:
            self._is_back = True
            for tensor, copy in self._outputs:
                tensor.detach().copy_(copy)
            self._kept = None
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether gloo is done; the results are there after ``wait``."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether gloo is done and has not failed."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """What gloo failed with."""
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """The outputs, once complete."""
        self.wait()
        return [tensor for tensor, _ in self._outputs]

    def get_future(self) -> Any:
        """A future that is complete: the host has waited."""
        future: Any = Future()
        future.set_result(self.result())
        return future


class ThroughHost:
    """A gloo backend whose calls take CUDA tensors.

    Attributes:
        gloo: what carries them out.
        supports_coalescing: whether calls can be grouped.
    """

    supports_coalescing = False

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        copies: list[Pairs] = []
        moved = []
        for argument in arguments:
            copies.append([])
            moved.append(_on_host(argument, copies[-1]))
        work = getattr(self.gloo, name)(*moved, **options)
        if not any(copies):
            return work
        return CopiedWork(work, copies[0] if name != _WITHOUT_OUTPUT else [], moved)


def _on_host(argument: Any, copies: Pairs) -> Any:
    """The argument with every tensor of a GPU replaced by a copy, however deep in lists."""
    if isinstance(argument, list | tuple):
        return [_on_host(each, copies) for each in argument]
    if not isinstance(argument, torch.Tensor) or argument.device.type not in _MOVED:
        return argument
    copy = argument.detach().to("cpu", copy=True).contiguous()
    copies.append((argument, copy))
    return copy
