"""A process of ``tpspan bench share`` that attaches, flips and loads, and says how long it took."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import torch
from safetensors.torch import load_file

import tpspan

Tensors = dict[str, torch.Tensor]


def work(connection: Any, device: str, directory: str, path: str) -> None:
    """Do what is asked until the other side is gone.

    Args:
        connection: of torch.multiprocessing, so that tensors come through it.
        device: where the tensors lie.
        directory: of the keeper.
        path: the safetensors file of the same tensors.
    """
    os.environ["TPSPAN_KEEPER_DIR"] = directory
    torch.set_num_threads(1)
    worker = _Worker(connection, device, path)
    worker.warm_up()
    connection.send(0.0)
    while True:
        try:
            step = connection.recv()
        except EOFError:
            return
        connection.send(getattr(worker, step)())


class _Worker:
    def __init__(self, connection: Any, device: str, path: str) -> None:
        self._connection, self._device, self._path = connection, device, path
        self._attached: tpspan.Attached | None = None
        self._tensors: Tensors = {}

    def warm_up(self) -> None:
        """Everything once that a process does only once, such as starting CUDA."""
        with tpspan.attach("warm") as warm:
            for name in warm:
                warm[name].sum().item()
            warm.update()

    def attach(self) -> float:
        self._attached = None
        start = time.perf_counter()
        self._attached = tpspan.attach("model")
        self._tensors = self._attached.state()
        return time.perf_counter() - start

    def attach_and_read(self) -> float:
        """Attach, and find every page for the first time, as the first use does."""
        start = time.perf_counter()
        self.attach()
        self._read()
        return time.perf_counter() - start

    def update(self) -> float:
        assert self._attached is not None
        self._settle()
        start = time.perf_counter()
        changed = self._attached.update()
        seconds = time.perf_counter() - start
        assert changed
        return seconds

    def received(self) -> float:
        """Take the tensors that are on their way."""
        self._connection.send(0.0)
        self._connection.poll(None)
        start = time.perf_counter()
        self._tensors = self._connection.recv()
        return time.perf_counter() - start

    def load(self) -> float:
        """Load the file into memory of this process's own, which it has to get first."""
        start = time.perf_counter()
        found = load_file(self._path, device=self._device)
        if self._device == "cpu":  # it maps the file, and nothing has been loaded yet
            found = {name: tensor.clone() for name, tensor in found.items()}
        self._tensors = found
        self._settle()
        return time.perf_counter() - start

    def load_again(self) -> float:
        """Load the file into the memory that it was loaded into before."""
        start = time.perf_counter()
        for name, tensor in load_file(self._path, device=self._device).items():
            self._tensors[name].copy_(tensor)
        self._settle()
        return time.perf_counter() - start

    def map_and_read(self) -> float:
        """Map the file, as safetensors does on a CPU, and find every page."""
        start = time.perf_counter()
        self._tensors = load_file(self._path)
        self._read()
        return time.perf_counter() - start

    def _read(self) -> None:
        for tensor in self._tensors.values():
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum().item()

    def check(self) -> list[float]:
        """The first and the last element of every tensor, and what all is worth."""
        ends = [(t.view(-1)[0], t.view(-1)[-1]) for t in self._tensors.values()]
        return [float(each) for pair in ends for each in pair]

    def held(self) -> int:
        """Read everything; then the bytes that it costs this process."""
        assert self._attached is not None
        for tensor in self._tensors.values():
            tensor.sum().item()
        return self._attached.held_nbytes()

    def held_again(self) -> int:
        """The bytes that it costs when all others have read everything too."""
        assert self._attached is not None
        return self._attached.held_nbytes()

    def drop(self) -> float:
        self._tensors = {}
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        if self._device != "cpu":
            torch.cuda.empty_cache()  # the next worker needs the room
        return 0.0

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
