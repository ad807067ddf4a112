"""How an operation of torch is told where to write its result."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

_EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    }
)


@dataclass(frozen=True)
class OutForm:
    """The form of an operation that takes its result's memory.

    Attributes:
        operation: the form; None if the operation only makes memory and the memory will do.
        keyword: the name of the argument that takes the memory.
    """

    operation: Any
    keyword: str

    def call(self, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        """Run it with the arguments of the original, and return ``out``."""
        if self.operation is not None:
            self.operation(*args, **kwargs, **{self.keyword: out})
        return out


@functools.cache
def out_form(operation: Any) -> OutForm | None:
    """The form of an operation that writes one result where it is told; None if there is none.

    Forms that torch has generated are left out: they run the operation and copy.
    """
    if operation in _EMPTY:
        return OutForm(None, "")
    schema = operation._schema
    if len(schema.returns) != 1 or schema.returns[0].alias_info is not None:
        return None
    wanted = [(each.name, str(each.type)) for each in schema.arguments]
    packet = operation.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        outs = [each.name for each in form._schema.arguments if each.is_out]
        given = [(each.name, str(each.type)) for each in form._schema.arguments if not each.is_out]
        if len(outs) == 1 and given == wanted and torch.Tag.generated not in form.tags:
            return OutForm(form, outs[0])
    return None


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is an ordinary tensor, whose memory is what it seems to be."""
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided  # type: ignore[attr-defined]


def signature(value: Any) -> Any:
    """Equal for arguments that lead to results of one shape; None if that cannot be told."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device) if is_plain(value) else None
    if isinstance(value, (tuple, list)):
        found = tuple(signature(each) for each in value)
        unknown = any(s is None and v is not None for s, v in zip(found, value, strict=True))
        return None if unknown else found
    if isinstance(value, dict):
        return signature([part for item in sorted(value.items()) for part in item])
    return value
