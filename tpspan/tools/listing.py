"""``tpspan ls``: what is published on this host, and who reads it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.live
import rich.table

from tpspan.errors import KeeperError
from tpspan.sharing.listing import published

_DEVICE = 13  # cuda: and the first digits of the UUID
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def main(argv: Sequence[str] | None = None) -> int:
    """Show the list, once or again and again; returns the exit status."""
    arguments = argparse.ArgumentParser(
        prog="tpspan ls", description="Show what is published on this host, and who reads it."
    )
    add = arguments.add_argument
    add("--json", action="store_true", help="everything, for programs; with --watch a line a look")
    add(
        "--watch",
        type=_seconds,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="look again every second, or every SECONDS, until interrupted",
    )
    options = arguments.parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.watch:
            _watch(options.watch, as_json=options.json)
        elif options.json:
            print(json.dumps(published(), indent=1))
        else:
            rich.console.Console().print(table(published()))
    except KeeperError as error:
        print(f"tpspan ls: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def table(names: Sequence[dict[str, Any]]) -> rich.table.Table:
    """The list for people: a line a version, the newest first."""
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for header in ("name", "device", "size", "version", "new", "age", "readers", "publisher"):
        is_text = header in ("name", "device", "publisher")
        made.add_column(header, justify="left" if is_text else "right", no_wrap=header != "name")
    for each in names:
        first = [each["name"], each["device"][:_DEVICE], size(each["bytes"])]
        last = f"{each['publisher']}{'' if each['publisher_alive'] else ' (ended)'}"
        rows = [
            (
                str(version["version"]),
                size(version["new_bytes"]),
                _age(version["time"]),
                str(len(version["readers"])),
            )
            for version in reversed(each["versions"])
        ]
        gone = each["readers_of_gone_versions"].items()
        rows += [(f"{number} (gone)", "", "", str(len(pids))) for number, pids in gone]
        for row in rows or [("none yet", "", "", "")]:
            made.add_row(*first, *row, last)
            first, last = ["", "", ""], ""
    if not names:
        made.title = "nothing is published"
    return made


def size(nbytes: int) -> str:
    """Bytes in the unit that needs the fewest digits."""
    number, unit = float(nbytes), 0
    while number >= 1024 and unit + 1 < len(_UNITS):
        number, unit = number / 1024, unit + 1
    return f"{number:.4g} {_UNITS[unit]}"


def _age(then_s: float) -> str:
    seconds = max(0.0, time.time() - then_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _watch(every_s: float, *, as_json: bool) -> None:
    if as_json:
        while True:
            print(json.dumps(published()), flush=True)
            time.sleep(every_s)
    with rich.live.Live(table(published()), auto_refresh=False) as live:
        while True:
            live.update(table(published()), refresh=True)
            time.sleep(every_s)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
