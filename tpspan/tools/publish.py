"""``tpspan publish``: put the tensors of a safetensors checkpoint under a name."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import tpspan
from tpspan.errors import CheckpointError, TpspanError
from tpspan.parallel.checkpoint import open_checkpoint
from tpspan.tools.bench.command import num_bytes
from tpspan.tools.listing import size


def main(argv: Sequence[str] | None = None) -> int:
    """Read the file into published memory; returns the exit status."""
    arguments = argparse.ArgumentParser(
        prog="tpspan publish",
        description="Publish the tensors of a safetensors file, of an index of several, or of a "
        "directory with them. This command ends; the memory stays with the keeper until the name "
        "is removed. A name whose publisher has ended gets a new version.",
    )
    add = arguments.add_argument
    add("path", type=Path, metavar="FILE")
    add("--name", help="what to publish it under; by default the name of the file or directory")
    add("--device", default="cpu", help="cpu (the default) or cuda:N")
    add("--dtype", help="convert floating-point tensors, to bfloat16 for example")
    add("--keep", type=int, default=2, metavar="N", help="versions to keep (default 2)")
    add("--block-size", type=num_bytes, metavar="BYTES", help="pieces in which versions differ")
    add(
        "--stay",
        action="store_true",
        help="stay as the publisher, which brings the memory to the next keeper if one is killed",
    )
    options = arguments.parse_args(sys.argv[1:] if argv is None else list(argv))
    name = options.name or options.path.resolve().name.removesuffix(".safetensors")
    try:
        begin = time.perf_counter()
        publication = publish_file(
            options.path,
            name,
            device=options.device,
            dtype=_dtype(options.dtype),
            keep=options.keep,
            block_nbytes=options.block_size,
        )
        print(
            f"{name}: version {publication.version}, {size(publication.nbytes)} in "
            f"{len(publication.layout.entries)} tensors on {options.device}, in "
            f"{time.perf_counter() - begin:.2f} s"
        )
        if options.stay:
            sys.stdout.flush()
            threading.Event().wait()
        publication.close()
    except (TpspanError, ValueError, TypeError, RuntimeError) as error:
        print(f"tpspan publish: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def publish_file(
    path: Path,
    name: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    keep: int = 2,
    block_nbytes: int | None = None,
) -> tpspan.Publication:
    """Publish what a checkpoint holds, read tensor by tensor into the published memory.

    Raises:
        CheckpointError: there is no such file, or it is none of safetensors.
        TpspanError: it could not be published.
    """
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} is a GGUF file, whose tensors have other names and types than a module's: "
            "build the module, load it with tpspan.load_weights, and publish the module"
        )
    checkpoint = open_checkpoint(path, ())
    try:
        empty = {
            each: torch.empty(
                stored.shape,
                dtype=dtype if dtype and stored.dtype.is_floating_point else stored.dtype,
                device="meta",
            )
            for each, stored in checkpoint.tensors.items()
        }
        publication = tpspan.publish(
            empty, name, device=device, read_only=True, keep=keep, block_nbytes=block_nbytes
        )
        publication.thaw()
        for each, stored in checkpoint.tensors.items():
            box = tuple(slice(0, length) for length in stored.shape)
            publication[each].copy_(checkpoint.read(each, box))
        publication.commit()
    finally:
        checkpoint.close()
    return publication


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


if __name__ == "__main__":
    sys.exit(main())
