"""A training state as tensors by name, and the rest as text: dicts, lists and plain values.

The text is JSON and not a pickle: who attaches must not run what somebody has published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], bytes]:
    """Take a tree apart into its tensors and everything else.

    Args:
        tree: dicts (with keys of text or integers), lists and tuples, of tensors, numbers, text,
            bools, bytes and None.

    Returns:
        The tensors by their path, such as ``optimizer.state.0.exp_avg``, and the rest.

    Raises:
        TypeError: something else is in it; the message says where.
        ValueError: two tensors have the same path.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _taken(tree, "", tensors)
    return tensors, json.dumps(skeleton, separators=(",", ":")).encode()


def unflatten(skeleton: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together again."""
    return _put(json.loads(skeleton), tensors)


def _taken(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = path or "tensor"
        if name in tensors:
            raise ValueError(f"two tensors of the state have the path {name!r}")
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"the key {key!r} of {path or 'the state'} is no text or integer")
            pairs.append([key, _taken(item, f"{path}.{key}" if path else str(key), tensors)])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [
            _taken(item, f"{path}.{index}" if path else str(index), tensors)
            for index, item in enumerate(value)
        ]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(
        f"{path or 'the state'} is a {type(value).__name__}: a state holds dicts, lists, tuples, "
        "tensors, numbers, text, bytes and None"
    )


def _put(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _put(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_put(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    return bytes.fromhex(content) if kind == "bytes" else content
