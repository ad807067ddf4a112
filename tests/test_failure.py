"""Who is to blame: a rank that failed only because a peer did says so."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from harness import rank_environment
from tpspan.errors import PeerError
from tpspan.launch import failure

SECONDARY = PeerError([1], "a step failed there: OSError: two\nlines: of text")
CASES = pytest.mark.parametrize(
    ("error", "secondary"), [(SECONDARY, True), (ValueError("said\nPeerError: x"), False)]
)


class Aborted(Exception):
    """Stands for the end of the job."""


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    monkeypatch.setattr(failure, "SECONDARY_WAIT_S", 0.0)
    said: list[tuple[str, bool]] = []

    def abort(message: str, *, secondary: bool = False) -> NoReturn:
        said.append((message, secondary))
        raise Aborted

    hooks = failure._Hooks(abort)
    yield said
    hooks.remove()


@CASES
def test_the_hook_says_whether_a_peer_is_to_blame(
    aborts: list[tuple[str, bool]], error: Exception, secondary: bool
) -> None:
    with pytest.raises(Aborted):
        sys.excepthook(type(error), error, None)
    ((message, said),) = aborts
    assert str(error) in message
    assert said == secondary


@CASES
def test_so_does_the_hook_of_threads(
    aborts: list[tuple[str, bool]], error: Exception, secondary: bool
) -> None:
    arguments = threading.ExceptHookArgs((type(error), error, None, None))
    with pytest.raises(Aborted):
        threading.excepthook(arguments)
    ((message, said),) = aborts
    assert message.startswith("in thread ?:\n")
    assert said == secondary


@pytest.mark.parametrize("secondary", [True, False])
def test_the_report_says_so_to_tpspan_run(tmp_path: Path, secondary: bool) -> None:
    code = (
        "from tpspan.launch.control import AloneChannel\n"
        f"AloneChannel().abort('two\\nlines', secondary={secondary})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=rank_environment({failure.ERROR_DIR_VARIABLE: str(tmp_path)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "tpspan: rank 0 of 1 failed:\ntwo\nlines\n"
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert (report["message"], report["secondary"]) == ("two\nlines", secondary)
