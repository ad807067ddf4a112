"""Ending a process together with everything it started, by their ids. Linux's /proc only."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below ``pid``, each with the time it started.

    The time tells a process from a later one that got the same id.
    """
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents[int(entry.name)], started[int(entry.name)] = fields
    below: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level} - set(below)
        below.update({child: started[child] for child in level})
    return below


def end(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """End a launcher and its ranks: ask it first, then kill whatever of them is left."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        family |= descendants(process.pid)
        process.kill()
        process.wait()
    deadline_s = time.monotonic() + 1.0
    while (alive := _alive(family)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _alive(family: dict[int, str]) -> list[int]:
    return [pid for pid, start in family.items() if (now := _stat(pid)) and now[1] == start]


def _stat(pid: int) -> tuple[int, str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything; state, parent, ... , start time (the 22nd) follow.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])
