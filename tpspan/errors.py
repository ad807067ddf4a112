"""Every error tpspan raises on purpose; all of them pickle, so a rank can report another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class TpspanError(Exception):
    """Base of every error that tpspan raises on purpose."""


class DriverError(TpspanError, RuntimeError):
    """A call of the memory driver failed.

    Attributes:
        call: name of the driver's or the system's call, such as ``cuMemMap`` or ``mmap``.
        code: the driver's numeric code.
        code_name: its name, such as ``CUDA_ERROR_INVALID_VALUE`` or ``EMFILE``.
        arguments: the arguments that matter, by name.
        advice: what usually causes this and what to do about it.
        rank: the rank on which it happened, if known.
    """

    def __init__(
        self,
        call: str,
        code: int,
        code_name: str,
        arguments: Mapping[str, object] | None = None,
        advice: str = "",
        rank: int | None = None,
    ) -> None:
        self.call = call
        self.code = code
        self.code_name = code_name
        self.arguments = dict(arguments or {})
        self.advice = advice
        self.rank = rank
        super().__init__(self._text())

    def _text(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        where = "" if self.rank is None else f" on rank {self.rank}"
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.call}({shown}) failed{where}: {self.code_name} ({self.code}){advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.call, self.code, self.code_name, self.arguments, self.advice, self.rank)
        return type(self), state


class OutOfMemoryError(DriverError, MemoryError):
    """No memory is left for a block.

    Attributes:
        requested_nbytes, used_nbytes, free_nbytes: bytes asked for, in use and free when it failed.
    """

    def __init__(
        self,
        call: str,
        code: int,
        code_name: str,
        arguments: Mapping[str, object] | None = None,
        advice: str = "",
        rank: int | None = None,
        *,
        requested_nbytes: int = 0,
        used_nbytes: int = 0,
        free_nbytes: int = 0,
    ) -> None:
        self.requested_nbytes = requested_nbytes
        self.used_nbytes = used_nbytes
        self.free_nbytes = free_nbytes
        super().__init__(call, code, code_name, arguments, advice, rank)

    def _text(self) -> str:
        return (
            f"{super()._text()} (requested {self.requested_nbytes} bytes, "
            f"used {self.used_nbytes}, free {self.free_nbytes})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = {
            "requested_nbytes": self.requested_nbytes,
            "used_nbytes": self.used_nbytes,
            "free_nbytes": self.free_nbytes,
        }
        return _restore, (type(self), super().__reduce__()[1], sizes)


class PeerError(TpspanError, RuntimeError):
    """Some ranks did not come before the deadline, died, or failed in a collective call.

    Attributes:
        ranks: those ranks, sorted.
        what: what was waited for, and what the ranks said if they said anything.
    """

    def __init__(self, ranks: Iterable[int], what: str) -> None:
        self.ranks = tuple(sorted(ranks))
        self.what = what
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        super().__init__(f"{noun} {', '.join(map(str, self.ranks))}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.what)


class CollectiveMismatch(TpspanError, ValueError):
    """The ranks called one collective operation with different arguments; nothing was done.

    Attributes:
        operation: the call that this rank made.
        requests: what each rank asked for, by rank.
    """

    def __init__(self, operation: str, requests: Mapping[int, object]) -> None:
        self.operation = operation
        self.requests = dict(requests)
        lines = "".join(f"\n  rank {rank}: {request}" for rank, request in self.requests.items())
        super().__init__(f"{operation}: the ranks asked for different things:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operation, self.requests)


class ClosedError(TpspanError, ValueError):
    """The object was closed before this use of it."""


class InUseError(TpspanError, RuntimeError):
    """The resource cannot be closed yet: something still stands on it."""


class CaptureError(TpspanError, RuntimeError):
    """A mapping would change while a stream that uses the span is being captured into a graph."""


class LaunchError(TpspanError, RuntimeError):
    """The launcher's environment is missing, incomplete or contradicts itself."""


class CheckpointError(TpspanError, ValueError):
    """A checkpoint does not fit the module, or its file is damaged; nothing was loaded."""


class KeeperError(TpspanError, RuntimeError):
    """The keeper of published memory could not be started or reached, or refused a request."""


class UnknownNameError(TpspanError, LookupError):
    """Nothing is published under this name."""


class VersionGoneError(TpspanError, LookupError):
    """The version of a publication that was asked for is kept no longer, or is not there yet."""


class NameTakenError(TpspanError, RuntimeError):
    """A process that is alive publishes under this name.

    Attributes:
        pid: that process.
    """

    def __init__(self, text: str, pid: int) -> None:
        self.pid = pid
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.pid)


class PublicationMismatch(TpspanError, ValueError):
    """A module, or a next version, does not fit what is published; nothing was changed."""


def _restore(kind: type[OutOfMemoryError], args: tuple[Any, ...], sizes: dict[str, int]) -> Any:
    return kind(*args, **sizes)  # type: ignore[arg-type]
