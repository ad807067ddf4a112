"""What a rank asks for in one call, as eight words that ranks compare, and in words for people."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

NUM_WORDS = 8


class Operation(enum.IntEnum):
    """The collective calls that spans serve."""

    REFUSED = 0
    BARRIER = 1
    ALL_GATHER = 2
    ALL_GATHER_IN_PLACE = 3
    ALL_GATHER_LIST = 4
    REDUCE_SCATTER = 5
    ALL_REDUCE = 6
    BROADCAST = 7
    ALL_GATHER_OBJECT = 8
    REDUCE_SCATTER_IN_PLACE = 9
    ALL_GATHER_SPAN = 10


class Reduction(enum.IntEnum):
    """The reductions that spans serve."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    @property
    def is_sum(self) -> bool:
        """Whether values are added up."""
        return self in (Reduction.SUM, Reduction.AVG)

    def divisor(self, world_size: int) -> int:
        """By what the sum of the ranks' values is divided."""
        return world_size if self is Reduction.AVG else 1


_BY_OP = {
    getattr(ReduceOp, reduction.name): reduction for reduction in Reduction if reduction.value
}
_BITWISE = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)
# The same on every rank, since all run the same release of torch.
DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def reduction_of(op: object) -> Reduction | None:
    """The reduction that a ``ReduceOp`` names; None if spans do not serve it."""
    try:
        found = _BY_OP.get(op)  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None:
        # An op that went through torch's options is another object, equal and of another hash.
        for known, reduction in _BY_OP.items():
            if op == known:
                return reduction
    return found


def check_reduction(operation: str, reduction: Reduction, dtype: torch.dtype) -> None:
    """Refuse what has no meaning, as torch does.

    Raises:
        ValueError: complex numbers have no order, no product here, and no bits.
        TypeError: floating point numbers have no bits; truth values have no mean, and that of
            uint64 fits no type that torch could divide.
    """
    if dtype.is_complex and not reduction.is_sum:
        raise ValueError(f"{operation} does not support {reduction.name} on complex tensors")
    if dtype.is_floating_point and reduction in _BITWISE:
        raise TypeError(f"{operation} does not support {reduction.name} on {dtype}")
    if dtype in (torch.bool, torch.uint64) and reduction == Reduction.AVG:
        raise TypeError(f"{operation} does not support AVG on {dtype}")


def words(
    operation: Operation,
    dtype: torch.dtype | None = None,
    nbytes: int = 0,
    *,
    reduction: int = 0,
    root: int = 0,
    digest: int = 0,
    buffer: int = 0,
) -> tuple[int, ...]:
    """A request as words.

    Args:
        digest: stands for whatever else must agree, such as uneven sizes.
        buffer: the number of the buffer or span in which it happens, if it has one.
    """
    code = -1 if dtype is None else _CODES[dtype]
    return (operation, code, nbytes, reduction, root, digest, buffer, 0)


def describe(request: Sequence[int]) -> str:
    """A request in words for an error."""
    operation, code, nbytes, reduction, root, digest, buffer, _ = request
    if operation == Operation.REFUSED:
        return f"{Operation(digest).name.lower()} with arguments that it refused itself"
    parts = [Operation(operation).name.lower()]
    if code >= 0:
        parts.append(f"of {nbytes} bytes of {DTYPES[code]}")
    if reduction:
        parts.append(f"by {Reduction(reduction).name}")
    if operation == Operation.BROADCAST:
        parts.append(f"from rank {root}")
    if operation == Operation.ALL_GATHER_LIST:
        parts.append(f"with sizes of digest {digest & 0xFFFFFFFF:08x}")
    if operation == Operation.ALL_GATHER_SPAN:
        parts.append(f"at offset {digest} of span {buffer}")
    elif operation in (Operation.ALL_GATHER_IN_PLACE, Operation.REDUCE_SCATTER_IN_PLACE):
        parts.append(f"in buffer {buffer}")
    return " ".join(parts)
