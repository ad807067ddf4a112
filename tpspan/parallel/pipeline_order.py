"""How many microbatches are between two stages at once, from the order of a schedule: arithmetic.

A hand-over occupies a block of the ring from the moment it is written until the stage that reads it
has no more use for it: for an activation that is the end of the microbatch's backward pass, or of
its weight part where a schedule does that later. How far the writer can be ahead of that follows
from what each rank does in which order, and from the hand-overs themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, backward of the inputs alone, and of the weights alone."""


@dataclass(frozen=True)
class Action:
    """One piece of a rank's work.

    Attributes:
        stage, kind, microbatch: of which stage what is done, for which microbatch.
    """

    stage: int
    kind: Kind
    microbatch: int


@dataclass(frozen=True)
class Depths:
    """Blocks that the rings on both sides of a stage boundary need.

    Attributes:
        forward: for activations, on the later stage's rank.
        backward: for gradients, on the earlier stage's rank; 0 without a backward pass.
    """

    forward: int
    backward: int


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> dict[int, list[Action]]:
    """The order of 1F1B with one stage on each rank, the rank of its own number."""
    order: dict[int, list[Action]] = {}
    for stage in range(num_stages):
        ahead = min(num_microbatches, num_stages - stage)
        actions = [Action(stage, "F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            actions.append(Action(stage, "B", microbatch))
            if microbatch + ahead < num_microbatches:
                actions.append(Action(stage, "F", microbatch + ahead))
        order[stage] = actions
    return order


def ring_depths(order: Mapping[int, Sequence[Action]], num_stages: int) -> list[Depths]:
    """The blocks for every boundary, so that no stage ever waits for a free one.

    Args:
        order: what each rank does, by rank, in its order.
        num_stages: stages 0 to ``num_stages - 1``; boundary i lies between stages i and i + 1.

    Raises:
        ValueError: the order leaves something out, waits for itself, or takes the microbatches in
            one order on one side of a boundary and in another on the other.
    """
    clocks, place = _clocks(order, num_stages)
    found = []
    for stage in range(num_stages - 1):
        forward = _most_ahead(order, clocks, place, stage, stage + 1, "F")
        backward = _most_ahead(order, clocks, place, stage + 1, stage, "B")
        found.append(Depths(forward, backward))
    return found


def _most_ahead(
    order: Mapping[int, Sequence[Action]],
    clocks: Mapping[Action, Mapping[int, int]],
    place: Mapping[Action, tuple[int, int]],
    writer: int,
    reader: int,
    kind: Kind,
) -> int:
    """The most hand-overs of one boundary that may be written and not yet released."""
    wanted = ("F",) if kind == "F" else ("B", "I")
    writes = [each for each in place if each.stage == writer and each.kind in wanted]
    writes.sort(key=lambda each: place[each][1])
    reads = [each for each in place if each.stage == reader and each.kind in wanted]
    reads.sort(key=lambda each: place[each][1])
    if [each.microbatch for each in reads] != [each.microbatch for each in writes]:
        raise ValueError(f"stages {writer} and {reader} take the microbatches in different orders")
    last_use: dict[int, int] = {}
    reading_rank = -1
    for each, (rank, number) in place.items():
        if each.stage == reader:
            reading_rank = rank
            last_use[each.microbatch] = max(last_use.get(each.microbatch, -1), number)
    most = 0
    for number, write in enumerate(writes):
        done = clocks[write].get(reading_rank, 0)
        before = (each.microbatch for each in writes[:number])
        released = sum(1 for microbatch in before if last_use[microbatch] < done)
        most = max(most, number + 1 - released)
    return most


def _clocks(
    order: Mapping[int, Sequence[Action]], num_stages: int
) -> tuple[dict[Action, dict[int, int]], dict[Action, tuple[int, int]]]:
    """For each action how many actions of each rank are certainly done when it begins."""
    place = {
        action: (rank, number)
        for rank, actions in order.items()
        for number, action in enumerate(actions)
    }
    clocks: dict[Action, dict[int, int]] = {}
    at = dict.fromkeys(order, 0)
    remaining = sum(len(actions) for actions in order.values())
    while remaining:
        moved = False
        for rank, actions in order.items():
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = _needs(action, num_stages)
                sources = [_first_of(need, place, action) for need in needs]
                if not all(source in clocks for source in sources):
                    break
                clock: dict[int, int] = {rank: at[rank]}
                if at[rank]:
                    _merge(clock, clocks[actions[at[rank] - 1]])
                for source in sources:
                    _merge(clock, clocks[source])
                    source_rank, number = place[source]
                    _merge(clock, {source_rank: number + 1})
                clocks[action] = clock
                at[rank] += 1
                remaining -= 1
                moved = True
        if not moved:
            stuck = [
                str(actions[at[rank]]) for rank, actions in order.items() if at[rank] < len(actions)
            ]
            raise ValueError(f"the order waits for itself at {', '.join(stuck)}")
    return clocks, place


def _needs(action: Action, num_stages: int) -> Iterable[tuple[int, tuple[Kind, ...]]]:
    """The stage, and the kinds of work of which one must be done there, before this action."""
    if action.kind == "F" and action.stage > 0:
        yield action.stage - 1, ("F",)
    elif action.kind in ("B", "I") and action.stage < num_stages - 1:
        yield action.stage + 1, ("B", "I")


def _first_of(
    need: tuple[int, tuple[Kind, ...]], place: Mapping[Action, tuple[int, int]], action: Action
) -> Action:
    stage, kinds = need
    for kind in kinds:
        found = Action(stage, kind, action.microbatch)
        if found in place:
            return found
    raise ValueError(f"{action} needs {' or '.join(kinds)} of stage {stage}, which no rank does")


def _merge(into: dict[int, int], other: Mapping[int, int]) -> None:
    for rank, count in other.items():
        into[rank] = max(into.get(rank, 0), count)
