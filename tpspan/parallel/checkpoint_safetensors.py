"""Checkpoints in safetensors files: one, several, or an index of shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpspan.errors import CheckpointError
from tpspan.parallel.boxes import Box
from tpspan.parallel.stored import StoredTensor

# Old checkpoints of Llama carry the frequencies that every model computes by itself today.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


class SafetensorsCheckpoint:
    """Tensors of safetensors files, read slice by slice.

    Args:
        paths: the files; a name must be in one of them only.
        where: for an index, the file that each name is in.

    Raises:
        CheckpointError: a file is missing, cut short or damaged, or a name is in two files.
    """

    format_name = "safetensors"

    def __init__(self, paths: Sequence[Path], where: Mapping[str, Path] | None = None) -> None:
        self._slices: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.ignored: list[str] = []
        with ExitStack() as stack:
            for path in paths:
                file = stack.enter_context(_open(path))
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if where is None or where.get(name) == path:
                        self._add(path, name, file.get_slice(name))
            absent = sorted(set(where or ()) - set(self._slices) - set(self.ignored))
            if absent:
                raise CheckpointError(
                    f"the index names {len(absent)} tensors that are not in the files it gives: "
                    f"{', '.join(absent[:10])}"
                )
            self._stack = stack.pop_all()

    @classmethod
    def from_index(cls, index: Path) -> SafetensorsCheckpoint:
        """Open the shards that an ``*.index.json`` file names."""
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            where = {str(name): index.parent / str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files") from error
        return cls(sorted(set(where.values())), where)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read what a box selects, on the CPU, as the shape of the box."""
        return self._slices[name][box if box else ...]

    def close(self) -> None:
        """Close the files."""
        self._slices.clear()
        self._stack.close()

    def _add(self, path: Path, name: str, piece: Any) -> None:
        if name in self._slices:
            raise CheckpointError(f"{name} is in several files, among them {path}")
        if name.endswith(_IGNORED_SUFFIX):
            self.ignored.append(name)
            return
        dtype = _DTYPES.get(piece.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{name} in {path} is stored as {piece.get_dtype()}, which cannot be converted"
            )
        self._slices[name] = piece
        self.tensors[name] = StoredTensor(tuple(piece.get_shape()), dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"the file {path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}") from error
