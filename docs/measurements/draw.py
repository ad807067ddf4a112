"""Draw the pictures of sweeps over sizes from the JSON files that stand beside this script.

    python docs/measurements/draw.py [FILE.json ...]

Without files it draws those again that have a picture already. Needs matplotlib.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tpspan.tools.bench.sweep import Row
from tpspan.tools.bench.sweep_report import plot

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Draw every file; returns the exit status."""
    named = [Path(word) for word in sys.argv[1:]]
    fields = {field.name for field in dataclasses.fields(Row)}
    for path in named or sorted(HERE.glob("*.json")):
        found = json.loads(path.read_text())
        rows = found.get("rows") or [{}]
        if "operation" not in rows[0] or not (named or path.with_suffix(".png").exists()):
            if named:
                sys.stderr.write(f"{path} is no sweep over sizes\n")
                return 1
            continue
        filled = [Row(**{**dict.fromkeys(fields), **row}) for row in rows]
        where = found["hardware"]["gpu"] or found["hardware"]["cpu"]
        title = f"tpspan {found['versions']['tpspan']}: {found['ranks']} ranks, {found['backend']}"
        plot(filled, path.with_suffix(".png"), f"{title}, {found['dtype']}, {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
