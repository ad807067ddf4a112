"""Checkpoints in GGUF files as llama.cpp writes them: other names, other rows, quantised blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tpspan.errors import CheckpointError
from tpspan.parallel.boxes import Box, box_shape
from tpspan.parallel.gguf_header import TensorInfo, read_header
from tpspan.parallel.stored import StoredTensor

_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architectures we read, and whether their q and k rows are in llama.cpp's rotary order."""

_IGNORED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tables that a transformers model computes from its configuration."""


class GgufCheckpoint:
    """Tensors of a GGUF file under the names that transformers gives them, dequantised to float32.

    Args:
        path: the file.
        names: names of the module's tensors, translated by the gguf package's own table.

    Raises:
        CheckpointError: the file is cut short, damaged, of another byte order, or of an
            architecture or a type that cannot be read; or the gguf package is missing.
    """

    format_name = "GGUF"

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(
                "GGUF files are read by the gguf package, which is missing: "
                'pip install "tpspan[demo]"'
            ) from error
        self._gguf = gguf
        self._path = path
        try:
            header = read_header(path)
            self._file: np.memmap[Any, np.dtype[np.uint8]] = np.memmap(path, np.uint8, "r")
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
        self._fields = header.fields
        self._architecture = self._known_architecture()
        num_parts = self._fields.get("split.count", 1)
        if num_parts not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {num_parts} parts of a model; merge them with llama.cpp's "
                "llama-gguf-split first"
            )
        self._pieces: dict[str, _Piece] = {}
        self.ignored: list[str] = []
        self.tensors: dict[str, StoredTensor] = {}
        translated = self._translate(names)
        for tensor in header.tensors:
            if tensor.name in _IGNORED:
                self.ignored.append(tensor.name)
                continue
            name = translated.get(tensor.name, tensor.name)
            self._pieces[name] = self._piece(tensor)
            self.tensors[name] = StoredTensor(tensor.shape, torch.float32)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Dequantise the blocks that cover a box and return what it selects, as float32."""
        piece = self._pieces[name]
        wanted = box_shape(box)
        if len(box) < len(piece.shape):
            box = (*box, slice(0, 1))
        *outer, columns = box
        first, last = columns.start // piece.block, -(-columns.stop // piece.block)
        data = piece.data(self._file)[..., first * piece.block_nbytes : last * piece.block_nbytes]
        if piece.num_heads:
            data = data[_file_rows(outer[0], piece.shape[0], piece.num_heads)]
        else:
            data = data[tuple(outer)]
        values = self._gguf.dequantize(np.ascontiguousarray(data), piece.kind)
        begin = columns.start - first * piece.block
        values = values[..., begin : begin + columns.stop - columns.start]
        # Float32 is not converted but viewed, and torch wants memory that can be written.
        return torch.from_numpy(np.require(values, requirements="W")).reshape(wanted)

    def close(self) -> None:
        """Let go of the mapped file."""
        self._pieces.clear()
        del self._file

    def _known_architecture(self) -> str:
        name = self._fields.get("general.architecture")
        if name not in _PERMUTED:
            raise CheckpointError(
                f"{self._path} is of architecture {name!r}; those that can be loaded are "
                f"{', '.join(_PERMUTED)}"
            )
        return str(name)

    def _translate(self, names: Sequence[str]) -> Mapping[str, str]:
        """The module's names by GGUF's; a base model's names lack the leading ``model.``."""
        architecture = next(
            key for key, name in self._gguf.MODEL_ARCH_NAMES.items() if name == self._architecture
        )
        num_layers = self._fields.get(f"{self._architecture}.block_count")
        if not isinstance(num_layers, int):
            raise CheckpointError(f"{self._path} does not say how many layers it has")
        table = self._gguf.get_tensor_name_map(architecture, num_layers)
        translated: dict[str, str] = {}
        for name in names:
            stem, _, suffix = name.rpartition(".")
            known = table.get_name(stem) or table.get_name(f"model.{stem}")
            if known is not None and suffix in ("weight", "bias"):
                translated.setdefault(f"{known}.{suffix}", name)
        return translated

    def _piece(self, tensor: TensorInfo) -> _Piece:
        """Check that a tensor is whole and of a type that can be converted."""
        where = f"{self._path}: {tensor.name}"
        try:
            kind = self._gguf.GGMLQuantizationType(tensor.type_number)
            block, block_nbytes = self._gguf.GGML_QUANT_SIZES[kind]
            with np.errstate(all="ignore"):
                self._gguf.dequantize(np.zeros(block_nbytes, np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise CheckpointError(
                f"{where} is stored as type {tensor.type_number}, which cannot be converted: "
                f"{error}"
            ) from error
        if not tensor.shape or tensor.shape[-1] % block:
            raise CheckpointError(f"{where} has the shape {tensor.shape}, in blocks of {block}")
        shape, num_heads = tensor.shape, 0
        for part, key in ((".attn_q.", "head_count"), (".attn_k.", "head_count_kv")):
            if _PERMUTED[self._architecture] and part in tensor.name:
                num_heads = self._num_heads(key, where, tensor.shape)
        if num_heads and len(shape) == 1:
            shape = (*shape, 1)  # a bias: its elements are the rows
            if block > 1:
                raise CheckpointError(f"{where}, a bias, is stored in blocks, out of order")
        piece = _Piece(shape, tensor.offset_bytes, kind, block, block_nbytes, num_heads)
        if piece.end > len(self._file):
            raise CheckpointError(
                f"{self._path} is cut short: {tensor.name} ends at byte {piece.end} of "
                f"{len(self._file)}"
            )
        return piece

    def _num_heads(self, key: str, where: str, shape: tuple[int, ...]) -> int:
        prefix = f"{self._architecture}.attention"
        heads = self._fields.get(f"{prefix}.{key}", self._fields.get(f"{prefix}.head_count"))
        if not isinstance(heads, int) or heads < 1 or shape[0] % (2 * heads):
            raise CheckpointError(
                f"{where}: its rows cannot be put in order, because its shape {shape} does not "
                f"fit {prefix}.{key} = {heads}"
            )
        return heads


@dataclass(frozen=True)
class _Piece:
    """Where a tensor lies in the file, and how.

    Attributes:
        shape: of the tensor, with a last dimension of 1 if it is a bias with heads.
        kind: the gguf package's type.
        block, block_nbytes: elements and bytes of a block; 1 and the item's size if not quantised.
        num_heads: heads whose rows are in llama.cpp's rotary order, or 0.
    """

    shape: tuple[int, ...]
    offset_bytes: int
    kind: Any
    block: int
    block_nbytes: int
    num_heads: int

    @property
    def row_nbytes(self) -> int:
        return self.shape[-1] // self.block * self.block_nbytes

    @property
    def end(self) -> int:
        return self.offset_bytes + math.prod(self.shape[:-1]) * self.row_nbytes

    def data(self, file: np.memmap[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        """The bytes, with rows of bytes as the last dimension."""
        return file[self.offset_bytes : self.end].reshape(*self.shape[:-1], self.row_nbytes)


def _file_rows(rows: slice, num_rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the rows of a projection lie in the file.

    llama.cpp rotates neighbours, transformers the two halves of a head: row ``half * dim + i`` of a
    head is stored at ``2 * i + half``.
    """
    row = np.arange(rows.start, rows.stop)
    head_rows = num_rows // heads
    head, within = np.divmod(row, head_rows)
    half, index = np.divmod(within, head_rows // 2)
    return head * head_rows + 2 * index + half
