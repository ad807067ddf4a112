"""Long-lived groups of real ranks that tests run functions on.

From the bottom up: messages (what travels between pytest and a rank), leaks (what a rank still
holds), worker (the rank), launchers (how ranks are started), group (one started set of ranks),
pool (which groups are alive, and what a test sees of them).
"""

from harness.group import Group, Outcome
from harness.launchers import (
    LAUNCHERS,
    Config,
    launcher_command,
    missing_launcher,
    rank_environment,
    run_script,
)
from harness.pool import LeakError, Pool, RankFailure, Ranks

__all__ = [
    "LAUNCHERS",
    "Config",
    "Group",
    "LeakError",
    "Outcome",
    "Pool",
    "RankFailure",
    "Ranks",
    "launcher_command",
    "missing_launcher",
    "rank_environment",
    "run_script",
]
