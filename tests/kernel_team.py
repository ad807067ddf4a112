"""Four processes that share a board of signals; without torch, which they would all import."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tpspan import kernels
from tpspan.kernels.board import COUNT_MASK

PAGE_NBYTES = 1 << 16
TEAM_SIZE = 4
SLOT = 5
NEAR_WRAP = COUNT_MASK - 50


def words(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, dtype=np.uint32)


class Member:
    """One rank of a team; its methods run in a process of its own."""

    def __init__(self, rank: int, memory: mmap.mmap) -> None:
        self.rank = rank
        self.view = np.frombuffer(memory, np.uint32)
        self.base = self.view.ctypes.data
        self.data = self.view[-64:]  # free for the tests' own data

    def barriers(self, world_size: int, num_rounds: int, delay_s: float, seed: int) -> list[int]:
        """Rounds in which every rank writes a word and reads everybody's after the barrier."""
        epoch = words(NEAR_WRAP)
        chance = random.Random(seed + self.rank)
        wrong = []
        place = (self.base, PAGE_NBYTES, SLOT, self.rank, world_size, epoch.ctypes.data)
        for number in range(num_rounds):
            half = self.data[TEAM_SIZE * (number % 2) :][:world_size]
            half[self.rank] = number
            if delay_s and chance.random() < 0.1:
                time.sleep(chance.random() * delay_s)
            missing = kernels.host_barrier(*place, 30.0)
            if missing or (half != number).any():
                wrong.append(number)
        assert epoch[0] == (NEAR_WRAP + num_rounds) & COUNT_MASK
        return wrong

    def late_barrier(self, world_size: int, timeout_s: float) -> tuple[tuple[int, ...], float]:
        epoch = words(NEAR_WRAP)
        place = (self.base, PAGE_NBYTES, SLOT, self.rank, world_size, epoch.ctypes.data)
        start = time.monotonic()
        return kernels.host_barrier(*place, timeout_s), time.monotonic() - start

    def ring(self, world_size: int, num_rounds: int, delay_s: float) -> list[int]:
        """Hand a number on around the ring: wait for the left neighbour, post to the right one."""
        sent, expected = words(NEAR_WRAP), words(NEAR_WRAP)
        left, right = (self.rank - 1) % world_size, (self.rank + 1) % world_size
        counter = [
            kernels.counter_address(self.base, PAGE_NBYTES, world_size, SLOT, *pair)
            for pair in ((self.rank, left), (right, self.rank))
        ]
        wrong = []
        for number in range(num_rounds):
            if self.rank == 0:
                self.data[0] = number
                kernels.host_post(counter[1], sent.ctypes.data)
            missing = kernels.host_wait(counter[0], expected.ctypes.data, 30.0, peer=left)
            total = number + (self.rank if self.rank else world_size - 1)
            if missing or self.data[0] != total - (self.rank > 0):
                wrong.append(number)
            if self.rank:
                self.data[0] += 1
                time.sleep(delay_s * (number % 10 == 0))
                kernels.host_post(counter[1], sent.ctypes.data)
        return wrong


def serve(rank: int, path: str, connection: Connection) -> None:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    member = Member(rank, memory)
    while (call := connection.recv()) is not None:
        name, arguments = call
        try:
            connection.send((True, getattr(member, name)(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Team:
    """Four processes that share a board."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.descriptor = os.memfd_create("kernels-test", os.MFD_CLOEXEC)
        nbytes = TEAM_SIZE * PAGE_NBYTES
        os.truncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.connections, self.processes = [], []
        for rank in range(TEAM_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, path, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def start(self, members: Sequence[int], name: str, *arguments: Any) -> None:
        for rank in members:
            self.connections[rank].send((name, arguments))

    def finish(self, members: Sequence[int]) -> list[Any]:
        answers = []
        for rank in members:
            assert self.connections[rank].poll(60), f"rank {rank} hangs"
            is_right, value = self.connections[rank].recv()
            assert is_right, value
            answers.append(value)
        return answers

    def run(self, members: Sequence[int], name: str, *arguments: Any) -> list[Any]:
        board = np.frombuffer(self.memory, np.uint32)
        board[:] = 0
        board[:: kernels.LINE_NBYTES // 4] = NEAR_WRAP  # every counter; other words of a line are 0
        del board
        self.start(members, name, *arguments)
        return self.finish(members)

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.send(None)
            process.join(20)
            process.close()
            connection.close()
        self.memory.close()
        os.close(self.descriptor)
