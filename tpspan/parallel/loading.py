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
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from tpspan.errors import CheckpointError, CollectiveMismatch
from tpspan.launch.votes import Vote, attempt, settle
from tpspan.launch.world import World
from tpspan.parallel.boxes import box_shape, boxes_in_memory
from tpspan.parallel.checkpoint import Checkpoint, open_checkpoint
from tpspan.parallel.fit import Fit
from tpspan.parallel.regions import Region, dense_stride, group
from tpspan.parallel.shared import Entry, SharedParameters, find_shared

T = TypeVar("T")

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
    """Collective if the module is shared. Fill a module from a safetensors or GGUF checkpoint.

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
        PeerError: another rank did not come, or failed for a reason that is not the checkpoint's;
            it says whether the values are undefined.
    """
    begin = time.perf_counter()
    state = module.state_dict(keep_vars=True)
    regions = group((name, t) for name, t in state.items() if isinstance(t, torch.Tensor))
    targets = [_Target(region) for region in regions]
    shares = list(dict.fromkeys(target.shared for target in targets if target.shared))
    worlds = [share.span.world for share in shares]
    with ExitStack() as closing:

        def prepare() -> tuple[Checkpoint, Fit]:
            checkpoint = open_checkpoint(path, list(state))
            closing.callback(checkpoint.close)
            fit = Fit.of(regions, checkpoint, strict=strict)
            _check_writable(targets, shares)
            _check_ties(targets, fit, checkpoint)
            return checkpoint, fit

        checkpoint, fit = _together(
            worlds,
            "load_weights",
            prepare,
            outcome="nothing was loaded on any rank",
            digest=lambda prepared: _fingerprint(regions, prepared[0]),
        )
        written = _write_all(targets, fit, checkpoint, _bar(progress, worlds), worlds)
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
    if any(share.is_frozen for share in shares):
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


def _fingerprint(regions: Sequence[Region], checkpoint: Checkpoint) -> str:
    """A digest of what is loaded from what, the same on ranks that agree."""
    held = [(region.names, tuple(region.tensor.shape), region.tensor.dtype) for region in regions]
    stored = sorted(checkpoint.tensors.items())
    return hashlib.sha256(repr((held, stored)).encode()).hexdigest()


def _together(
    worlds: Sequence[World],
    what: str,
    step: Callable[[], T],
    *,
    outcome: str,
    digest: Callable[[T], str] = lambda value: "",
) -> T:
    """Collective. Take a step on all ranks of the worlds that share the module, or fail on all.

    What is wrong with a checkpoint is a ``CheckpointError`` on every rank, also on those that did
    not see it.

    Args:
        outcome: what a failure leaves behind.
        digest: of what the step returned; must be the same on all ranks.
    """
    value, caught, vote = attempt(0, step)
    mine = digest(cast(T, value)) if vote.text is None else ""
    # A rank has another number in each of the worlds.
    answers = [world.control.all_gather((Vote(vote.text, (world.rank,)), mine)) for world in worlds]
    for votes in [[said for said, _ in answer] for answer in answers] or [[vote]]:
        if vote.text is None:
            _raise_checkpoint_error(votes)
        settle(what, caught, votes, outcome=outcome)
    for answer in answers:
        requests = {rank: f"digest {theirs[:12]}" for rank, (_, theirs) in enumerate(answer)}
        if len(set(requests.values())) > 1:
            raise CollectiveMismatch(f"{what} (module and checkpoint)", requests)
    return cast(T, value)


def _raise_checkpoint_error(votes: Sequence[Vote]) -> None:
    for rank, vote in enumerate(votes):
        kind, _, text = (vote.text or "").partition(": ")
        if kind == CheckpointError.__name__:
            raise CheckpointError(f"on rank {rank}: {text}")


def _write_all(
    targets: Sequence[_Target],
    fit: Fit,
    checkpoint: Checkpoint,
    bar: Progress,
    worlds: Sequence[World],
) -> int:
    """Collective. Fill what this rank owns; returns the bytes, once all ranks have done so."""
    chosen = [target for target in targets if target.region in fit.sources]
    total = sum(target.nbytes for target in chosen)

    def write() -> None:
        with bar, torch.no_grad():
            task = bar.add_task("loading", total=total)
            for target in chosen:
                source = fit.sources[target.region]
                _write(target, checkpoint, source, lambda nbytes: bar.advance(task, nbytes))
            for device in {target.tensor.device for target in chosen}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    _together(worlds, "load_weights", write, outcome="left the parameters undefined")
    return total


def _write(
    target: _Target, checkpoint: Checkpoint, source: str, advance: Callable[[int], None]
) -> None:
    for box in target.boxes():
        # Converted on the CPU, whatever the device, so that all devices round alike.
        try:
            values = checkpoint.read(source, box).to(target.tensor.dtype)
        except Exception as error:
            raise CheckpointError(
                f"reading failed halfway, so the parameters are undefined: {error}"
            ) from error
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
