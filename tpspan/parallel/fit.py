"""Whether a checkpoint fits a module, and which of its tensors goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpspan.errors import CheckpointError
from tpspan.parallel.checkpoint import Checkpoint
from tpspan.parallel.regions import Region

_MAX_LISTED = 20


@dataclass(frozen=True)
class Fit:
    """A checkpoint against a module.

    Attributes:
        sources: the name in the checkpoint to load each region from.
        duplicates: further names of a tied region that the checkpoint holds too.
        missing: names of regions that the checkpoint has under none of their names.
        unexpected: names that only the checkpoint has.
    """

    sources: dict[Region, str]
    duplicates: dict[Region, tuple[str, ...]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(cls, regions: Sequence[Region], checkpoint: Checkpoint, *, strict: bool) -> Fit:
        """Compare names, shapes and types.

        Raises:
            CheckpointError: lists everything that does not fit.
        """
        sources: dict[Region, str] = {}
        duplicates: dict[Region, tuple[str, ...]] = {}
        missing: list[str] = []
        misfits: list[str] = []
        for region in regions:
            present = [name for name in region.names if name in checkpoint.tensors]
            if not present:
                missing.append(region.names[0])
                continue
            sources[region] = present[0]
            if present[1:]:
                duplicates[region] = tuple(present[1:])
            misfits += [text for name in present if (text := _misfit(region, name, checkpoint))]
        known = {name for region in regions for name in region.names}
        unexpected = [name for name in checkpoint.tensors if name not in known]
        lists = {"misshapen": misfits}
        if strict:
            lists = {"missing": missing, "unexpected": unexpected, **lists}
        if any(lists.values()):
            raise CheckpointError(
                f"the {checkpoint.format_name} checkpoint does not fit the module, and nothing "
                f"was loaded: {'; '.join(_listed(*item) for item in lists.items() if item[1])}"
            )
        return cls(sources, duplicates, tuple(missing), tuple(unexpected))


def _misfit(region: Region, name: str, checkpoint: Checkpoint) -> str | None:
    stored, tensor = checkpoint.tensors[name], region.tensor
    if stored.shape != tuple(tensor.shape):
        return f"{name} is {stored.shape} in the file and {tuple(tensor.shape)} in the module"
    if not torch.can_cast(stored.dtype, tensor.dtype):
        return f"{name} is {stored.dtype} in the file and {tensor.dtype} in the module"
    return None


def _listed(kind: str, names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    more = f" and {rest} more" if rest > 0 else ""
    return f"{len(names)} {kind} ({', '.join(names[:_MAX_LISTED])}{more})"
