"""The whole tensor on every rank: ``copy_to``, one plain copy, and others' all-gather."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpspan.spans import Span
from tpspan.tools.bench import torch_peers, values
from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.measuring import Bench, Figure
from tpspan.tools.bench.reading import summing

GROUP = "gather"
_SALT = 11


def measure(bench: Bench, nbytes: int) -> None:
    """Times from ready shards to shards that may be written again, on all ranks. Collective."""
    span = values.allocate(bench.world, nbytes)
    values.fill(span, _SALT)
    out = torch.zeros(span.shape, dtype=span.dtype, device=bench.world.device)
    _measure(bench, span, out)
    bench.start_together()
    span.close()


def _measure(bench: Bench, span: Span, out: torch.Tensor) -> None:
    world = bench.world
    gathered = span.gathered
    size = shown(span.nbytes)
    with_barriers = "a barrier before and one after included"

    def copy_to() -> None:
        span.barrier()
        span.copy_to(out)
        span.barrier()

    def plain_copy() -> None:
        span.barrier()
        out.copy_(gathered)
        span.barrier()

    for name, body in (("copy_to", copy_to), ("plain copy_", plain_copy)):
        out.zero_()
        body()
        values.check_copy(world, out, _SALT, f"after {name}")
    # By turns, so that both meet the same machine.
    first, second = bench.on_stream(copy_to), bench.on_stream(plain_copy)
    both = bench.sample(lambda: (first(), second()), least=7, most=50)
    ours = _add(bench, f"{size}, copy_to", [one for one, _ in both], with_barriers)
    plain = _add(bench, f"{size}, one plain copy_", [one for _, one in both], with_barriers)
    total = torch.zeros((), dtype=values.DTYPE, device=world.device)
    read_gathered, read_out = summing(gathered, total), summing(out, total)

    def read_in_place() -> None:
        span.barrier()
        read_gathered()
        span.barrier()

    in_place = _time(bench, f"{size}, read in place", read_in_place, with_barriers)
    bench.add_ratio(GROUP, "copy_to sooner than one plain copy_", plain, ours)
    backend = "nccl" if bench.is_cuda else "gloo"
    their = f"{size}, {backend} all_gather_into_tensor"
    if bench.shares_device:
        bench.leave_out(GROUP, their, "us", torch_peers.SHARED)
        return
    shard = span.local.clone()

    def all_gather() -> None:
        torch_peers.all_gather(out, shard)

    out.zero_()
    all_gather()
    values.check_copy(world, out, _SALT, f"after {backend}")
    theirs = _time(bench, their, all_gather, "its own synchronisation")

    def gather_then_read() -> None:
        all_gather()
        read_out()

    then_read = _time(bench, f"{size}, {backend} all-gather, then read", gather_then_read, "")
    ready = _time(bench, f"{size}, ready to be read in place", span.barrier, "a barrier, no copy")
    bench.add_ratio(GROUP, f"copy_to sooner than {backend}", theirs, ours)
    bench.add_ratio(
        GROUP,
        f"read through the span sooner than after {backend}",
        then_read,
        in_place,
        "from ready shards until every byte of the gathered tensor has been read",
    )
    bench.add_ratio(GROUP, f"ready to be read sooner than after {backend}", theirs, ready)


def _time(bench: Bench, name: str, body: Callable[[], object], note: str) -> Figure:
    return _add(bench, name, bench.sample(bench.on_stream(body), least=7, most=50), note)


def _add(bench: Bench, name: str, samples: list[float], note: str) -> Figure:
    notes = "; ".join(filter(None, [note, bench.crowd if not bench.is_cuda else ""]))
    if bench.is_cuda:
        return bench.add_us(GROUP, name, samples, notes)
    return bench.add_ms(GROUP, name, samples, notes)
