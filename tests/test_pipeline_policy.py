"""Where a model is cut, and how many blocks a schedule needs: arithmetic, compared with trying."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpspan.parallel.pipeline_cut import LayerCosts, cut, stage_ranges
from tpspan.parallel.pipeline_order import Action, one_forward_one_backward, ring_depths

costs_of_layers = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(costs_of_layers, st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_no_cut_is_better(layers: list[int], num_stages: int, first: int, last: int) -> None:
    costs = LayerCosts(tuple(map(float, layers)), float(first), float(last))
    if num_stages > len(layers):
        with pytest.raises(ValueError, match="cannot be cut"):
            cut(costs, num_stages)
        return

    def rated(starts: tuple[int, ...]) -> tuple[float, float]:
        ranges = stage_ranges(starts, len(layers))
        found = [costs.of_stage(each.start, each.stop) for each in ranges]
        return max(found), sum(each * each for each in found)

    inner = itertools.combinations(range(1, len(layers)), num_stages - 1)
    assert rated(cut(costs, num_stages)) == min(rated((0, *starts)) for starts in inner)


def test_the_head_counts() -> None:
    costs = LayerCosts((1.0,) * 6, first=0.5, last=3.0)
    assert cut(costs, 2) == (0, 4)
    assert cut(costs, 1) == (0,)


@pytest.mark.parametrize("starts", [(), (1, 2), (0, 0), (0, 3, 2), (0, 4)])
def test_starts_that_leave_a_stage_empty(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="start"):
        stage_ranges(starts, 4)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(cost: float) -> None:
    with pytest.raises(ValueError, match="costs"):
        LayerCosts((1.0, cost))


def test_1f1b_needs_what_is_under_way() -> None:
    depths = ring_depths(one_forward_one_backward(4, 8), 4)
    assert [(each.forward, each.backward) for each in depths] == [(4, 4), (3, 3), (2, 2)]
    depths = ring_depths(one_forward_one_backward(4, 2), 4)
    assert max(each.forward for each in depths) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(0, 10**6))
def test_nobody_ever_waits_for_a_block(num_stages: int, num: int, seed: int) -> None:
    """Run a schedule with ranks of random speeds: no ring is ever fuller than was said."""
    order = one_forward_one_backward(num_stages, num)
    depths = ring_depths(order, num_stages)
    dice = random.Random(seed)
    done: set[Action] = set()
    at = dict.fromkeys(order, 0)
    weights = {rank: dice.random() ** 3 for rank in order}
    while any(at[rank] < len(order[rank]) for rank in order):
        ready = []
        for rank, actions in order.items():
            if at[rank] < len(actions) and may_begin(actions[at[rank]], done, num_stages):
                ready.append(rank)
        rank = dice.choices(ready, [weights[each] + 1e-9 for each in ready])[0]
        done.add(order[rank][at[rank]])
        at[rank] += 1
        for number, depth in enumerate(depths):
            forward = count(done, number, "F") - count(done, number + 1, "B")
            backward = count(done, number + 1, "B") - count(done, number, "B")
            assert forward <= depth.forward and backward <= depth.backward


def may_begin(action: Action, done: set[Action], num_stages: int) -> bool:
    step = -1 if action.kind == "F" else 1
    neighbour = action.stage + step
    if not 0 <= neighbour < num_stages:
        return True
    return Action(neighbour, action.kind, action.microbatch) in done


def count(done: set[Action], stage: int, kind: str) -> int:
    return sum(1 for each in done if each.stage == stage and each.kind == kind)


def test_weights_hold_their_blocks() -> None:
    """Split backward passes: the activation is used until the weights' part."""
    first = [Action(0, "F", n) for n in range(3)] + [Action(0, "B", n) for n in range(3)]
    later: list[Action] = []
    for n in range(3):
        later += [Action(1, "F", n), Action(1, "I", n)]
    later += [Action(1, "W", n) for n in range(3)]
    assert ring_depths({0: first, 1: later}, 2)[0].forward == 3


def test_orders_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no rank does"):
        ring_depths({0: [Action(1, "F", 0)]}, 2)
    crossed = {0: [Action(0, "B", 0), Action(0, "F", 0)], 1: [Action(1, "F", 0), Action(1, "B", 0)]}
    with pytest.raises(ValueError, match="waits for itself"):
        ring_depths(crossed, 2)
    twisted = one_forward_one_backward(2, 2)
    twisted[1] = [Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1)]
    twisted[0] = [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)]
    with pytest.raises(ValueError, match="different orders"):
        ring_depths(twisted, 2)
