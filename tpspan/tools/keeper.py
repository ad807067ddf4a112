"""``tpspan keeper``: hold published memory in the foreground, for systemd."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tpspan.launch
from tpspan.errors import KeeperError
from tpspan.sharing.starting import keeper_command

UNIT = "tpspan-keeper.service"


def main(argv: Sequence[str] | None = None) -> int:
    """Become the keeper of this user; returns only if that fails."""
    arguments = argparse.ArgumentParser(
        prog="tpspan keeper",
        description="Hold what this user publishes until it is removed, and stay when nothing is "
        "published. Without this command a keeper is started when one is needed, and ends when it "
        "holds nothing.",
    )
    arguments.add_argument("--unit", action="store_true", help="print a unit file for systemd")
    options = arguments.parse_args(sys.argv[1:] if argv is None else list(argv))
    if options.unit:
        # a service does not have this environment's commands on its path
        python = '"' + sys.executable.replace("%", "%%") + '"'
        text = (Path(tpspan.launch.__path__[0]) / UNIT).read_text()
        sys.stdout.write(text.replace("{python}", python))
        return 0
    try:
        command = keeper_command("serve")
    except KeeperError as error:
        print(f"tpspan keeper: {error}", file=sys.stderr)
        return 1
    return os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
