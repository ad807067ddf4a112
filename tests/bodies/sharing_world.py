"""Ranks that publish one span under one name, and ranks that attach together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tpspan
from bodies.common import failure, fill, finish, gather, meet, pattern
from tpspan.errors import NameTakenError, PeerError, PublicationMismatch
from tpspan.launch.world import World
from tpspan.sharing.place import VARIABLE
from tpspan.spans import Span

PAGE = 2 << 20


@contextlib.contextmanager
def keeper_at(directory: str) -> Iterator[None]:
    os.environ[VARIABLE] = directory
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def one_span(world: World, directory: str, layout: str) -> None:
    """All ranks' pages under one name; a version is theirs together, and costs what changed."""
    shape = (4 * world.world_size + 1, PAGE // 2 + 3)
    with keeper_at(directory), Span.allocate(world, shape, torch.uint8, layout=layout) as span:
        fill(span, seed=1)
        p = tpspan.publish(span, "span")
        assert p.version == 1
        a = tpspan.attach("span", world=world)
        assert a.version == 1
        assert a["gathered"].cpu().view(-1).equal(pattern(span.nbytes, 1))
        meet(span)
        fill(span, seed=2)
        assert a["gathered"].cpu().view(-1).equal(pattern(span.nbytes, 1))
        assert p.commit() == 2
        assert a.update()
        assert a["gathered"].cpu().view(-1).equal(pattern(span.nbytes, 2))
        if world.rank == 0:
            span.gathered[0, 0] = 77
        finish(world)
        assert p.commit() == 3
        if world.rank == 0:
            (seen,) = tpspan.published()
            versions = {each["version"]: each["new_bytes"] for each in seen["versions"]}
            assert versions[3] == span.blocks[0].block.nbytes
        assert a.update()
        assert int(a["gathered"][0, 0]) == 77
        assert not a.update()
        world.control.barrier()
        a.close()
        p.close(remove=True)
        world.control.barrier()


def shared_parameters(world: World, directory: str) -> None:
    """A module that lies once in the world is published from there."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 2000), nn.Linear(2000, 300))
    with keeper_at(directory):
        shared = tpspan.share_parameters(module, world)
        p = tpspan.publish(module, "m")
        meta = nn.Sequential(nn.Linear(300, 2000), nn.Linear(2000, 300)).to("meta")
        a = tpspan.attach_module(meta, "m", world=world)
        for mine, theirs in zip(meta.parameters(), module.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        finish(world)
        world.control.barrier()
        del meta, mine, theirs
        a.close()
        p.close(remove=True)
        world.control.barrier()
        del module
        shared.close()


def taken(world: World, directory: str) -> None:
    """A name that somebody else publishes is refused on all ranks; so is one that does not fit."""
    with keeper_at(directory), Span.allocate(world, (world.world_size, PAGE), torch.uint8) as span:
        fill(span)
        other = None
        if world.rank == world.world_size - 1:
            other = tpspan.publish({"x": torch.zeros(3)}, "span")
        world.control.barrier()
        error = failure(tpspan.publish, span, "span")
        assert isinstance(error, NameTakenError | PeerError), error
        assert "is published by process" in str(error)
        world.control.barrier()
        if other is not None:
            other.close()
        world.control.barrier()
        error = failure(tpspan.publish, span, "span")
        assert isinstance(error, PublicationMismatch | PeerError), error
        assert "holds other tensors" in str(error)
        world.control.barrier()
        if world.rank == 0:
            tpspan.remove("span")
        world.control.barrier()
        with tpspan.publish(span, "span") as p:
            with pytest.raises(ValueError, match="is for a published dict"):
                p.commit({"gathered": torch.zeros(1)})
            p.close(remove=True)
        with pytest.raises(ValueError, match="a span is published as it is"):
            tpspan.publish(span, "span", read_only=True)
        error = failure(tpspan.attach, "nothing", world=world)
        assert "nothing is published as 'nothing'" in str(error)
        assert gather(world, error is not None) == [True] * world.world_size
        meet(span)


def leaving_alone(world: World, directory: str) -> None:
    """A rank that fails says so at once, and asks no other: they may be elsewhere."""
    with keeper_at(directory), Span.allocate(world, (world.world_size, PAGE), torch.uint8) as span:
        fill(span, seed=1)
        left: list[int] = []

        def publish_and_leave() -> None:
            with tpspan.publish(span, "span") as p:
                if world.rank == world.world_size - 1:
                    raise KeyError("mine")
                left.extend(world.control.all_gather(world.rank))  # while the other is leaving
                assert not p.is_closed

        error = failure(publish_and_leave)
        if world.rank == world.world_size - 1:
            assert repr(error) == "KeyError('mine')", repr(error)
            world.control.all_gather(world.rank)
        else:
            assert error is None, repr(error)
            assert left == list(range(world.world_size))
        world.control.barrier()
        with tpspan.attach("span") as a:
            assert a["gathered"].cpu().view(-1).equal(pattern(span.nbytes, 1))
        world.control.barrier()
        if world.rank == 0:
            tpspan.remove("span")
        meet(span)
