"""``tpspan rm``: remove published names. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tpspan.errors import KeeperError, NameTakenError, UnknownNameError
from tpspan.sharing.listing import published, remove


def main(argv: Sequence[str] | None = None) -> int:
    """Remove names; returns the exit status, 1 if one could not be removed."""
    arguments = argparse.ArgumentParser(
        prog="tpspan rm",
        description="Remove published names. Processes that have them attached go on; the memory "
        "is given back when the last of them lets go.",
    )
    arguments.add_argument("names", nargs="*", metavar="NAME")
    arguments.add_argument("--all", action="store_true", help="remove all names")
    arguments.add_argument(
        "-f", "--force", action="store_true", help="also names whose publisher is alive"
    )
    options = arguments.parse_args(sys.argv[1:] if argv is None else list(argv))
    if bool(options.names) == options.all:
        arguments.error("give names, or --all")
    status = 0
    try:
        names = [each["name"] for each in published()] if options.all else options.names
        for name in names:
            try:
                remove(name, force=options.force)
            except (UnknownNameError, NameTakenError) as error:
                print(f"tpspan rm: {error}", file=sys.stderr)
                status = 1
    except KeeperError as error:
        print(f"tpspan rm: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
