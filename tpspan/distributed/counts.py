"""How often each collective call took which path on this rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Stats:
    """Counts since the process began, by ``operation: path``, such as ``all_reduce: one-shot``.

    Attributes:
        served: calls over spans.
        delegated: calls handed to torch.distributed, because ranks cannot map each other's memory
            or a tensor or an operation is not one that spans serve.
    """

    served: Mapping[str, int]
    delegated: Mapping[str, int]

    @property
    def num_served(self) -> int:
        """All calls over spans."""
        return sum(self.served.values())

    @property
    def num_delegated(self) -> int:
        """All calls handed to torch.distributed."""
        return sum(self.delegated.values())


_served: dict[str, int] = {}
_delegated: dict[str, int] = {}
_lock = threading.Lock()


def count(what: str) -> None:
    """Note a call over spans."""
    with _lock:
        _served[what] = _served.get(what, 0) + 1


def count_delegated(what: str) -> None:
    """Note a call that torch.distributed carries out."""
    with _lock:
        _delegated[what] = _delegated.get(what, 0) + 1


def stats() -> Stats:
    """The counts so far."""
    with _lock:
        return Stats(MappingProxyType(dict(_served)), MappingProxyType(dict(_delegated)))
