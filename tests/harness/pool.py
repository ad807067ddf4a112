"""Which groups are alive, and what a test sees of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from harness.group import END_S, GRACE_S, Group, Outcome
from harness.launchers import Config
from harness.messages import Report, Run

# A rank needs 200 to 300 MB: at most two groups, so eight ranks, are alive at a time.
MAX_GROUPS = 2
DEADLINE_S = 60.0
# Below a body's deadline: who is not waited for any longer is named before all ranks are killed.
_INIT_TIMEOUT_S = 45.0


class RankFailure(AssertionError):
    """A body raised, hung or died on some rank."""


class LeakError(AssertionError):
    """A body left something behind."""


class Pool:
    """Groups by configuration; the one used longest ago ends when a third is asked for."""

    def __init__(self) -> None:
        self._groups: dict[Config, Group] = {}

    def group(self, config: Config) -> Group:
        group = self._groups.pop(config, None)
        if group is None or not group.alive:
            while len(self._groups) >= MAX_GROUPS:
                oldest = next(iter(self._groups))
                self._groups.pop(oldest).stop()
            group = Group(config, init={"timeout_s": _INIT_TIMEOUT_S})
        self._groups[config] = group
        return group

    def close(self) -> None:
        groups, self._groups = list(self._groups.values()), {}
        errors = []
        for group in groups:
            try:
                group.stop()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("groups of ranks did not end well", errors)


class Ranks:
    """The fixture ``ranks``: runs bodies on the ranks of one configuration."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.config = config
        self._pool = pool

    @property
    def size(self) -> int:
        return self.config.size

    @property
    def backend(self) -> str:
        return self.config.backend

    @property
    def launcher(self) -> str:
        return self.config.launcher

    def run(
        self,
        body: str,
        /,
        *,
        deadline_s: float = DEADLINE_S,
        grace_s: float = GRACE_S,
        leaks: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``body`` ("package.module:function") on every rank of the long-lived group.

        Every rank calls ``function(world, **kwargs)``; the values come back in the order of the
        ranks. With ``leaks`` the body must give back what it took. What a library keeps from its
        first use on is told from a leak by running the body again: only what grows by both runs
        counts. A group in which a rank raised, hung or died is not used again; the peers of such a
        rank have ``grace_s`` to notice.

        Raises:
            RankFailure: with each rank's traceback, or its stacks if it hung.
            LeakError: with what grew, by rank.
        """
        group = self._pool.group(self.config)
        request = Run(body, kwargs, deadline_s)
        if leaks and not group.is_settled:
            _checked(group, f"looking at what there is before {body}", group.settle())
        files = group.socket_files()
        answers = group.call(request, deadline_s=deadline_s, grace_s=grace_s)
        outcome = _checked(group, body, answers)
        growth = _growth(group, body, files, looks=leaks, patient=False)
        if growth:
            files = group.socket_files()
            why = f"{body}, run again since it left {growth}"
            _checked(group, why, group.call(request, deadline_s=deadline_s))
            again = _growth(group, body, files)
            leaked = {what: again[what] for what in growth if what in again}
            if leaked:
                lines = "".join(f"\n  {what}: {amount}" for what, amount in leaked.items())
                raise LeakError(f"{body} on {self.config} leaves behind:{lines}")
        return outcome.values

    def fresh(
        self,
        body: str,
        /,
        *,
        deadline_s: float = DEADLINE_S,
        survive: bool = True,
        init: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Call ``body`` on ranks started for it alone, for bodies that kill ranks or fail.

        Nothing is raised for what happens on the ranks: the outcome says it. With ``survive``
        the ranks that are left go on to the end of the body; without, the launcher does what it
        does when a rank dies. Ranks end without closing the world if a rank failed.
        """
        group = Group(
            self.config,
            init={"timeout_s": _INIT_TIMEOUT_S, **(init or {})},
            environment=environment,
            survive=survive,
        )
        start = time.monotonic()
        try:
            request = Run(body, kwargs, deadline_s)
            outcome = group.call(request, deadline_s=deadline_s, grace_s=None)
            if outcome.hung:
                return outcome
            if not outcome.died and all(r is not None and not r.error for r in outcome.reports):
                group.stop()
                return outcome
            returncode = None if survive or not outcome.died else group.join(END_S)
            ended_after_s = None if returncode is None else time.monotonic() - start
            return Outcome(
                outcome.reports, (), outcome.died, returncode, ended_after_s, group.output()
            )
        finally:
            group.kill()


def _checked(group: Group, body: str, outcome: Outcome) -> Outcome:
    """Raise what the ranks reported, if it is not success; such a group is not used again."""
    reports = [report for report in outcome.reports if report is not None]
    errors = [report for report in reports if report.error is not None]
    skipped = [report for report in reports if report.skipped is not None]
    if skipped and len(skipped) == group.config.size:
        pytest.skip(str(skipped[0].skipped))
    if not (errors or skipped or outcome.hung or outcome.died):
        return outcome
    output = outcome.output + group.kill()
    lines = [f"{body} failed on {group.config}"]
    lines += [f"rank {rank} did not answer in time; all ranks were killed" for rank in outcome.hung]
    lines += [f"rank {rank} died" for rank in outcome.died]
    lines += [f"rank {report.rank} skipped: {report.skipped}" for report in skipped]
    lines += [f"--- rank {report.rank} ---\n{report.error}" for report in errors]
    raise RankFailure("\n".join([*lines, "--- output ---", output[-6000:]]))


def _growth(
    group: Group, body: str, files: set[str], *, looks: bool = True, patient: bool = True
) -> dict[str, str]:
    """What is left on the ranks, by rank and kind; complaints are raised at once."""
    outcome = _checked(
        group, f"looking for leaks of {body}", group.settle(looks=looks, patient=patient)
    )
    reports: list[Report] = [report for report in outcome.reports if report is not None]
    complaints = [f"rank {r.rank}: {line}" for r in reports for line in r.complaints]
    if complaints:
        lines = "".join(f"\n  {line}" for line in complaints)
        raise LeakError(f"{body} on {group.config} is complained about:{lines}")
    growth = {f"rank {r.rank}, {kind}": how for r in reports for kind, how in r.growth.items()}
    if looks and (left := group.socket_files() - files):
        growth["socket files"] = str(sorted(left))
    return growth
