"""How long a step of a pipeline takes if nothing but computing takes time.

No way of handing over can be quicker than that: what a schedule has the stages wait for each other,
and what they compute, remains.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpspan.tools.bench.pipeline_timeline import COMPUTES, Stretch


def least_s(ranks: Sequence[Sequence[Stretch]]) -> float:
    """Seconds from the first computation to the end of the last, each as early as it can be.

    A rank computes in the order in which it did. The i-th forward pass of a stage needs the i-th of
    the stage before it, the i-th backward pass that of the stage behind it; the weights' part of a
    backward pass needs no other stage.

    Args:
        ranks: what each rank did in one step.

    Raises:
        ValueError: a stage has computed something that its neighbour has not.
    """
    work = [
        sorted((each for each in rank if each.what in COMPUTES), key=lambda each: each.begin_s)
        for rank in ranks
    ]
    last_stage = max((each.stage for rank in work for each in rank), default=0)
    ends: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * len(work)
    at = [0] * len(work)
    counts: dict[tuple[int, str], int] = {}
    while any(done < len(rank) for done, rank in zip(at, work, strict=True)):
        has_moved = False
        for number, rank in enumerate(work):
            while at[number] < len(rank):
                each = rank[at[number]]
                index = counts.get((each.stage, each.what), 0)
                before = each.stage + (-1 if each.what == "forward" else 1)
                ready_s = 0.0
                if each.what != "weights" and 0 <= before <= last_stage:
                    if (before, each.what, index) not in ends:
                        break
                    ready_s = ends[before, each.what, index]
                clocks[number] = max(clocks[number], ready_s) + each.end_s - each.begin_s
                ends[each.stage, each.what, index] = clocks[number]
                counts[each.stage, each.what] = index + 1
                at[number] += 1
                has_moved = True
        if not has_moved:
            raise ValueError("a stage has computed something that its neighbour has not")
    return max(clocks, default=0.0)
