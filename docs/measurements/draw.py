"""Draw the pictures of sweeps over sizes again, from the JSON files that stand beside this script.

    python docs/measurements/draw.py

Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path

from tpspan.tools.bench.sweep_report import plot

HERE = Path(__file__).resolve().parent
SWEEPS = ("gather", "all-reduce", "pipeline")


def main() -> None:
    """Draw every sweep that has a picture already."""
    for sweep in SWEEPS:
        for path in sorted(HERE.glob(f"{sweep}-h*.json")):
            picture = path.with_suffix(".png")
            if picture.exists():
                plot(json.loads(path.read_text()), picture)


if __name__ == "__main__":
    main()
