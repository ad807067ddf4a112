"""What every checkpoint format offers to the loader, and which format a path holds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from tpspan.errors import CheckpointError
from tpspan.parallel.boxes import Box
from tpspan.parallel.checkpoint_gguf import GgufCheckpoint
from tpspan.parallel.checkpoint_safetensors import SafetensorsCheckpoint
from tpspan.parallel.stored import StoredTensor

_INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Tensors in files, by the names that the module uses.

    Opening one checks that every tensor lies wholly in its file.
    """

    @property
    def format_name(self) -> str:
        """``"safetensors"`` or ``"GGUF"``."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor, by the module's name for it, or by the file's own where it has none."""

    @property
    def ignored(self) -> Sequence[str]:
        """Tensors of the file that no module holds as weights, such as tables of frequencies."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read what a box selects, on the CPU, as the shape of the box."""

    def close(self) -> None:
        """Close the files."""


def open_checkpoint(path: str | os.PathLike[str], names: Sequence[str]) -> Checkpoint:
    """Open a safetensors file, an index of several, a GGUF file, or a directory with one of these.

    Args:
        path: the file or directory.
        names: the names of the module's tensors, which GGUF's are translated to.

    Raises:
        CheckpointError: there is no such file, it is damaged, or of a format we do not read.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path, names)
    if not path.is_file():
        raise CheckpointError(f"there is no file or directory {path}")
    if path.name.endswith(".index.json"):
        return SafetensorsCheckpoint.from_index(path)
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint([path])
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, names)
    raise CheckpointError(
        f"{path} is neither a .safetensors nor a .gguf file nor a .safetensors.index.json; these "
        "are the formats that can be loaded"
    )


def _open_directory(path: Path, names: Sequence[str]) -> Checkpoint:
    if (path / _INDEX).is_file():
        return SafetensorsCheckpoint.from_index(path / _INDEX)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return SafetensorsCheckpoint.from_index(indices[0])
    if (path / "model.safetensors").is_file():
        return SafetensorsCheckpoint([path / "model.safetensors"])
    files = sorted(path.glob("*.safetensors"))
    if files:
        return SafetensorsCheckpoint(files)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0], names)
    if files:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files ({', '.join(file.name for file in files[:5])}); "
            "give the path of one"
        )
    raise CheckpointError(f"{path} holds neither safetensors nor GGUF files")
