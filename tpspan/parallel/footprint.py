"""How much physical memory a range of addresses costs this process."""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def proportional_nbytes(address: int, nbytes: int) -> int:
    """The proportional set size of a range of addresses, in bytes.

    A page that n processes have mapped counts one n-th in each, so that the sum over all processes
    is what is physically there.
    """
    total_kib = 0
    inside = False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            header = _HEADER.match(line)
            if header:
                begin, end = (int(part, 16) for part in header.groups())
                inside = address <= begin and end <= address + nbytes
            elif inside and line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib * 1024
