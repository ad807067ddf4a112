"""An exception on one rank ends the whole job, and its traceback is the last thing the ranks print.

``install`` puts hooks where Python brings exceptions that nobody caught, of the main thread and of
others. They report and then end every rank through the channel's ``abort``. A rank that fails only
because a peer did (``PeerError``) first waits a moment, so that the culprit can report and end the
job.

``SystemExit`` reaches no hook. A rank that leaves early says so on the control plane when its
interpreter ends, whatever the exit code, and the ranks that wait for it fail at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

from tpspan.errors import PeerError

ERROR_DIR_VARIABLE = "TPSPAN_ERROR_DIR"
"""Set by ``tpspan run``: the folder where failing ranks leave their reports."""

SECONDARY_WAIT_S = 1.5
HARD_EXIT_S = 5.0

_reporting = threading.Lock()
_hooks: _Hooks | None = None


class Abort(Protocol):
    """Ends the job; a channel's ``abort``."""

    def __call__(self, message: str, *, secondary: bool = False) -> NoReturn:
        """Report the message and end every rank of the job with a non-zero exit code."""


def install(abort: Abort) -> None:
    """Let exceptions that nobody catches, in any thread of this process, call ``abort``."""
    global _hooks
    if _hooks is not None:
        _hooks.remove()
    _hooks = _Hooks(abort)


def report(message: str, rank: int, world_size: int, *, secondary: bool = False) -> None:
    """Print a rank's last words and leave them where launchers look; returns once, ever.

    Only the first thread of a process to get here reports; others wait for the process to end.

    Args:
        secondary: it failed only because a peer did.
    """
    _reporting.acquire()
    threading.Thread(target=_exit_later, daemon=True).start()
    _write_for_tpspan_run(message, rank, secondary)
    _write_for_torchrun(message)
    sys.stdout.flush()
    sys.stderr.write(f"tpspan: rank {rank} of {world_size} failed:\n{message.rstrip()}\n")
    sys.stderr.flush()


def _exit_later() -> None:
    # Should ending the job hang, this process at least ends: its launcher then ends the others.
    time.sleep(HARD_EXIT_S)
    os._exit(1)


def _write_for_tpspan_run(message: str, rank: int, secondary: bool) -> None:
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        record = {"rank": rank, "time": time.time(), "secondary": secondary, "message": message}
        _write(Path(folder) / f"rank-{rank}.json", record)


def _write_for_torchrun(message: str) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        last_line = message.rstrip().rsplit("\n", 1)[-1]
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        _write(Path(file), {"message": {"message": last_line, "extraInfo": extra}})


def _write(path: Path, record: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(record))
    except OSError as error:
        sys.stderr.write(f"tpspan: cannot write {path}: {error}\n")


class _Hooks:
    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        # A forked child that fails is its parent's affair, not the whole job's end.
        self._pid = os.getpid()
        self._former_hook = sys.excepthook
        self._former_thread_hook = threading.excepthook
        # Bound methods are new objects at each access: keep the two that are installed.
        self._hook, self._thread_hook = self._on_exception, self._on_thread_exception
        sys.excepthook = self._hook
        threading.excepthook = self._thread_hook

    def remove(self) -> None:
        if sys.excepthook is self._hook:
            sys.excepthook = self._former_hook
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._former_thread_hook

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            self._former_hook(kind, error, tb)
            return
        if issubclass(kind, KeyboardInterrupt):
            self._abort("KeyboardInterrupt")
        self._end("".join(traceback.format_exception(kind, error, tb)), error)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self._pid or args.exc_value is None or args.exc_type is SystemExit:
            self._former_thread_hook(args)
            return
        name = "?" if args.thread is None else args.thread.name
        text = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        self._end(f"in thread {name}:\n{''.join(text)}", args.exc_value)

    def _end(self, message: str, error: BaseException) -> NoReturn:
        secondary = isinstance(error, PeerError)
        if secondary:
            time.sleep(SECONDARY_WAIT_S)
        self._abort(message, secondary=secondary)
