"""``tpspan.publish``: put tensors under a name, for other processes and for those to come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from tpspan.sharing.client import keep_trying
from tpspan.sharing.fetch import Fetched, fetch
from tpspan.sharing.group import Alone, Group, Ranks
from tpspan.sharing.layout import PublishedLayout
from tpspan.sharing.local import Local, local
from tpspan.sharing.memory import OwnMemory, SpanMemory, Working
from tpspan.sharing.publication import Publication
from tpspan.sharing.registration import Registration
from tpspan.sharing.sources import Source, source_of, span_of


def publish(
    published: object,
    name: str,
    *,
    keep: int = 2,
    read_only: bool = False,
    device: torch.device | str | None = None,
    block_nbytes: int | None = None,
) -> Publication:
    """Publish tensors under a name; any process of this user and host can attach them.

    A module's parameters and buffers move into the publication and stay the same objects, as in
    ``share_parameters``. A dict is copied: of tensors, or a whole training state as nested dicts,
    lists and plain values. What has values becomes the next version at once; tensors on the meta
    device are allocated, to be filled and committed. A span, and what ``share_parameters``
    returned, is published by all ranks of its world together: then this is collective, and so is
    every ``commit``.

    If a process that has ended published the name before, this one takes over: version numbers go
    on, and blocks that have not changed are not stored again. Tensors on the meta device then get
    the values of the last version.

    Published versions never change: what is worked on is memory apart from them, so a publisher
    costs twice the tensors. With ``read_only`` it costs them once: the tensors are the published
    blocks, mapped read-only, until ``Publication.thaw`` gives some of them memory to be written,
    which the next commit publishes as it is.

    Args:
        published: a module, a dict, a ``Span``, or what ``share_parameters`` returned.
        name: up to 200 printable characters.
        keep: how many versions can be attached; older ones stay with those that have them mapped.
        read_only: keep the tensors only once, and mapped read-only.
        device: where to hold them; by default where they are.
        block_nbytes: size of the pieces in which versions differ, whole pages of 2 MiB; by default
            a 64th of the whole, on CUDA a 24th. Every block costs every reader some time.

    Returns:
        The publication: its tensors by name, and ``commit``.

    Raises:
        NameTakenError: a process that is alive publishes under this name.
        PublicationMismatch: the name holds tensors of other names, shapes or types.
        KeeperError: the keeper does not start, is another user's, or is out of descriptors.
        OutOfMemoryError: there is no memory for the tensors.
        TypeError: it holds something that cannot be published.
        ValueError: the name or an argument makes no sense; tensors overlap without being tied.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the newest version is kept")
    found = span_of(published)
    if found is not None:
        span, entries = found
        if read_only or device is not None or block_nbytes is not None:
            raise ValueError(
                "a span is published as it is: read_only, device and block_nbytes are for modules "
                "and dicts"
            )
        world = span.world
        place = Local(world.driver, world.rank, world.timeout_s)
        layout = PublishedLayout(entries, tuple(run.nbytes for run in span.layout.runs))
        group: Group = Ranks(world) if world.world_size > 1 else Alone()
        return _publish(name, keep, place, layout, group, lambda: SpanMemory(span), None)
    source = source_of(published)
    place = local(source.device if device is None else device)
    layout = PublishedLayout.packed(
        source.parts,
        page_nbytes=place.driver.page_nbytes,
        backend=place.backend,
        optional=source.optional,
        block_nbytes=block_nbytes,
    )

    def make() -> OwnMemory:
        return OwnMemory(place, layout, read_only=read_only)

    made = _publish(name, keep, place, layout, Alone(), make, source)
    if isinstance(published, nn.Module):
        made.adopt(published)
    return made


def _publish(
    name: str,
    keep: int,
    place: Local,
    layout: PublishedLayout,
    group: Group,
    make: Callable[[], Working],
    source: Source | None,
) -> Publication:
    """Claim the name, take the memory, and commit what there is."""
    devices = dict.fromkeys(group.gather(place.identity))
    device = "cpu" if place.backend == "host" else "cuda:" + ",".join(d[5:] for d in devices)
    description = {
        "device": device,
        "bytes": layout.nbytes,
        "tensors": len(layout.entries),
        "blocks": len(layout.sizes),
    }
    with ExitStack() as undo:
        registration = Registration(name, description, layout, keep, group)
        undo.callback(registration.close)
        group.together("tpspan.publish", registration.claim)

        def begin() -> Publication:
            with ExitStack() as closing:
                working = make()
                if isinstance(working, OwnMemory):
                    closing.callback(working.close, None)
                made = Publication(place, layout, working, registration, group)
                closing.pop_all()
            undo.callback(made.abandon)
            return made

        made = group.together("tpspan.publish", begin)
        is_next = bool(group.broadcast(registration.version))
        if is_next:
            group.together("tpspan.publish", lambda: _take_over(made, registration, place))
        if source is None:
            made.commit()
        elif source.has_values:
            made.commit_first(source)
        else:
            made.fill(source)
            if is_next:
                made.freeze()
        registration.watch(keep=made)
        undo.pop_all()
    return made


def _take_over(made: Publication, registration: Registration, place: Local) -> None:
    """Begin with the version that an earlier publisher has left."""

    def take() -> Fetched:
        return fetch(
            registration.connection,
            registration.name,
            lambda _: place,
            places=made.working_places,
            keep_fds=place.backend == "cuda",
        )

    fetched: Fetched = keep_trying(take)
    registration.took_over(fetched)
    made.begin_with(fetched)
