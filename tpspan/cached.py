"""What took long to work out, kept in small files for the next process.

The files lie in ``$XDG_CACHE_HOME/tpspan`` (or ``~/.cache/tpspan``), one for each key. One that
cannot be read, or holds something else, counts as absent and is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DiskCache:
    """Values of one kind, each under a key.

    Attributes:
        kind: names the files, and the value in them.
        schema: of the values; those of another one are not read.
        variable: the environment variable that turns the cache off if it is ``0``.
    """

    kind: str
    schema: int
    variable: str

    def load(self, key: Mapping[str, str]) -> Any:
        """The value stored under a key, of whatever JSON can hold; None if there is none."""
        path = self._path(key)
        if path is None:
            return None
        try:
            found = json.loads(path.read_text())
            if found["schema"] != self.schema or found["key"] != dict(key):
                return None
            return found[self.kind]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def store(
        self, key: Mapping[str, str], value: Any, *, keep: Callable[[Any], bool] = lambda _: False
    ) -> Any:
        """Store a value under a key, whole or not at all; where that is impossible, do nothing.

        Args:
            keep: whether a value that is there already, perhaps since a moment ago, stays.

        Returns:
            What is stored now: of several processes that keep what there is, all get the first's.
        """
        path = self._path(key)
        if path is None:
            return value
        text = json.dumps({"schema": self.schema, "key": dict(key), self.kind: value}, indent=1)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=f".{self.kind}-", dir=path.parent)
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(text)
                with contextlib.suppress(OSError):  # it exists, or there are no links there
                    os.link(name, path)
                    return value
                found = self.load(key)
                if keep(found):
                    return found
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
        return value

    def _path(self, key: Mapping[str, str]) -> Path | None:
        if os.environ.get(self.variable, "1") == "0":
            return None
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            folder = Path(base) if base else Path.home() / ".cache"
        except RuntimeError:  # nobody's home
            return None
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return folder / "tpspan" / f"{self.kind}-{digest[:16]}.json"
