"""Weights from files into a module, each rank filling only the pages it owns.

Everything that can be wrong is looked for before the first write, on all ranks; then each rank
reads the boxes of elements that lie on its pages and converts them straight into the mapping.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from tpspan.errors import CheckpointError, CollectiveMismatch
from tpspan.launch.world import World
from tpspan.parallel.boxes import box_shape, boxes_in_memory
from tpspan.parallel.checkpoint import Checkpoint, open_checkpoint
from tpspan.parallel.fit import Fit
from tpspan.parallel.regions import Region, dense_stride, group
from tpspan.parallel.shared import Entry, SharedParameters, find_shared

_CHUNK = 2 << 20
"""Elements converted at a time. Dequantising takes about 12 bytes for each: 24 MiB of scratch."""


@dataclass(frozen=True)
class LoadReport:
    """What ``load_weights`` did on this rank.

    Attributes:
        path, format_name: the checkpoint.
        num_tensors: tensors of the module that were loaded, ties counted once.
        nbytes: bytes that this rank wrote.
        missing: names in the module but not in the checkpoint (only with ``strict=False``).
        unexpected: names in the checkpoint but not in the module (only with ``strict=False``).
        ignored: tensors of the checkpoint that are tables, not weights.
        seconds: from the call to the end, waiting for the other ranks included.
    """

    path: str
    format_name: str
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    seconds: float


def load_weights(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    progress: bool = True,
) -> LoadReport:
    """Fill a module from a safetensors or GGUF checkpoint. Collective if the module is shared.

    Parameters and persistent buffers are loaded. Of a shared tensor each rank reads and converts
    what lies on its own pages; what is not shared is loaded whole. Values are converted to the type
    of the parameter. GGUF tensors are dequantised and brought into the names and the row order that
    transformers uses. Scratch memory stays under 64 MiB.

    Args:
        module: parameters must have memory: shared, or real.
        path: a ``.safetensors`` or ``.gguf`` file, an ``.index.json``, or a directory with these.
        strict: missing and unexpected tensors are an error; otherwise they are only reported.
        progress: show a bar on rank 0, if standard error is a terminal.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen (all are listed), the file is
            damaged or of another format. It is raised on all ranks, and nothing was loaded. If
            reading fails later, on a file that changes meanwhile, it says that the values are
            undefined.
        CollectiveMismatch: the ranks gave modules or files that differ; nothing was loaded.
    """
    begin = time.perf_counter()
    state = module.state_dict(keep_vars=True)
    regions = group((name, t) for name, t in state.items() if isinstance(t, torch.Tensor))
    targets = [_Target(region) for region in regions]
    shares = list(dict.fromkeys(target.shared for target in targets if target.shared))
    worlds = [share.span.world for share in shares]
    fit: Fit | None = None
    problem: Exception | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(path, list(state))
        fit = Fit.of(regions, checkpoint, strict=strict)
        _check_writable(targets, shares)
        _check_ties(targets, fit, checkpoint)
    except Exception as error:
        problem = error
    try:
        _vote(worlds, problem, _fingerprint(regions, checkpoint))
        assert checkpoint is not None and fit is not None
        written = _write_all(targets, fit, checkpoint, _bar(progress, worlds), worlds)
    finally:
        problem = None  # an error and the frame that holds it would keep each other alive
        if checkpoint is not None:
            checkpoint.close()
    for share in shares:
        if share.read_only:
            share.freeze()
    return LoadReport(
        path=os.fspath(path),
        format_name=checkpoint.format_name,
        num_tensors=len(fit.sources),
        nbytes=written,
        missing=fit.missing,
        unexpected=fit.unexpected,
        ignored=tuple(checkpoint.ignored),
        seconds=time.perf_counter() - begin,
    )


class _Target:
    """A region of the module, and the ranges of it that this rank fills."""

    def __init__(self, region: Region) -> None:
        self.region = region
        found = find_shared(region.tensor)
        self.shared: SharedParameters | None = found[0] if found else None
        self.entry: Entry | None = found[1] if found else None

    @property
    def tensor(self) -> torch.Tensor:
        """What is filled. Not kept: a view in the traceback of an error would hold the span."""
        return self.region.tensor.detach()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank fills."""
        return sum(end - begin for begin, end in self._ranges()) * self.tensor.element_size()

    def boxes(self) -> Iterator[tuple[slice, ...]]:
        """What this rank fills, in the order of memory, in pieces that fit the scratch."""
        shape, stride = self.tensor.shape, dense_stride(self.tensor)
        for begin, end in self._ranges():
            yield from boxes_in_memory(shape, stride, begin, end, _CHUNK)

    def _ranges(self) -> list[tuple[int, int]]:
        """Ranges of elements, counted in memory. Pages and tensors begin at whole elements."""
        if self.shared is None or self.entry is None or not self.entry.nbytes:
            return [(0, self.tensor.numel())]
        span, first = self.shared.span, self.entry.offset_bytes
        size = self.tensor.element_size()
        slices = span.layout.owned_slices(span.world.rank, first, self.entry.nbytes)
        return [((at - first) // size, (at - first + nbytes) // size) for at, nbytes in slices]


def _check_writable(targets: Sequence[_Target], shares: Sequence[SharedParameters]) -> None:
    on_meta = [target.region.names[0] for target in targets if target.tensor.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{len(on_meta)} tensors are on the meta device and have no memory to load into, "
            f"{on_meta[0]} among them: call share_parameters or to_empty first"
        )
    if any(share.frozen for share in shares):
        raise CheckpointError("the parameters are mapped read-only; thaw() them before loading")


def _check_ties(targets: Sequence[_Target], fit: Fit, checkpoint: Checkpoint) -> None:
    """What is one tensor in the module must not be two in the file."""
    for target in targets:
        names = fit.duplicates.get(target.region, ())
        for name in names:
            for box in target.boxes():
                first = checkpoint.read(fit.sources[target.region], box)
                if not torch.equal(first, checkpoint.read(name, box)):
                    raise CheckpointError(
                        f"{fit.sources[target.region]} and {name} are tied in the module, but "
                        "differ in the file; nothing was loaded"
                    )


def _fingerprint(regions: Sequence[Region], checkpoint: Checkpoint | None) -> str:
    """A digest of what is loaded from what, the same on ranks that agree."""
    held = [(region.names, tuple(region.tensor.shape), region.tensor.dtype) for region in regions]
    stored = sorted(checkpoint.tensors.items()) if checkpoint is not None else []
    return hashlib.sha256(repr((held, stored)).encode()).hexdigest()


def _vote(worlds: Sequence[World], problem: Exception | None, fingerprint: str) -> None:
    """Fail on all ranks if one has a problem or loads something else."""
    text = None if problem is None else str(problem) or type(problem).__name__
    votes = [world.control.all_gather((text, fingerprint)) for world in worlds]
    if problem is not None:
        try:
            raise problem
        finally:
            del problem
    for answers in votes:
        for rank, (theirs, _) in enumerate(answers):
            if theirs is not None:
                raise CheckpointError(f"on rank {rank}: {theirs}")
        digests = {rank: digest for rank, (_, digest) in enumerate(answers)}
        if len(set(digests.values())) > 1:
            requests = {rank: f"digest {digest[:12]}" for rank, digest in digests.items()}
            raise CollectiveMismatch("load_weights (module and checkpoint)", requests)


def _write_all(
    targets: Sequence[_Target],
    fit: Fit,
    checkpoint: Checkpoint,
    bar: Progress,
    worlds: Sequence[World],
) -> int:
    """Fill what this rank owns; returns the bytes written, once every rank has written its own."""
    chosen = [target for target in targets if target.region in fit.sources]
    total = sum(target.nbytes for target in chosen)
    problem: Exception | None = None
    try:
        with bar, torch.no_grad():
            task = bar.add_task("loading", total=total)
            for target in chosen:
                _write(
                    target,
                    checkpoint,
                    fit.sources[target.region],
                    lambda nbytes: bar.advance(task, nbytes),
                )
            for device in {target.tensor.device for target in chosen}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    except Exception as error:
        problem = error
    for world in worlds:
        failed = world.control.all_gather(None if problem is None else str(problem))
        for rank, text in enumerate(failed):
            if text is not None and problem is None:
                problem = CheckpointError(f"on rank {rank}: {text}")
    if problem is not None:
        try:
            raise CheckpointError(
                f"reading failed halfway, so the parameters are undefined: {problem}"
            ) from problem
        finally:
            del problem
    return total


def _write(
    target: _Target, checkpoint: Checkpoint, source: str, advance: Callable[[int], None]
) -> None:
    for box in target.boxes():
        # Converted on the CPU, whatever the device, so that all devices round alike.
        values = checkpoint.read(source, box).to(target.tensor.dtype)
        (target.tensor[box] if box else target.tensor).copy_(values)
        advance(math.prod(box_shape(box)) * target.tensor.element_size())


def _bar(progress: bool, worlds: Sequence[World]) -> Progress:
    on_rank_0 = all(world.rank == 0 for world in worlds)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (progress and on_rank_0 and sys.stderr.isatty()),
    )
