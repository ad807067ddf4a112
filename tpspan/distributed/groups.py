"""From a group argument to the ranks it means, and to what carries their calls out.

A group may be None (the default world of tpspan, or else torch's default group), a World of
tpspan, or a process group of torch. For one of torch's groups a world of its ranks is made at the
first call, over the group's own store: that call is collective, so all its ranks come.

Torch says nobody when it destroys a group of another backend. The store is let go with the group;
what else its world holds is given back in the next call to whatever group, or when the interpreter
ends, by the thread that is there: a finalizer could not (invariant 10), it only notes that there is
something to do.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from tpspan.distributed.cuda_group import CudaGroup
from tpspan.distributed.domains import DomainsGroup
from tpspan.distributed.host_group import HostGroup
from tpspan.distributed.in_place import Engine, InPlace
from tpspan.distributed.store_world import LentStore, world_over
from tpspan.errors import ClosedError, LaunchError
from tpspan.launch import start
from tpspan.launch.store import Keys
from tpspan.launch.world import World
from tpspan.memory.closing import close_each

GatheringEngine = HostGroup | CudaGroup | DomainsGroup

DEFAULT_TIMEOUT_S = 300.0
_MOST_KNOWN = 256


class Group:
    """The ranks of a group, and an engine for each kind of device on which they have called.

    Attributes:
        rank, size: in the group.
        delegate: torch's group, which carries out what spans cannot; None if there is none.
        in_place: the gathers in place that were made before, by the identity of their output.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        world: World | None = None,
        store: Keys | None = None,
        name: str = "",
        delegate: ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.rank, self.size = rank, size
        self._delegate = None if delegate is None else weakref.ref(delegate, _note_destroyed)
        # One that registers this backend under several devices is not in torch's table itself.
        self._is_listed = delegate is not None and delegate in c10d._world.pg_map
        self._world, self._store, self._name = world, store, name
        self._timeout_s = timeout_s
        self.in_place: dict[int, InPlace] = {}
        self._engines: dict[str, GatheringEngine | None] = {}
        self._worlds: dict[str, World | None] = {}
        self._own_worlds: list[World] = []
        self._closed = False
        self._lock = threading.RLock()

    @property
    def delegate(self) -> ProcessGroup | None:
        """torch's group, which carries out what spans cannot; None if there is none."""
        return None if self._delegate is None else self._delegate()

    def engine(self, device: torch.device) -> Engine | None:
        """What carries out calls on a device; None if spans cannot. Collective the first time."""
        found = self.gathering_engine(device)
        return None if isinstance(found, DomainsGroup) else found

    def gathering_engine(self, device: torch.device) -> GatheringEngine | None:
        """The same for calls that gather, which spans also serve between domains."""
        try:
            return self._engines[device.type]
        except KeyError:
            with self._lock:
                if device.type not in self._engines:
                    self._engines[device.type] = self._make(device)
                return self._engines[device.type]

    def span_world(self, device: torch.device) -> World | None:
        """The world whose spans these ranks can share on a device, for callers with spans of their
        own; None if they are not all in one domain. Collective the first time.
        """
        with self._lock:
            world = self._world_of(device)
        return world if world is not None and len(world.domain) == self.size else None

    def world(self, device: torch.device) -> World | None:
        """The world of these ranks on a device, in however many domains; None if there is none.

        Collective the first time.
        """
        with self._lock:
            return self._world_of(device)

    def remember(self, output: torch.Tensor, call: InPlace) -> None:
        """Know a gather in place again when it is next made with the same tensors."""
        if len(self.in_place) >= _MOST_KNOWN:  # most of them of tensors that are gone
            self.in_place.clear()
        self.in_place[id(output)] = call

    def default_device(self) -> torch.device:
        """Where calls without a tensor happen."""
        if self._world is not None:
            return self._world.device
        if "cuda" in self._engines or (
            "cpu" not in self._engines and torch.cuda.is_available() and self._serves_cuda()
        ):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def is_destroyed(self) -> bool:
        """Whether torch has destroyed the process group that this one stands for."""
        if self._delegate is None:
            return False
        delegate = self._delegate()
        return delegate is None or (self._is_listed and delegate not in c10d._world.pg_map)

    def close(self) -> None:
        """Close the worlds that were made for this group; waits for no other rank. Idempotent.

        Every later call that needs one raises ``ClosedError``.
        """
        with self._lock:
            self._closed = True
            owned, self._own_worlds = self._own_worlds, []
            self._world = self._store = None
            self.in_place.clear()
            self._engines.clear()
            self._worlds.clear()
            _with_worlds.discard(self)
            close_each(world.close for world in owned)

    def _serves_cuda(self) -> bool:
        delegate = self.delegate
        if delegate is None:
            return True
        return any(device.type == "cuda" for device in delegate._device_types)

    def _default_world(self) -> World | None:
        """The default world, if it is these ranks in this order: then its spans are known here."""
        if self._store is None:
            return None
        try:
            world = start.world()
        except LaunchError:
            token = b""
        else:
            token = b"%d %d " % (world.rank == self.rank, world.world_size == self.size)
            token += world.token.hex().encode()
        self._store.set(f"{self._name}/world/{self.rank}", token)  # type: ignore[arg-type]
        told = {self._store.get(f"{self._name}/world/{peer}") for peer in range(self.size)}
        return world if told == {token} and token.startswith(b"1 1 ") else None

    def _make(self, device: torch.device) -> GatheringEngine | None:
        world = self._world_of(device)
        if world is None:
            return None
        if len(world.domain) != world.world_size:
            if self.delegate is None:
                return None
            return DomainsGroup(world, self.delegate)
        if world.backend == "host":
            return world.resource("distributed", HostGroup)
        return world.resource("distributed", CudaGroup)

    def _world_of(self, device: torch.device) -> World | None:
        """A world of these ranks on a kind of device, made at the first call. Collective then."""
        kind = {"cpu": "host", "cuda": "cuda"}.get(device.type)
        if kind is None:
            return None
        if self._closed:
            raise ClosedError("this group was destroyed")
        if kind not in self._worlds:
            world = self._world or self._default_world()
            if (world is None or world.backend != kind) and self._store is not None:
                name = f"{self._name}/{kind}"
                world = world_over(self._store, name, self.rank, self.size, device, self._timeout_s)
                self._own_worlds.append(world)
                _with_worlds.add(self)
            self._worlds[kind] = world if world is not None and world.backend == kind else None
        return self._worlds[kind]


_with_worlds: set[Group] = set()
"""The groups with worlds of their own, until they are closed."""
_is_destroyed = False
"""Whether a process group has gone since ``_close_destroyed`` looked."""
_of_process_group: weakref.WeakKeyDictionary[ProcessGroup, Group] = weakref.WeakKeyDictionary()


def resolve(group: Any) -> Group | None:
    """The ranks that a group argument means; None if this rank is not among them.

    Raises:
        LaunchError: no group was given and there is none by default.
        TypeError: it is not a group.
        ValueError: it is a group that was destroyed.
    """
    if group is None:
        group = _default()
    if isinstance(group, World):
        return group.resource("distributed group", _over_world)
    if group == torch_distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    found = getattr(group, "span_group", None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    if _is_destroyed:
        _close_destroyed()
    try:
        found = _of_process_group.get(group)
    except TypeError:  # nothing that can be a key: it is told below what it should be
        found = None
    if found is None:
        found = _over_process_group(group)
        _close_destroyed()  # those that somebody still holds are not noted
        _of_process_group[group] = found
    return found


def group_rank(group: Any, root: int | None, group_root: int | None) -> int:
    """The root's rank in the group: of a World its rank there, of torch's groups as torch says.

    Raises:
        ValueError: none or both were given, or it is not in the group.
    """
    if group is None:
        group = _default()
    if isinstance(group, World):
        if (root is None) == (group_root is None):
            raise ValueError("exactly one of src and group_src must be given")
        found = root if group_root is None else group_root
        assert found is not None
        if not 0 <= found < group.world_size:
            raise ValueError(f"there is no rank {found} in a world of {group.world_size}")
        return found
    return c10d._canonicalize_group_rank(group, root, group_root)


def _default() -> Any:
    try:
        return start.world()
    except LaunchError:
        if torch_distributed.is_initialized():
            return torch_distributed.GroupMember.WORLD
        raise LaunchError(
            "there is no group: call tpspan.init() or torch.distributed.init_process_group() first"
        ) from None


def _over_world(world: World) -> Group:
    return Group(world.rank, world.world_size, world=world)


def _over_process_group(group: Any) -> Group:
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a World or a process group, not {type(group)}")
    if group not in c10d._world.pg_map:
        raise ValueError("this process group was destroyed")
    store = LentStore(c10d._world.pg_map[group][1])
    name = c10d._world.pg_names[group]
    return Group(group.rank(), group.size(), store=store, name=name, delegate=group)


def _note_destroyed(_: weakref.ref[ProcessGroup]) -> None:
    global _is_destroyed
    _is_destroyed = True


def _close_destroyed() -> None:
    """Close the groups that torch has destroyed; waits for no other rank."""
    global _is_destroyed
    _is_destroyed = False
    for group in tuple(_with_worlds):
        if group.is_destroyed:
            try:
                group.close()
            except Exception as error:  # not one of the call that happens to come next
                what = f"closing a destroyed process group: {error}"
                warnings.warn(what, ResourceWarning, stacklevel=2)


@atexit.register
def _close_at_exit() -> None:
    """Close the worlds of groups that nobody destroyed; the interpreter is ending."""
    for group in tuple(_with_worlds):
        with contextlib.suppress(Exception):
            group.close()
