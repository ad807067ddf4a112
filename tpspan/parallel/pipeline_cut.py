"""Where to cut a row of layers into stages: arithmetic alone.

The slowest stage sets the pace of a pipeline. Layers stay in order, so a cut is a partition of a
row, and the best one is found exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCosts:
    """What each part of a model costs, in one unit, such as seconds.

    Attributes:
        layers: of each layer, in order.
        first: of what comes before the layers, and stays with the first of them.
        last: of what comes behind, and stays with the last.
    """

    layers: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        wrong = [cost for cost in (*self.layers, self.first, self.last) if not 0 <= cost < math.inf]
        if wrong:
            raise ValueError(f"costs must be finite and not negative, not {wrong[0]}")

    def of_stage(self, begin: int, end: int) -> float:
        """The cost of a stage of the layers ``begin`` to ``end - 1``."""
        cost = math.fsum(self.layers[begin:end])
        cost += self.first if begin == 0 else 0.0
        return cost + (self.last if end == len(self.layers) else 0.0)


def cut(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """The first layer of every stage, so that the slowest stage is as fast as can be.

    Among the cuts of that kind it takes the most even one: the smallest sum of squares. Every stage
    has a layer at least.

    Raises:
        ValueError: there are fewer layers than stages, or no stages.
    """
    num_layers = len(costs.layers)
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, not {num_stages}")
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    slowest, _ = _best(costs, num_stages, max, math.inf)
    _, starts = _best(costs, num_stages, lambda total, cost: total + cost * cost, slowest)
    return starts


def _best(
    costs: LayerCosts, num_stages: int, add: Callable[[float, float], float], most: float
) -> tuple[float, tuple[int, ...]]:
    """The cut with the least total of its stages' costs, none of which is above ``most``."""
    num_layers = len(costs.layers)
    # best[end]: of the layers before `end`, in as many stages as there have been rounds
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        remaining = num_stages - stage - 1
        ends = range(stage + 1, num_layers - remaining + 1) if remaining else (num_layers,)
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            choices = [
                (add(total, cost), (*starts, begin))
                for begin, (total, starts) in best.items()
                if begin < end and (cost := costs.of_stage(begin, end)) <= most
            ]
            if choices:
                after[end] = min(choices)
        best = after
    return best[num_layers]


def stage_ranges(starts: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage.

    Raises:
        ValueError: the starts do not begin with 0, do not rise, or leave a stage without layers.
    """
    ends = [*starts[1:], num_layers]
    if not starts or starts[0] != 0:
        raise ValueError(f"the first stage must start at layer 0, not at {list(starts)[:1]}")
    ranges = [range(begin, end) for begin, end in zip(starts, ends, strict=True)]
    if any(len(each) == 0 for each in ranges):
        raise ValueError(f"starts {tuple(starts)} leave a stage of {num_layers} layers empty")
    return ranges
