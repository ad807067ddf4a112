"""What a process holds that a body must give back: descriptors, mappings, threads, GPU memory."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

PAGE_NBYTES = 2 << 20
_SETTLE_S = 1.0
_STILL_S = 0.2
_MEMORY = ("descriptors of /memfd:", "bytes of ")
# Other ranks on the same GPU, and CUDA's own pools, move the figure by less than this.
_DEVICE_SLACK_NBYTES = 1 << 20
_MAP_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)")


@dataclass(frozen=True)
class Snapshot:
    """What is held, by kind; kinds carry no numbers that change from one use to the next."""

    counts: Mapping[str, int]
    details: Mapping[str, tuple[str, ...]]

    def growth_since(self, before: Snapshot) -> dict[str, str]:
        """The kinds of which more is held now than before, with what is new of each."""
        grown = {}
        for kind, count in self.counts.items():
            old = before.counts.get(kind, 0)
            if count <= old + (_DEVICE_SLACK_NBYTES if kind == "device memory" else 0):
                continue
            known = before.details.get(kind, ())
            new = [detail for detail in self.details.get(kind, ()) if detail not in known]
            grown[kind] = f"{old} -> {count} {new[:6] if new else ''}".rstrip()
        return grown


def take(used_device_nbytes: Callable[[], int] | None = None) -> Snapshot:
    """Look at this process now."""
    counts: dict[str, int] = {}
    details: dict[str, list[str]] = {}

    def note(kind: str, amount: int, detail: str) -> None:
        counts[kind] = counts.get(kind, 0) + amount
        details.setdefault(kind, []).append(detail)

    for number, target in _descriptors():
        note("descriptors of " + re.sub(r"[:\[]\d+\]?|\d+", "*", target), 1, f"{number}: {target}")
    for kind, start, end in _mappings():
        note(f"bytes of {kind}", end - start, f"{start:x}-{end:x}")
    for thread in threading.enumerate():
        note("threads named " + re.sub(r"\d+", "*", thread.name), 1, thread.name)
    if used_device_nbytes is not None:
        note("device memory", used_device_nbytes(), "")
    return Snapshot(counts, {kind: tuple(lines) for kind, lines in details.items()})


def settle(
    before: Snapshot,
    used_device_nbytes: Callable[[], int] | None = None,
    *,
    patient: bool = True,
) -> tuple[Snapshot, dict[str, str]]:
    """Collect garbage and look until nothing more than before is held, or until time is up.

    Unless ``patient``, which a verdict has to be, the time is also up when all that is more is
    memory, and stays the same for a while: threads and connections end by themselves, but memory
    waits for this thread, which is here. Most first uses of a library keep memory and no more.
    """
    begin = since = time.monotonic()
    last: dict[str, str] = {}
    while True:
        gc.collect()
        now = take(used_device_nbytes)
        grown = now.growth_since(before)
        moment = time.monotonic()
        if not grown or moment > begin + _SETTLE_S:
            return now, grown
        if grown != last:
            last, since = grown, moment
        is_memory = all(kind.startswith(_MEMORY) for kind in grown)
        if is_memory and not patient and moment > since + _STILL_S:
            return now, grown
        time.sleep(0.05)


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue


def _mappings() -> Iterator[tuple[str, int, int]]:
    """Mappings of memfds, and inaccessible ranges of whole pages, which is how a reservation looks.

    Thread stacks and malloc's arenas have inaccessible parts too, but do not begin on a page of
    this size.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = _MAP_LINE.match(line)
        if match is None:
            continue
        start, end = int(match[1], 16), int(match[2], 16)
        if match[4].startswith("/memfd:"):
            yield "mapped memfds", start, end
        elif (
            not match[4]
            and match[3].startswith("---")
            and start % PAGE_NBYTES == end % PAGE_NBYTES == 0
        ):
            yield "reserved addresses", start, end


class Complaints:
    """Collects what Python otherwise only prints: resource warnings and errors of finalizers."""

    def __init__(self) -> None:
        self._heard: list[str] = []

    def listen(self) -> None:
        """Install for the rest of the process."""
        warnings.simplefilter("always", ResourceWarning)
        show = warnings.showwarning

        def showwarning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, ResourceWarning):
                self._heard.append(f"{category.__name__}: {message} ({filename}:{lineno})")
            show(message, category, filename, lineno, file, line)

        def unraisable(event: sys.UnraisableHookArgs) -> None:
            self._heard.append(f"in {event.object!r}: {event.exc_value!r}")

        warnings.showwarning = showwarning
        sys.unraisablehook = unraisable

    def drain(self) -> tuple[str, ...]:
        heard, self._heard = tuple(self._heard), []
        return heard
