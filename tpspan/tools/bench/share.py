"""``tpspan bench share``: attaching published weights, and what else hands them to a process."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table
import torch
import torch.multiprocessing
from safetensors.torch import save_file

import tpspan
from tpspan.memory.cuda import cuda_device_count
from tpspan.sharing.client import ask_once
from tpspan.sharing.place import VARIABLE, Place
from tpspan.sharing.starting import connect
from tpspan.tools.bench.report import origin, short, write
from tpspan.tools.bench.share_worker import work

SCHEMA = "tpspan-bench-share/2"
_DEFAULT_NBYTES = {"cpu": 512 << 20, "cuda": 16 << 30}
_LOADS_S = 30.0  # no further worker loads the file after that
_KEEPER_S = 10.0


def run_rank(options: argparse.Namespace, command_line: str) -> int:
    """Run the benchmark in this process and its workers; returns the exit status."""
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if cuda_device_count() else "host"
    device = "cpu" if backend == "host" else "cuda"
    nbytes = options.size or _DEFAULT_NBYTES[device]
    with tempfile.TemporaryDirectory(prefix="tpspan-bench-") as folder, _own_keeper(folder):
        bench = Bench(device, nbytes, options.tensors, options.repeat, folder)
        with bench.workers(options.workers) as workers:
            figures = bench.run(workers)
    found = {
        "schema": SCHEMA,
        **origin(command_line, torch.device(device)),
        "backend": backend,
        "size_bytes": nbytes,
        "num_tensors": options.tensors,
        "num_workers": options.workers,
        "figures": figures,
    }
    _print(found)
    if options.json:
        write(found, options.json)
    return 0


class Worker:
    """A worker process, asked by the names of its methods."""

    def __init__(self, device: str, folder: str, path: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device, folder, path))
        self.process.start()
        theirs.close()

    def ask(self, step: str) -> Any:
        """Do a step and return what it returns."""
        self.connection.send(step)
        return self.connection.recv()


def ask_all(workers: Sequence[Worker], step: str) -> list[Any]:
    """Let all workers do a step at the same moment."""
    for worker in workers:
        worker.connection.send(step)
    return [worker.connection.recv() for worker in workers]


class Bench:
    """One model, published and handed over in other ways.

    Args:
        device: ``cpu`` or ``cuda``.
        nbytes, num_tensors: of the model.
        repeat: how often each is timed, by each worker.
        folder: for the file and the keeper.
    """

    def __init__(
        self, device: str, nbytes: int, num_tensors: int, repeat: int, folder: str
    ) -> None:
        self.device, self.repeat, self.folder = device, repeat, folder
        self.path = str(Path(folder, "model.safetensors"))
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        each = max(1, nbytes // num_tensors // dtype.itemsize)
        self.model = {
            f"layer{number}": torch.full((each,), 1.0, dtype=dtype, device=device)
            for number in range(num_tensors)
        }

    @contextlib.contextmanager
    def workers(self, count: int) -> Iterator[list[Worker]]:
        """Processes that have done everything once, on a small publication."""
        with tpspan.publish({"warm": torch.ones(1000, device=self.device)}, "warm") as warm:
            made = [Worker(self.device, self.folder, self.path) for _ in range(count)]
            try:
                for worker in made:
                    worker.connection.recv()
                yield made
            finally:
                for worker in made:
                    worker.connection.close()
                for worker in made:
                    worker.process.join(30.0)
                    if worker.process.is_alive():
                        worker.process.kill()
            warm.close(remove=True)

    def run(self, workers: Sequence[Worker]) -> list[dict[str, Any]]:
        """Everything, checked and timed."""
        figures = self._loads(workers)
        torches = self._received(workers)
        how = "shared memory" if self.device == "cpu" else "CUDA IPC"
        figures.append(self._figure(f"torch.multiprocessing, {how} tensor by tensor", torches))
        publication = tpspan.publish(self.model, "model", read_only=True)
        self.model.clear()
        free = self._free()
        attaches: list[float] = []
        for _ in range(self.repeat):
            for worker in workers:
                worker.ask("drop")
                attaches.append(worker.ask("attach"))
                self._check(worker, 1.0)
        figures.append(self._figure("tpspan.attach", attaches))
        if len(workers) > 1:
            together = []
            for _ in range(self.repeat):
                ask_all(workers, "drop")
                together += ask_all(workers, "attach")
            figures.append(self._figure("tpspan.attach, all workers at once", together))
        if self.device == "cpu":
            reads = []
            for worker in workers:
                worker.ask("drop")
                reads.append(worker.ask("attach_and_read"))
            figures.append(self._figure("tpspan.attach, and read every page", reads))
        memory = {"held by the workers": self._held(workers)}
        if free is not None:
            memory["taken on the GPU by attaching"] = free - (self._free() or 0)
        names = list(publication)
        for what, changed in (
            ("everything changed", names),
            ("one hundredth changed", names[: max(1, len(names) // 100)]),
        ):
            seconds = []
            for value in range(2, 2 + self.repeat):
                publication.thaw(*changed)
                for name in changed:
                    publication[name].fill_(float(value))
                publication.commit(changed=changed)
                seconds += [worker.ask("update") for worker in workers]
                self._check(workers[-1], float(value), num_changed=len(changed))
            figures.append(self._figure(f"Attached.update, {what}", seconds))
            (seen,) = (each for each in tpspan.published() if each["name"] == "model")
            memory[f"new version, {what}"] = seen["versions"][-1]["new_bytes"]
        for worker in workers:
            worker.ask("drop")
        publication.close(remove=True)
        return figures + [{"name": name, "bytes": nbytes} for name, nbytes in memory.items()]

    def _loads(self, workers: Sequence[Worker]) -> list[dict[str, Any]]:
        save_file({name: tensor.cpu() for name, tensor in self.model.items()}, self.path)
        with open(self.path, "rb", buffering=0) as file:
            while file.read(16 << 20):  # now it is in the page cache
                pass
        new, again, mapped = [], [], []
        end = time.monotonic() + _LOADS_S
        for worker in workers:
            if time.monotonic() > end:
                break
            new.append(worker.ask("load"))  # each for the first time: later, memory is ready for it
            self._check(worker, 1.0)
            again += [worker.ask("load_again") for _ in range(self.repeat)]
            self._check(worker, 1.0)
            worker.ask("drop")
            if self.device == "cpu":
                mapped.append(worker.ask("map_and_read"))
                worker.ask("drop")
        figures = [
            self._figure("load safetensors from the page cache", new),
            self._figure("load it once more, into the same memory", again),
        ]
        if mapped:
            figures.append(self._figure("map the file, and read every page", mapped))
        os.unlink(self.path)
        return figures

    def _received(self, workers: Sequence[Worker]) -> list[float]:
        if self.device == "cpu":
            for tensor in self.model.values():
                tensor.share_memory_()
        worker, seconds = workers[0], []
        for _ in range(self.repeat):
            worker.ask("received")
            worker.connection.send(self.model)
            seconds.append(worker.connection.recv())
            self._check(worker, 1.0)
            worker.ask("drop")
        return seconds

    def _held(self, workers: Sequence[Worker]) -> int:
        for worker in workers:
            worker.ask("held")
        return sum(worker.ask("held_again") for worker in workers)

    def _free(self) -> int | None:
        if self.device == "cpu":
            return None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    @staticmethod
    def _check(worker: Worker, value: float, num_changed: int | None = None) -> None:
        seen = worker.ask("check")[: None if num_changed is None else 2 * num_changed]
        if set(seen) != {value}:
            raise tpspan.TpspanError(f"a worker reads {set(seen)} where {value} was written")

    @staticmethod
    def _figure(name: str, seconds: Sequence[float]) -> dict[str, Any]:
        return {
            "name": name,
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "num_samples": len(seconds),
        }


@contextlib.contextmanager
def _own_keeper(folder: str) -> Iterator[None]:
    """A keeper for the bench alone: names that somebody has published stay as they are."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        _end_keeper(folder)
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _end_keeper(folder: str) -> None:
    """End the keeper and wait for that: one that lives makes a folder anew that is gone."""
    connection = connect(start=False)
    if connection is None:
        return
    connection.close()
    os.kill(int(ask_once({"op": "list"})["keeper"]["pid"]), signal.SIGTERM)
    end = time.monotonic() + _KEEPER_S
    while (lock := Place(folder).lock()) is None and time.monotonic() < end:
        time.sleep(0.01)
    if lock is not None:
        os.close(lock)


def _print(found: dict[str, Any]) -> None:
    console = rich.console.Console(width=110, color_system=None, highlight=False)
    hardware = found["hardware"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['num_cores']} cores"
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        title=f"{found['size_bytes'] / 2**20:,.0f} MiB in {found['num_tensors']} tensors, "
        f"{found['num_workers']} workers, {found['backend']}: {where}, torch "
        f"{found['versions']['torch']}. Values were checked.",
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for header in ("median ms", "min", "max", "n", "times tpspan.attach"):
        table.add_column(header, justify="right")
    timed = [figure for figure in found["figures"] if "median_s" in figure]
    (attach,) = (f["median_s"] for f in timed if f["name"] == "tpspan.attach")
    for figure in timed:
        numbers = (figure["median_s"], figure["min_s"], figure["max_s"])
        table.add_row(
            figure["name"],
            *(short(number * 1e3) for number in numbers),
            str(figure["num_samples"]),
            short(figure["median_s"] / attach),
        )
    console.print(table)
    for figure in found["figures"]:
        if "bytes" in figure:
            share = figure["bytes"] / found["size_bytes"]
            console.print(f"{figure['name']}: {figure['bytes']:,} bytes, {share:.4f} of the model")
