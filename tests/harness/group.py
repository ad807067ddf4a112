"""One started set of ranks, and the sockets to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness import launchers
from harness.launchers import Config
from harness.messages import Hello, Ready, Report, Settle, Stop, receive, send

START_S = 180.0
END_S = 30.0
# Once one rank has failed, its peers wait for it in vain: they get this long to notice.
GRACE_S = 10.0


class GroupError(RuntimeError):
    """The ranks could not be started, or did not end as they should."""


@dataclass(frozen=True)
class Outcome:
    """What became of one body on every rank.

    Attributes:
        reports: by rank; None where the rank died, or was killed, without a report.
        hung: ranks that had not answered by the deadline; all ranks were killed then.
        died: ranks that ended without an answer of their own accord.
        returncode: the launcher's, or the first that is not 0 of the ranks' where none stood above
            them; None while the group lives on.
        ended_after_s: from the request to the end of the launcher; None while the group lives on.
        output: what launcher and ranks printed, and stacks of the ranks that hung.
    """

    reports: tuple[Report | None, ...]
    hung: tuple[int, ...] = ()
    died: tuple[int, ...] = ()
    returncode: int | None = None
    ended_after_s: float | None = None
    output: str = ""

    @property
    def values(self) -> list[Any]:
        """What each rank returned; None where it returned nothing or is gone."""
        return [None if report is None else report.value for report in self.reports]


class Group:
    """N ranks that wait for requests. The creator must call ``stop`` or ``kill``.

    Args:
        init: keyword arguments for ``tpspan.init``, besides the backend.
        environment: variables for the ranks, besides pytest's own.
        survive: the death of a rank leaves the others running.
    """

    def __init__(
        self,
        config: Config,
        *,
        init: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        survive: bool = False,
    ) -> None:
        self.config = config
        self.alive = True
        self.is_settled = True
        # Short, since the names of Unix sockets are limited to 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tps-", dir="/tmp"))
        self._output = self.folder / "output"
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start({"backend": config.backend, **(init or {})}, environment, survive)
        except BaseException:
            self.kill()
            raise

    def call(
        self, request: object, *, deadline_s: float, grace_s: float | None = GRACE_S
    ) -> Outcome:
        """Ask all ranks and collect their answers. Kills the group if a rank hangs or dies.

        With ``grace_s=None`` ranks are waited for until the deadline even if another has failed,
        and a death does not kill the group.
        """
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        reports: list[Report | None] = [None] * len(pending)
        died = []
        end = time.monotonic() + deadline_s
        for rank, connection in enumerate(self._connections):
            try:
                send(connection, request)
            except OSError:  # it has died since the last request
                died.append(rank)
                del pending[connection]
        while pending and (left_s := end - time.monotonic()) > 0:
            for ready in wait(list(pending), timeout=left_s):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                try:
                    reports[rank] = report = receive(ready)
                    failed = report.error is not None
                except (EOFError, OSError):
                    died.append(rank)
                    failed = True
                if failed and grace_s is not None:
                    end = min(end, time.monotonic() + grace_s)
        hung = tuple(sorted(pending.values()))
        if hung or (died and grace_s is not None):
            output = self.kill(stacks_of=hung)
        else:
            output = self.output()
        return Outcome(tuple(reports), hung, tuple(sorted(died)), output=output)

    def settle(self, *, looks: bool = True, patient: bool = True) -> Outcome:
        """What the ranks hold beyond what they held at the last call of this, and complaints.

        Args:
            looks: otherwise only complaints; what is held is looked at before the next body.
            patient: see ``leaks.settle``.
        """
        self.is_settled = looks
        return self.call(Settle(looks, patient), deadline_s=60.0)

    def socket_files(self) -> set[str]:
        """Socket files of the ranks that lie about."""
        return {
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_socket() and path.name != "control"
        }

    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def stop(self) -> None:
        """Close the world on every rank and wait for the launcher; raises if that is not clean."""
        if not self.alive:
            return
        outcome = self.call(Stop(), deadline_s=END_S)
        complaints = [
            line for report in outcome.reports if report is not None for line in report.complaints
        ]
        returncode = self.join()
        left = self.socket_files()
        output = self.kill()
        if outcome.hung or outcome.died or complaints or returncode != 0 or left:
            raise GroupError(
                f"the ranks of {self.config} did not end well: hung {outcome.hung}, died "
                f"{outcome.died}, exit code {returncode}, left {sorted(left)}, "
                f"{complaints}\n{output or outcome.output}"
            )

    def join(self, timeout_s: float = END_S) -> int | None:
        """Wait for the launcher to end; its exit code, or None if it runs still."""
        end = time.monotonic() + timeout_s
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                return None
        return next((code for code in codes if code), 0)

    def kill(self, *, stacks_of: tuple[int, ...] = ()) -> str:
        """End everything at once; returns what was printed, and the stacks of the given ranks."""
        if not self.alive:
            return ""
        self.alive = False
        stacks = self._stacks(stacks_of)
        if self._processes and self.join(0) is None:
            for pid in self._pids:
                _kill(pid)
            self.join(2.0)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self._connections:
            connection.close()
        output = self.output() + stacks
        shutil.rmtree(self.folder, ignore_errors=True)
        return output

    def _start(
        self, init: dict[str, Any], environment: Mapping[str, str] | None, survive: bool
    ) -> None:
        address = str(self.folder / "control")
        variables = launchers.rank_environment(
            {
                "TMPDIR": str(self.folder),
                "XDG_RUNTIME_DIR": str(self.folder),
                **(environment or {}),
            }
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen(self.config.size)
            server.settimeout(0.2)
            self._processes = launchers.start(
                self.config,
                "harness.worker",
                [address, json.dumps(init)],
                environment=variables,
                output=self._output,
                survive=survive,
            )
            end = time.monotonic() + START_S
            waiting: list[Connection] = []
            while len(waiting) < self.config.size:
                try:
                    waiting.append(Connection(server.accept()[0].detach()))
                except TimeoutError:
                    if self.join(0) is not None or time.monotonic() > end:
                        raise GroupError(
                            f"{self.config}: {len(waiting)} of {self.config.size} ranks came\n"
                            + self.output()
                        ) from None
        self._connections = list(waiting)
        by_rank: dict[int, Connection] = {}
        errors = []
        while waiting and (left_s := end - time.monotonic()) > 0:
            for connection in wait(waiting, timeout=left_s):
                assert isinstance(connection, Connection)
                try:
                    message = receive(connection)
                except (EOFError, OSError):
                    waiting.remove(connection)
                    continue
                if isinstance(message, Hello):
                    self._pids.append(message.pid)
                    continue
                assert isinstance(message, Ready)
                waiting.remove(connection)
                by_rank[message.rank] = connection
                if message.error is not None:
                    errors.append(message.error)
                    end = min(end, time.monotonic() + GRACE_S)
        if errors or sorted(by_rank) != list(range(self.config.size)):
            raise GroupError(
                f"{self.config}: only the ranks {sorted(set(by_rank) - {-1})} were initialised\n"
                + "\n".join(errors)
                + self.kill(stacks_of=tuple(range(len(self._pids))))
            )
        self._connections = [by_rank[rank] for rank in range(self.config.size)]

    def _stacks(self, ranks: tuple[int, ...]) -> str:
        if not ranks:
            return ""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        return "".join(
            f"\n--- stacks of process {path.suffix[1:]} ---\n{text}"
            for path in sorted(self.folder.glob("stacks.*"))
            if (text := path.read_text(errors="replace"))
        )


def _kill(pid: int) -> None:
    """Kill a rank, and what it started if it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
