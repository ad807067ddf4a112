"""Tests that run beside others give way to them, with all that they start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LOWEST = 19


def lower() -> None:
    """Give this process, in a session of its own, and what it will start the lowest priority."""
    with contextlib.suppress(PermissionError):  # it leads a group: it was started in one of its own
        os.setsid()
    os.nice(_LOWEST)
    keep(os.getpid())


def keep(pid: int) -> None:
    """Give the session that a process has just begun the priority of this process.

    Where the kernel shares processors between sessions first (sched(7), autogroups), ``nice`` says
    nothing outside a session, and each has a priority of its own.
    """
    if (priority := os.nice(0)) > 0:
        with contextlib.suppress(OSError):  # no such kernel, or the process has ended
            Path(f"/proc/{pid}/autogroup").write_text(str(priority))
