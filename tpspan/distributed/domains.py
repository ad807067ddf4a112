"""Gathering among ranks of several domains: one transfer per remote byte and domain, then mapped.

A rank sends its piece once to every other domain, to the rank there whose turn it is: the receivers
of a domain take the remote ranks in turn, so that all of them share the work. What a domain has
received is then gathered among its ranks through the memory they map, like their own pieces.

The transfers go through torch's group, never through something of our own: NCCL between GPUs, and
gloo otherwise. Ranks that share a GPU have no NCCL; their pieces go through host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tpspan.distributed import counts
from tpspan.distributed.cuda_group import CudaGroup
from tpspan.distributed.host_group import HostGroup
from tpspan.distributed.inner import c10d
from tpspan.distributed.requests import Operation
from tpspan.distributed.work import HostWork, StreamWork
from tpspan.launch.world import World


@dataclass(frozen=True)
class Routes:
    """Who sends to whom: arithmetic alone.

    Attributes:
        domains: the ranks of each domain; every rank is in exactly one.
    """

    domains: tuple[tuple[int, ...], ...]

    def domain_of(self, rank: int) -> tuple[int, ...]:
        """The domain that a rank is in."""
        return next(domain for domain in self.domains if rank in domain)

    def remote(self, domain: tuple[int, ...]) -> list[int]:
        """The ranks outside a domain, in order."""
        return sorted(rank for other in self.domains if other != domain for rank in other)

    def receiver(self, domain: tuple[int, ...], rank: int) -> int:
        """The rank of a domain that receives what a remote rank sends to it."""
        return domain[self.remote(domain).index(rank) % len(domain)]

    def received_by(self, rank: int) -> list[int]:
        """The remote ranks whose pieces a rank receives for its domain, in order."""
        domain = self.domain_of(rank)
        return [r for r in self.remote(domain) if self.receiver(domain, r) == rank]

    def targets_of(self, rank: int) -> list[int]:
        """The ranks to which a rank sends its piece, one in every other domain."""
        mine = self.domain_of(rank)
        return [self.receiver(domain, rank) for domain in self.domains if domain != mine]


class DomainsGroup:
    """The gathering calls of a world whose ranks cannot all map each other's memory.

    Args:
        world: all the ranks.
        delegate: torch's group of the same ranks.
    """

    def __init__(self, world: World, delegate: ProcessGroup) -> None:
        self.world = world
        self.rank, self.world_size = world.rank, world.world_size
        told = world.control.all_gather(world.domain)
        self.routes = Routes(tuple(sorted(set(told))))
        self._domain = self.routes.domain_of(self.rank)
        # Engines belong to the group, and must not keep it from being destroyed.
        self._delegate = weakref.ref(delegate)
        self._is_cuda = world.backend == "cuda"
        self._has_nccl = self._is_cuda and _has_nccl(delegate)
        local = world.subset(self._domain)
        self._local: HostGroup | CudaGroup
        if self._is_cuda:
            self._local = local.resource("distributed", CudaGroup)
        else:
            self._local = local.resource("distributed", HostGroup)

    def run(
        self,
        call: Callable[[], object],
        outputs: list[torch.Tensor],
        async_op: bool,
        *used: torch.Tensor,
    ) -> HostWork | StreamWork | None:
        """Carry a call out after all those before it."""
        return self._local.run(call, outputs, async_op, *used)

    def refuse(self, operation: Operation) -> None:
        """Fail in the other ranks of this domain; those elsewhere wait until their deadline."""
        self._local.refuse(operation)

    def all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of one size, one after another."""
        numel = piece.numel()
        flat = output.view(-1)
        outputs = [flat[rank * numel : (rank + 1) * numel] for rank in range(self.world_size)]
        self.all_gather_list(outputs, piece)

    def all_gather_list(self, outputs: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Put the ranks' pieces, of any sizes, into tensors of their sizes."""
        routes, rank = self.routes, self.rank
        received = {remote: _bytes(outputs[remote]) for remote in routes.received_by(rank)}
        finish = self._begin_transfers(received, _bytes(piece))
        self._local.all_gather_list([outputs[mate] for mate in self._domain], piece)
        finish()
        # What each rank here has received, side by side: one more gather within the domain.
        shares = [routes.received_by(mate) for mate in self._domain]
        buffers = [
            piece.new_empty(sum(_nbytes(outputs[r]) for r in share), dtype=torch.uint8)
            for share in shares
        ]
        given = torch.cat([*received.values(), piece.new_empty(0, dtype=torch.uint8)])
        self._local.all_gather_list(buffers, given)
        for share, buffer in zip(shares, buffers, strict=True):
            at = 0
            for remote in share:
                target = _bytes(outputs[remote])
                if remote not in received:
                    target.copy_(buffer[at : at + target.numel()])
                at += target.numel()
        counts.count("all_gather: between domains")

    def _begin_transfers(
        self, received: dict[int, torch.Tensor], sent: torch.Tensor
    ) -> Callable[[], None]:
        """Start to send and to receive; what is returned waits until all is there."""
        delegate: Any = self._delegate()
        rank, targets = self.rank, self.routes.targets_of(self.rank)
        staged = received
        if self._is_cuda and not self._has_nccl:
            staged = {
                remote: torch.empty_like(one, device="cpu") for remote, one in received.items()
            }
            sent = sent.cpu()
        if self._has_nccl:
            delegate._start_coalescing(self.world.device)
        works = [delegate.recv([one], remote, rank) for remote, one in staged.items()]
        works += [delegate.send([sent], target, target) for target in targets]
        if self._has_nccl:
            works = [delegate._end_coalescing(self.world.device)]
        pending = [(work, sent) for work in works if work is not None]  # gloo keeps no tensor

        def finish() -> None:
            for work, _ in pending:
                work.wait()
            for remote, one in received.items():
                if one is not staged[remote]:
                    one.copy_(staged[remote])

        return finish


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has_nccl(delegate: Any) -> bool:
    try:
        backend = delegate._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for this kind of device
        return False
    return c10d.is_nccl_available() and isinstance(backend, c10d.ProcessGroupNCCL)
