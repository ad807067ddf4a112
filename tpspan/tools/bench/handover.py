"""Handing an activation over, alone and behind the product that makes it: ours, a copy, torch's.

Rank 0 hands over to rank 1; other ranks look on. A size is what is handed over. Many hand-overs
follow each other, as in a pipeline: what is measured is the time from one to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tpspan.parallel import Handoff
from tpspan.parallel.packing import Packed
from tpspan.tools.bench import torch_peers
from tpspan.tools.bench.allocating import shown
from tpspan.tools.bench.measuring import Bench
from tpspan.tools.bench.sweep import Contender, Role, Row, SetUp, Stage, integers, sweep

ALONE = "hand-over"
PRODUCT = "product, then hand-over"
_MODULUS = 251
_GIVER, _TAKER = 0, 1
_WIDTHS = {"host": (128, 512), "cuda": (8192, 8192)}  # columns of x, and of what is handed over


@dataclass
class _Activation:
    """What is handed over at one size.

    Attributes:
        source: it, in ordinary memory, on every rank.
        write: makes it in a given tensor, as the operation that is measured does; None if the
            hand-over is measured alone, of what lies in the block already.
        is_checked: the values are looked at: they are written first, and kept for the check.
    """

    source: torch.Tensor
    write: Callable[[torch.Tensor], object] | None = None
    is_checked: bool = field(default=False)

    def fill(self, tensor: torch.Tensor) -> None:
        """Put it into a block, as far as the operation demands."""
        if self.write is not None:
            self.write(tensor)
        elif self.is_checked:
            tensor.copy_(self.source)

    def result(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is looked at, while it is there."""
        return tensor.clone() if self.is_checked else None


def measure(bench: Bench, sizes: tuple[int, ...], dtype: torch.dtype, *, depth: int) -> list[Row]:
    """The rows of both operations at all sizes. Collective.

    Args:
        depth: blocks of each channel.
    """

    def set_up(with_product: bool) -> SetUp:
        return lambda bench, nbytes, dtype: _set_up(bench, nbytes, dtype, depth, with_product)

    rows = sweep(bench, ALONE, set_up(False), sizes, dtype)
    rows += sweep(bench, PRODUCT, set_up(True), sizes, dtype)
    for row in rows:
        _compare_remap(bench, row)
    return rows


def _compare_remap(bench: Bench, row: Row) -> None:
    """The sweep compares one of ours with the peers; the other is compared here."""
    group = f"{row.operation}, {shown(row.nbytes)}"
    found = {each.name: each for each in bench.figures if each.group == group}
    if row.best_peer is not None and "remap" in found and row.best_peer in found:
        peer, ours = found[row.best_peer], found["remap"]
        bench.add_ratio(group, f"{row.best_peer} / remap", peer, ours)


@contextlib.contextmanager
def _set_up(
    bench: Bench, nbytes: int, dtype: torch.dtype, depth: int, with_product: bool
) -> Iterator[Stage]:
    """Channels and tensors for ``nbytes``, at least a row. Collective."""
    world = bench.world
    num_k, num_n = _WIDTHS[world.backend]
    rows = max(1, nbytes // (num_n * dtype.itemsize))
    shape = (rows, num_n)
    factors: list[torch.Tensor] = []
    if with_product:
        # A one in 64 numbers of x, and small integers in w: their sums are exact even in bf16, in
        # whatever order they are added up.
        x = integers(0, 0, rows * num_k, 64, dtype, world.device).view(rows, num_k).eq_(0)
        w = integers(1, 0, num_k * num_n, 3, dtype, world.device).view(num_k, num_n) - 1
        activation = _Activation(x @ w, lambda out: torch.mm(x, w, out=out))
        factors = [x, w]
    else:
        whole = integers(0, 0, rows * num_n, _MODULUS, dtype, world.device)
        activation = _Activation(whole.view(shape))
    takes_part = world.rank in (_GIVER, _TAKER)
    with contextlib.ExitStack() as undo:

        def channel(mode: str) -> Handoff | None:
            if not takes_part:
                return None
            made = Handoff(world, _GIVER, _TAKER, activation.source.nbytes, mode=mode, depth=depth)
            undo.callback(made.close, force=True)
            return made

        def report() -> None:
            """How long the helper takes to remap, which on CUDA is none of the stream's time."""
            stats = None if remap is None else remap.stats()
            took_us, ran_us = (0.0, 0.0) if stats is None else (stats.remap_us, stats.remap_host_us)
            operation = PRODUCT if with_product else ALONE
            group = f"{operation}, {shown(nbytes)}"
            bench.add_us(group, "remap, the helper's part", [took_us / 1e6])
            note = "of that its thread ran; the rest it waited for the thread that launches"
            bench.add_us(group, "remap, the helper's host time", [ran_us / 1e6], note)

        window, remap = channel("window"), channel("remap")
        contenders = [
            _by_handoff("window", "ours", window, activation, "a block's own address; a signal"),
            _by_handoff("remap", "variant", remap, activation, "one address; blocks swapped"),
            _by_copy(window, activation),
            *_by_torch(bench, activation),
        ]
        if with_product:
            contenders.append(_product_alone(bench, activation))

        def fill() -> None:
            activation.is_checked = True

        def rest() -> None:
            activation.is_checked = False
            # What is multiplied decides what power a GPU takes, and so its clock: not small
            # integers, then, but numbers such as activations and weights are.
            for factor in factors:
                factor.normal_()

        def expected(start: int, stop: int) -> torch.Tensor:
            return activation.source.view(-1)[start:stop]

        try:
            yield Stage(contenders, fill, expected, rest)
            report()
        finally:
            bench.start_together()


def _packed(handoff: Handoff | None, activation: _Activation) -> Packed:
    """Where the activation lies in every slot."""
    source = activation.source
    return Packed() if handoff is None else handoff.pack([(source.shape, source.dtype)])


def _by_handoff(
    name: str,
    role: Role,
    handoff: Handoff | None,
    activation: _Activation,
    note: str,
) -> Contender:
    packed = _packed(handoff, activation)

    def body() -> torch.Tensor | None:
        if handoff is None:
            return activation.source
        with handoff.acquire() as slot:
            (tensor,) = slot.all_of(packed)
            if activation.is_checked:
                slot.wait_until_mapped()  # for what is copied in and out
            if handoff.is_producer:
                activation.fill(tensor)
                return activation.source
            return activation.result(tensor)

    return Contender(name, role, body, note)


def _by_copy(handoff: Handoff | None, activation: _Activation) -> Contender:
    """The producer computes into memory of its own and pushes a copy, told by the same signals."""
    packed = _packed(handoff, activation)
    own = torch.zeros_like(activation.source)

    def body() -> torch.Tensor | None:
        if handoff is None:
            return activation.source
        with handoff.acquire() as slot:
            (tensor,) = slot.all_of(packed)
            if not handoff.is_producer:
                return activation.result(tensor)
            activation.fill(own)
            if own.is_cuda:
                world = handoff.world
                stream = torch.cuda.current_stream(world.device).cuda_stream
                world.driver.copy(tensor.data_ptr(), own.data_ptr(), own.nbytes, stream)
            else:
                tensor.copy_(own)  # by all of torch's threads
            return activation.source

    return Contender("copy", "peer", body, "a push into the block, by copy engine on CUDA")


def _by_torch(bench: Bench, activation: _Activation) -> list[Contender]:
    """send and recv of torch's default group."""
    world = bench.world
    own = torch.zeros_like(activation.source)
    is_shared = bench.shares_device
    through_host = torch.zeros_like(own, device="cpu").pin_memory() if is_shared else own

    def body() -> torch.Tensor | None:
        if world.rank == _GIVER:
            activation.fill(own)
            if is_shared:
                through_host.copy_(own)
            dist.send(through_host, _TAKER)
        elif world.rank == _TAKER:
            dist.recv(through_host, _GIVER)
            if is_shared:
                own.copy_(through_host)
            return activation.result(own)
        return activation.source

    if not bench.is_cuda:
        return [Contender("gloo", "peer", body, "send and recv")]
    if not is_shared:
        return [Contender("nccl", "peer", body, "send and recv")]
    return [
        Contender("nccl", "peer", None, torch_peers.SHARED),
        Contender("gloo", "peer", body, "send and recv through host memory"),
    ]


def _product_alone(bench: Bench, activation: _Activation) -> Contender:
    """The product into memory of its own, handed to nobody."""
    own = torch.zeros_like(activation.source)

    def body() -> torch.Tensor:
        if bench.world.rank == _GIVER:
            activation.fill(own)
            return own
        return activation.source

    return Contender("product alone", "floor", body, "handed to nobody")
