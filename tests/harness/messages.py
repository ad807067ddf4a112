"""What travels between pytest and a rank, pickled, over one Unix socket per rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Hello:
    """First message of a rank, sent before it initialises anything: it can be killed by now."""

    pid: int


@dataclass(frozen=True)
class Ready:
    """Second message: the rank is initialised, or failed to be."""

    rank: int
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """Call ``body`` ("package.module:function") with the world and ``kwargs``."""

    body: str
    kwargs: Mapping[str, Any]
    deadline_s: float


@dataclass(frozen=True)
class Settle:
    """All ranks are idle: say what is held now that was not held at the last one that looked.

    Attributes:
        looks: if not, there are only complaints to be asked for.
        patient: see ``leaks.settle``.
    """

    looks: bool = True
    patient: bool = True


@dataclass(frozen=True)
class Stop:
    """Close the world and end."""


@dataclass(frozen=True)
class Report:
    """Answer of one rank to one request."""

    rank: int
    value: Any = None
    error: str | None = None
    skipped: str | None = None
    growth: Mapping[str, str] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()


def send(connection: Connection, message: object) -> None:
    """Send by plain pickle: tensors travel as bytes, not as shared descriptors."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
