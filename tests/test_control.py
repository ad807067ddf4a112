"""The star of ranks over a channel in memory: threads play the ranks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tpspan.errors import ClosedError, CollectiveMismatch, PeerError
from tpspan.launch import control as control_module
from tpspan.launch.control import Control, StarControl, Tag
from tpspan.launch.hosts import Member
from tpspan.launch.store import StoreChannel
from tpspan.launch.world import Facts, World
from tpspan.memory.host import HostDriver


@dataclass
class Post:
    """What the channels of one job have in common."""

    boxes: dict[tuple[int, int, Tag], deque[bytes]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    left: set[int] = field(default_factory=set)
    num_sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryChannel:
    def __init__(self, post: Post, rank: int, world_size: int) -> None:
        self.post, self.rank, self.world_size = post, rank, world_size

    def send(self, peer: int, tag: Tag, data: bytes) -> None:
        assert peer != self.rank
        with self.post.lock:
            self.post.boxes[(self.rank, peer, tag)].append(data)
            self.post.num_sent += 1

    def poll(self, peer: int, tag: Tag) -> bytes | None:
        with self.post.lock:
            box = self.post.boxes.get((peer, self.rank, tag))
            return box.popleft() if box else None

    def retract(self, peer: int, tag: Tag) -> None:
        with self.post.lock:
            self.post.boxes.pop((self.rank, peer, tag), None)

    def flush(self, limit_s: float) -> None:
        pass

    def has_left(self, peer: int) -> bool:
        return peer in self.post.left

    def abort(self, message: str, *, secondary: bool = False) -> NoReturn:
        raise SystemExit((message, secondary))

    def close(self, linger_s: float = 5.0) -> None:
        self.post.left.add(self.rank)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "FIRST_PULSE_S", 0.05)
    monkeypatch.setattr(control_module, "GRACE_S", 0.2)


def run_ranks(
    world_size: int, body: Callable[[StarControl], Any], timeout_s: float = 20.0
) -> list[Any]:
    """Run ``body`` on every rank at once; what it raised stands in the place of its result."""
    post = Post()

    def one(rank: int) -> Any:
        channel = MemoryChannel(post, rank, world_size)
        try:
            return body(StarControl(channel, range(world_size), "world", timeout_s))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])


@SIZES
def test_all_gather(world_size: int) -> None:
    expected = [(rank, "x" * rank) for rank in range(world_size)]
    assert run_ranks(world_size, lambda c: c.all_gather((c.rank, "x" * c.rank))) == (
        [expected] * world_size
    )


@SIZES
def test_broadcast_from_every_root(world_size: int) -> None:
    def body(control: Control) -> list[int]:
        return [control.broadcast(control.rank, root=root) for root in range(world_size)]

    assert run_ranks(world_size, body) == [list(range(world_size))] * world_size


@SIZES
def test_nobody_passes_a_barrier_before_the_last_has_come(world_size: int) -> None:
    came: list[int] = []

    def body(control: Control) -> bool:
        time.sleep(0.02 * control.rank)
        came.append(control.rank)
        control.barrier()
        return len(came) == world_size

    assert run_ranks(world_size, body) == [True] * world_size


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_all_name_the_rank_that_does_not_come(late: int) -> None:
    """Invariant 9."""

    def body(control: StarControl) -> Any:
        if control.rank == late:
            return None
        with pytest.raises(PeerError) as first:
            control.barrier(timeout_s=0.3)
        # The ranks are out of step: whatever they call next fails at once, for the same reason.
        start_s = time.monotonic()
        with pytest.raises(PeerError) as second:
            control.all_gather(1)
        assert time.monotonic() - start_s < 0.2
        assert second.value.ranks == first.value.ranks
        assert control.failed
        return first.value.ranks, first.value.what

    results = run_ranks(4, body)
    said = {result for rank, result in enumerate(results) if rank != late}
    assert said == {((late,), "did not come to barrier (call 1 of world) within 0.3 s")}


def test_several_missing_ranks_are_all_named() -> None:
    def body(control: Control) -> Any:
        if control.rank in (1, 3):
            return None
        with pytest.raises(PeerError) as caught:
            control.all_gather(0, timeout_s=0.3)
        return caught.value.ranks

    assert run_ranks(5, body) == [(1, 3), None, (1, 3), None, (1, 3)]


def test_a_rank_with_a_shorter_deadline_names_the_missing_one_too() -> None:
    """The hub tells those who wait whom it still misses."""

    def body(control: Control) -> Any:
        if control.rank == 2:
            return None
        with pytest.raises(PeerError) as caught:
            control.barrier(timeout_s=1.0 if control.rank == 0 else 0.2)
        return caught.value.ranks

    # Rank 1 gives up, takes its word back, and is missed by the hub only if the hub waits for it.
    assert run_ranks(3, body)[1] == (2,)


def test_a_rank_that_comes_too_late_hears_that_it_was_missed() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            time.sleep(0.6)
        start_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            control.barrier(timeout_s=0.3 if control.rank != 1 else 10.0)
        return caught.value.ranks, time.monotonic() - start_s < 2.0

    assert run_ranks(3, body) == [((1,), True)] * 3


def test_a_late_hub_does_not_succeed_without_those_who_gave_up() -> None:
    def body(control: Control) -> Any:
        if control.rank == 0:
            time.sleep(0.7)
        with pytest.raises(PeerError) as caught:
            control.barrier(timeout_s=0.3)
        return caught.value.ranks

    assert run_ranks(2, body) == [(1,), (0,)]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_left_is_not_waited_for(leaver: int) -> None:
    def body(control: StarControl) -> Any:
        if control.rank == leaver:
            control._channel.close()
            return None
        start_s = time.monotonic()
        with pytest.raises(PeerError, match=f"rank {leaver}: left the world before barrier"):
            control.barrier(timeout_s=30)
        return time.monotonic() - start_s < 5

    assert run_ranks(3, body) == [rank != leaver or None for rank in range(3)]


def test_different_calls_are_a_mismatch_and_leave_the_ranks_in_step() -> None:
    """Invariant 3."""

    def body(control: Control) -> Any:
        with pytest.raises(CollectiveMismatch) as caught:
            if control.rank == 1:
                control.broadcast(0, root=1)
            else:
                control.barrier()
        control.barrier()
        return caught.value.requests

    expected = {0: "barrier", 1: "broadcast from rank 1", 2: "barrier"}
    assert run_ranks(3, body) == [expected] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_arguments_are_refused_before_anything_is_sent(world_size: int) -> None:
    def body(control: StarControl) -> Any:
        with pytest.raises(ValueError, match=f"root={world_size} is no rank"):
            control.broadcast(0, root=world_size)
        with pytest.raises(ValueError, match="must be positive"):
            control.barrier(timeout_s=0)
        control.barrier()
        return control._channel

    for channel in run_ranks(world_size, body):
        assert channel.post.num_sent == 2 * (world_size - 1)


def test_nothing_stays_behind_in_the_channel() -> None:
    def body(control: StarControl) -> Post:
        for _ in range(20):
            control.all_gather(control.rank)
        channel = control._channel
        assert isinstance(channel, MemoryChannel)
        return channel.post

    for post in run_ranks(4, body):
        assert not any(post.boxes.values())


def test_abort_goes_to_the_channel() -> None:
    control = StarControl(MemoryChannel(Post(), 0, 1), [0], "world", 1.0)
    with pytest.raises(SystemExit, match="enough"):
        control.abort("enough")


def world_of(control: StarControl) -> World:
    channel = control._channel
    ranks = range(channel.world_size)
    members = [Member("h" if rank < 3 else "i", 0, (), frozenset({0})) for rank in ranks]
    facts = Facts("alone", "a test", 0, 1, 20.0, bytes(16))
    return World(channel, control, ranks, members, HostDriver(), facts)


def test_disjoint_subsets_are_made_in_any_order() -> None:
    def body(control: StarControl) -> Any:
        world = world_of(control)
        even, odd = (0, 2), (3, 1)
        mine = even if world.rank % 2 == 0 else odd
        # Meanwhile the odd ranks make two worlds where the even ones make one.
        made = [world.subset(mine) for _ in range(1 + world.rank % 2)]
        gathered = [subset.control.all_gather(world.rank) for subset in reversed(made)]
        everyone = world.subset(range(4))
        nested = everyone.subset([3, 0]) if world.rank in (0, 3) else None
        pair = nested.control.all_gather(world.rank) if nested else None
        together = everyone.control.all_gather(world.rank)
        return made[0].rank, gathered, pair, together, len({w.token for w in made}), made[0].domain

    everyone = [0, 1, 2, 3]
    assert run_ranks(4, body) == [
        (0, [[0, 2]], [3, 0], everyone, 1, (0, 1)),
        (1, [[3, 1]] * 2, None, everyone, 2, (1,)),
        (1, [[0, 2]], None, everyone, 1, (0, 1)),
        (0, [[3, 1]] * 2, [3, 0], everyone, 2, (0,)),
    ]


def test_a_subset_is_the_way_on_after_a_rank_was_lost() -> None:
    def body(control: StarControl) -> Any:
        world = world_of(control)
        if world.rank == 0:
            return None
        with pytest.raises(PeerError, match="rank 0"):
            world.control.barrier(timeout_s=0.2)
        return world.subset([1, 2]).control.all_gather(world.rank)

    assert run_ranks(3, body) == [None, [1, 2], [1, 2]]


def test_a_subset_in_different_orders_is_a_mismatch() -> None:
    def body(control: StarControl) -> Any:
        world = world_of(control)
        with pytest.raises(CollectiveMismatch) as caught:
            world.subset([0, 1] if world.rank == 0 else [1, 0])
        return caught.value.requests

    assert run_ranks(2, body) == [{0: (0, 1), 1: (1, 0)}] * 2


@pytest.mark.parametrize("chosen", [[1], [0, 0], [0, 2], [0, -1], []])
def test_a_subset_needs_different_ranks_that_exist_and_this_one(chosen: list[int]) -> None:
    def body(control: StarControl) -> Any:
        if control.rank == 0:
            with pytest.raises(ValueError, match="rank"):
                world_of(control).subset(chosen)
        return control._channel

    assert all(channel.post.num_sent == 0 for channel in run_ranks(2, body))


def test_resources_are_made_once_and_closed_in_reverse() -> None:
    closed: list[str] = []

    class Thing:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise OSError("b does not close")

    def make_b(world: World) -> Thing:
        world.resource("a", lambda world: Thing("a"))
        return Thing("b")

    world = world_of(StarControl(MemoryChannel(Post(), 0, 1), [0], "world", 1.0))
    first = world.resource("b", make_b)
    assert world.resource("b", make_b) is first
    world.subset([0]).resource("c", lambda world: Thing("c"))
    with pytest.raises(OSError, match="b does not close"):
        world.close()
    assert closed == ["c", "b", "a"]
    world.close()
    assert world.is_closed
    for call in (lambda: world.control, lambda: world.resource("a", make_b)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        world.subset([0])


def test_a_closed_world_holds_nothing() -> None:
    """What a world owned ends with it, though it knows its world: nothing is left to collect."""

    class Thing:
        def __init__(self, world: World) -> None:
            self.world = world

        def close(self) -> None:
            pass

    gc.disable()
    try:
        world = world_of(StarControl(MemoryChannel(Post(), 0, 1), [0], "world", 1.0))
        things = [weakref.ref(world.resource("a", Thing))]
        for _ in range(3):
            subset = world.subset([0])
            things.append(weakref.ref(subset.resource("b", Thing)))
            subset.close()
        assert len(world._subsets) == 1, "closed ones are forgotten"
        world.close()
        assert [thing() for thing in things] == [None] * 4
        known = weakref.ref(world)
        del world, subset
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("serves", [False, True])
def test_a_closed_channel_lets_go_of_its_store(serves: bool) -> None:
    """Unless it serves it, and others are still there who learn from it that this rank left."""
    stores = [HashStore(), HashStore()]
    known = [weakref.ref(store) for store in stores]
    alone = StoreChannel(stores[0], "alone", 0, 1, serves=serves)
    of_two = StoreChannel(stores[1], "of two", 0, 2, serves=serves)
    alone.close()
    of_two.close(linger_s=0.0)
    del stores
    assert known[0]() is None
    assert (known[1]() is None) != serves
    for call in (
        lambda: alone.send(0, Tag("x", 1), b""),
        lambda: alone.poll(0, Tag("x", 1)),
        lambda: alone.has_left(0),
    ):
        with pytest.raises(ClosedError):
            call()
    alone.close()


def test_closing_raises_the_first_failure() -> None:
    """A resource is closed before what it stands on; what happens there is a consequence."""

    class Fails:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            raise OSError(f"{self.name} does not close")

    world = world_of(StarControl(MemoryChannel(Post(), 0, 1), [0], "world", 1.0))
    for name in ("below", "above"):
        world.resource(name, lambda world, name=name: Fails(name))  # type: ignore[misc]
    with pytest.raises(OSError, match="above does not close"):
        world.close()
    assert world.is_closed


@pytest.mark.parametrize(
    ("error", "secondary"),
    [(PeerError([1], "is\ngone"), True), (ValueError("PeerError: x"), False)],
)
def test_a_world_aborts_with_the_traceback(error: Exception, secondary: bool) -> None:
    world = world_of(StarControl(MemoryChannel(Post(), 0, 1), [0], "world", 1.0))
    with pytest.raises(SystemExit) as caught:
        world.abort(error)
    message, said = caught.value.args[0]
    assert str(error) in message
    assert said == secondary


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from(["gather", "broadcast", "barrier"]), max_size=8))
def test_any_sequence_of_calls(world_size: int, calls: list[str]) -> None:
    def body(control: Control) -> list[Any]:
        results: list[Any] = []
        for index, call in enumerate(calls):
            if call == "gather":
                results.append(control.all_gather((index, control.rank)))
            elif call == "broadcast":
                results.append(control.broadcast(control.rank, root=index % world_size))
            else:
                control.barrier()
                results.append(None)
        return results

    expected = {
        "gather": lambda index: [(index, rank) for rank in range(world_size)],
        "broadcast": lambda index: index % world_size,
        "barrier": lambda index: None,
    }
    for result in run_ranks(world_size, body):
        assert result == [expected[call](index) for index, call in enumerate(calls)]
