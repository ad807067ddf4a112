"""One operation over many sizes, everybody who can carry it out by turns: checked, then timed.

A *contender* is one way to carry the operation out. Those that are ours are compared with the best
peer of the same size, and with a floor: copying the bytes, without telling anybody.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.measuring import Bench, Figure
from tpspan.tools.bench.values import WrongValues

# A variant is another way of ours, which no ratio is made of here.
Role = Literal["ours", "in place", "variant", "peer", "barrier", "floor"]

# bf16 holds all integers up to this: what is added up stays exact in every order.
_EXACT = 256
_CHUNK = 4 << 20
_SETTLE_S, _MOST_BEFORE = 0.03, 48  # fewer than a host may be ahead of remaps
_SAMPLE_S, _MOST_CALLS = 2e-3, 50
_MOST_TOGETHER = 15
# Of ranks that share a GPU: a hundred times what a process waits for its time slice.
_SHARED_SAMPLE_S, _MOST_SHARED_CALLS = 24e-3, 200
# Beyond this a second check in bf16 says nothing new, and takes long.
_BF16_NBYTES = 16 << 20
# A peer that took longer for one call is not asked for a larger one: gloo's are seconds on a GPU.
_PATIENCE_S = 0.3
# One that took longer for its first call of a size is not timed there: it would take minutes.
_MOST_PATIENCE_S = 5.0
# The first calls are slow: pages are touched, caches filled, and Python learns what is called.
_WARM_CALLS = 25
_WARM_S = 0.02


@dataclass(frozen=True)
class Contender:
    """One way to carry an operation out.

    Attributes:
        name: of its column.
        role: what it is compared as.
        body: one call; returns the tensor that holds the result, None if there is none to check.
            None if it was left out, and ``note`` says why.
        note: what to know when reading its figures.
    """

    name: str
    role: Role
    body: Callable[[], torch.Tensor | None] | None
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """Tensors of one size and dtype, and everybody who works on them.

    Attributes:
        contenders: in the order of the table.
        fill: write the inputs that ``expected`` belongs to, and wipe the outputs.
        expected: elements ``start`` to ``stop`` of a result.
        rest: inputs that may be worked on many times over, for timing.
    """

    contenders: Sequence[Contender]
    fill: Callable[[], None]
    expected: Callable[[int, int], torch.Tensor]
    rest: Callable[[], None]


SetUp: TypeAlias = Callable[[Bench, int, torch.dtype], contextlib.AbstractContextManager[Stage]]


@dataclass(frozen=True)
class Row:
    """What one size came to.

    Attributes:
        operation, nbytes: what was measured.
        us: microseconds of each contender, medians of the slowest rank; None if left out. On CUDA
            of calls queued ahead one after another, so that no host is waited for.
        host_us: on CUDA the host's part of a call; otherwise empty.
        alone_us: on CUDA one call that all ranks begin together: with a GPU each, at a barrier of
            their streams; if they share one, on an idle device, from when the host begins.
        best_peer: the fastest of the peers; None if there was none.
        ratio: how many times longer than ours the best peer takes.
        ratio_alone: the same of calls alone, with the peer that is fastest then.
        share_of_floor: the floor as a share of ours: 1 is as fast as copying alone.
        barriers_in_place: how many barriers gathering in place takes; None for what has no such.
    """

    operation: str
    nbytes: int
    us: dict[str, float | None]
    host_us: dict[str, float]
    alone_us: dict[str, float]
    best_peer: str | None
    ratio: float | None
    ratio_alone: float | None
    share_of_floor: float | None
    barriers_in_place: float | None


def integers(
    rank: int, start: int, stop: int, modulus: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A rank's elements ``start`` to ``stop``: integers below ``modulus``, others on each rank."""
    index = torch.arange(start, stop, dtype=torch.int32, device=device)
    return index.mul_(7).add_(29 * rank + 1).remainder_(modulus).to(dtype)


def modulus_of_sums(world_size: int) -> int:
    """Below what the ranks' integers stay, so that their sum is exact in every dtype."""
    return max(2, _EXACT // world_size)


def sweep(
    bench: Bench, operation: str, set_up: SetUp, sizes: Sequence[int], dtype: torch.dtype
) -> list[Row]:
    """Check and time an operation at every size. Collective.

    Args:
        set_up: makes the stage for a number of bytes, for its lifetime.

    Raises:
        WrongValues: somebody gave a wrong result, here; PeerError on the other ranks.
    """
    rows = []
    too_slow: dict[str, str] = {}
    for nbytes in sizes:
        if nbytes <= _BF16_NBYTES and dtype != torch.bfloat16:
            _checked(bench, operation, set_up, nbytes, too_slow)
        rows.append(_measured(bench, operation, set_up, nbytes, dtype, too_slow))
    return rows


# One size each: what it took is given back before the next is made.
def _checked(
    bench: Bench, operation: str, set_up: SetUp, nbytes: int, too_slow: dict[str, str]
) -> None:
    with set_up(bench, nbytes, torch.bfloat16) as stage:
        _usable(bench, stage, f"{operation} of {shown(nbytes)}, bf16", too_slow)


def _measured(
    bench: Bench,
    operation: str,
    set_up: SetUp,
    nbytes: int,
    dtype: torch.dtype,
    too_slow: dict[str, str],
) -> Row:
    with set_up(bench, nbytes, dtype) as stage:
        contenders = _usable(bench, stage, f"{operation} of {shown(nbytes)}", too_slow)
        stage.rest()
        row = _measure(bench, operation, nbytes, contenders)
    for contender in contenders:
        took_s = (row.us[contender.name] or 0.0) / 1e6
        if contender.role == "peer" and took_s > _PATIENCE_S:
            too_slow[contender.name] = f"n/a: {took_s:.1f} s for {shown(nbytes)}"
    return row


def _usable(bench: Bench, stage: Stage, what: str, too_slow: dict[str, str]) -> list[Contender]:
    """Try and check everybody; a peer that refuses is left out, a wrong value ends the bench.

    Args:
        too_slow: the peers that took too long for a smaller size, and what to say of them.
    """
    found = []
    for contender in stage.contenders:
        if contender.body is None:
            found.append(contender)
            continue
        if contender.name in too_slow:
            found.append(replace(contender, body=None, note=too_slow[contender.name]))
            continue
        stage.fill()
        bench.start_together()
        result, refusal = None, ""
        start = time.perf_counter()
        try:
            result = contender.body()
            bench.synchronize()
        except (RuntimeError, ValueError) as error:  # how torch says what it does not support
            if contender.role != "peer":
                raise
            refusal = f"n/a: {str(error).splitlines()[0][:120]}"
        took_s = bench.agree(time.perf_counter() - start)
        refusal = next(filter(None, bench.board.all_gather(refusal)), "")
        if not refusal and result is not None:
            bench.start_together()
            _check(bench, stage, result, f"{what}, {contender.name}")
        if not refusal and contender.role == "peer" and took_s > _MOST_PATIENCE_S:
            refusal = f"n/a: {took_s:.1f} s for one call"
        found.append(replace(contender, body=None, note=refusal) if refusal else contender)
    return found


def _check(bench: Bench, stage: Stage, result: torch.Tensor, what: str) -> None:
    flat = result.detach().reshape(-1)

    def compare() -> None:
        for start in range(0, flat.numel(), _CHUNK):
            stop = min(start + _CHUNK, flat.numel())
            wrong = flat[start:stop] != stage.expected(start, stop)
            if bool(wrong.any()):
                first = start + int(wrong.nonzero()[0])
                raise WrongValues(
                    f"{what}: {int(wrong.sum())} of elements {start} to {stop} are wrong, the "
                    f"first is element {first}, which is {float(flat[first])}"
                )

    bench.board.together(f"checking values, {what}", compare)


def _measure(bench: Bench, operation: str, nbytes: int, contenders: Sequence[Contender]) -> Row:
    """Time everybody by turns, in another order each time, so that all meet the same machine.

    A GPU that has idled is faster for a while, and nobody is to come behind the same one always.
    """
    takes_part = [contender for contender in contenders if contender.body is not None]
    timed = [
        _timed(bench, contender.body, meets=contender.role != "floor") for contender in takes_part
    ]

    dice = random.Random(nbytes)  # the same on all ranks

    def once() -> list[tuple[float, float, float]]:
        taken = [(0.0, 0.0, 0.0)] * len(timed)
        for index in dice.sample(range(len(timed)), len(timed)):
            bench.start_together()
            taken[index] = timed[index]()
        return taken

    samples = bench.sample(once, least=7, most=60)
    group = f"{operation}, {shown(nbytes)}"
    figures: dict[str, Figure] = {}
    host_us: dict[str, float] = {}
    alone_us: dict[str, float] = {}
    for contender in contenders:
        if contender.body is None:
            bench.leave_out(group, contender.name, "us", contender.note)
    for index, contender in enumerate(takes_part):
        mine = [sample[index] for sample in samples]
        note = "; ".join(filter(None, [contender.note, "" if bench.is_cuda else bench.crowd]))
        name = contender.name
        streams, hosts, alone = zip(*mine, strict=True)
        figures[name] = bench.add_us(group, name, streams, note)
        if bench.is_cuda:
            found = bench.add_us(group, f"{name}, host time", hosts, note)
            host_us[name] = found.median or 0.0
            found = bench.add_us(group, f"{name}, alone", alone, note)
            alone_us[name] = found.median or 0.0
    return _row(operation, nbytes, contenders, figures, host_us, alone_us)


def _timed(bench: Bench, body: Any, *, meets: bool) -> Callable[[], tuple[float, float, float]]:
    """Seconds of a call in a queue of many, of the host's part, and of a call alone."""

    def seconds_each(num_calls: int) -> float:
        bench.start_together()
        start = time.perf_counter()
        for _ in range(num_calls):
            body()
        bench.synchronize()
        return bench.agree(time.perf_counter() - start) / num_calls

    num_warm = int(min(_WARM_CALLS, max(1, _WARM_S / seconds_each(1))))
    call_s = seconds_each(num_warm)
    fewest, sample_s, most = 4, _SAMPLE_S, _MOST_CALLS
    if bench.shares_device:
        fewest, sample_s, most = 10, _SHARED_SAMPLE_S, _MOST_SHARED_CALLS
    if call_s > _SETTLE_S / 4:
        fewest = 1
    num_calls = int(min(most, max(fewest, sample_s / call_s)))
    # Before what is timed: takes up what the ranks started apart, and brings the GPU to the clock
    # that it keeps under this load, whoever idled or worked before.
    num_before = int(max(num_calls // 4 + 1, min(_MOST_BEFORE, _SETTLE_S / call_s)))

    def on_host() -> tuple[float, float, float]:
        start = time.perf_counter()
        for _ in range(num_calls):
            body()
        took = (time.perf_counter() - start) / num_calls
        return took, took, took

    def on_stream() -> tuple[float, float, float]:
        queued_s, host_s = bench.queued(body, num_calls, num_before, meets=meets)
        bench.start_together()
        if not bench.shares_device:
            return queued_s, host_s, bench.begun_together(body, min(num_calls, _MOST_TOGETHER))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        return queued_s, host_s, begin.elapsed_time(end) / 1e3

    return on_stream if bench.is_cuda else on_host


def _row(
    operation: str,
    nbytes: int,
    contenders: Sequence[Contender],
    figures: dict[str, Figure],
    host_us: dict[str, float],
    alone_us: dict[str, float],
) -> Row:
    def of(role: Role) -> Iterator[tuple[float, str]]:
        for contender in contenders:
            figure = figures.get(contender.name)
            if contender.role == role and figure is not None and figure.median:
                yield figure.median, contender.name

    ours, in_place = (next(of(role), (None, ""))[0] for role in ("ours", "in place"))
    floor, barrier = (next(of(role), (None, ""))[0] for role in ("floor", "barrier"))
    best, best_name = min(of("peer"), default=(None, None))
    peers = {contender.name for contender in contenders if contender.role == "peer"}
    best_alone = min((us for name, us in alone_us.items() if name in peers), default=None)
    ours_alone = next((alone_us.get(c.name) for c in contenders if c.role == "ours"), None)
    us = {
        contender.name: figures[contender.name].median if contender.name in figures else None
        for contender in contenders
    }
    return Row(
        operation,
        nbytes,
        us,
        host_us,
        alone_us,
        best_name,
        best / ours if best and ours else None,
        best_alone / ours_alone if best_alone and ours_alone else None,
        floor / ours if floor and ours else None,
        in_place / barrier if in_place and barrier else None,
    )
