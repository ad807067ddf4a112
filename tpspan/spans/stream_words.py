"""The words by which the streams of ranks that share a GPU wait for each other.

For every slot a rank has a word of its own, which says to how many barriers it has come. Those of
all ranks lie side by side in one page, in lines of rank 0 (``tpspan.kernels.board``), which with
four ranks takes little more than half the time of words in a page each. Each pair of ranks has a
flag that is 0 or 1 and a count of posts, in a line of the rank that waits. What ranks were told of
those that were late lies beside, in memory that only hosts read.

Where all ranks share one GPU the words lie in its memory: a barrier of two takes 7 µs there, and 14
in host memory. The host cannot look at them directly then, which only a deadline needs:
``DeviceAccess``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from cuda.bindings import driver as cu

from tpspan.launch.world import World
from tpspan.memory.cuda import CudaDriver, check
from tpspan.spans.pages import Pages

FREE, SET = 0, 1
# In a line: the flag, the count of posts, and in those of rank 0 the number of a barrier.
_COUNT_AT, _ARRIVED_AT = 8, 16

_WORD_NBYTES = 4
_NUM_STREAMS = 4  # of each priority
_WORDS_AT_ONCE = 256
_PATIENCE_S = 0.05
_NAP_S = 50e-6


class Access(Protocol):
    """How the host reads and writes words."""

    def read(self, addresses: Sequence[int]) -> list[int]:
        """What the words hold."""

    def write(self, values: Iterable[tuple[int, int]]) -> None:
        """Give words (address, value) new values."""

    def close(self) -> None:
        """Give back what it takes."""


class StreamWords:
    """Where the words are, and what they hold.

    Args:
        pages: of the words, one for each rank.
        reports: pages of host memory, one for each rank.
        access: how the host reads and writes words.
        world: the ranks.

    Attributes:
        rank, world_size: this rank, and how many there are.
        peers: the others, from the right neighbour on around.
        read, write: those of ``access``.
    """

    def __init__(self, pages: Pages, reports: Pages, access: Access, world: World) -> None:
        self._pages, self._reported = pages, reports
        self.rank, self.world_size = world.rank, world.world_size
        self.peers = [(world.rank + k) % world.world_size for k in range(1, world.world_size)]
        self.read, self.write, self.close = access.read, access.write, access.close
        self._own_reports = memoryview(self._reports(self.rank)).cast("B")
        self._no_reports = bytes(len(self._own_reports))
        self._own_reports[:] = self._no_reports

    def arrived(self, slot: int, rank: int) -> int:
        """Address of the number of the last barrier to which a rank's stream has come."""
        return self._pages.counter(slot, 0, rank) + _ARRIVED_AT

    def posted(self, slot: int, receiver: int, sender: int) -> int:
        """Address of the count of posts of ``sender`` to ``receiver``."""
        return self._pages.counter(slot, receiver, sender) + _COUNT_AT

    def flag(self, slot: int, receiver: int, sender: int) -> int:
        """Address of the flag that ``sender`` sets and ``receiver`` clears."""
        return self._pages.counter(slot, receiver, sender)

    def tell(self, missing: set[int]) -> None:
        """Tell all ranks, this one included, whom this rank has missed."""
        for rank in range(self.world_size):
            for peer in missing:
                self._reports(rank)[peer] = 1
            self._reports(rank)[self.world_size + self.rank] = 1

    def told(self) -> tuple[set[int], set[int]]:
        """Who was missed, and who has said so, as far as this rank was told."""
        reports = self._reports(self.rank)
        said = reports[self.world_size :]  # first: who has said something has said whom it missed
        missed = reports[: self.world_size]
        return ({r for r, m in enumerate(missed) if m}, {r for r, m in enumerate(said) if m})

    def is_well(self) -> bool:
        """Whether nobody was missed; a tenth of a µs, since every barrier asks."""
        return self._own_reports == self._no_reports

    def _reports(self, rank: int) -> ctypes.Array[ctypes.c_uint8]:
        num = 2 * self.world_size
        return (ctypes.c_uint8 * num).from_address(self._reported.address_of(rank))


class HostAccess:
    """``Access`` to words in host memory."""

    def read(self, addresses: Sequence[int]) -> list[int]:
        return [_word(address).value for address in addresses]

    def write(self, values: Iterable[tuple[int, int]]) -> None:
        for address, value in values:
            _word(address).value = value

    def close(self) -> None:
        """Nothing to give back."""


class DeviceAccess:
    """``Access`` to words in the memory of a GPU, by streams of its own.

    A stream may lie in one queue with a stream that is held by a word. So there are several, also
    of another priority, which have other queues, and what does not come to its end on one of them
    is tried on the next.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._streams: list[Any] = []
        with driver.current():
            least, greatest = check("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange())
            for priority in (greatest, least):
                for _ in range(_NUM_STREAMS):
                    made = cu.cuStreamCreateWithPriority(non_blocking, priority)
                    self._streams.append(check("cuStreamCreateWithPriority", made))
        # A stream that comes late to its end still writes into its own part.
        shape = (len(self._streams), _WORDS_AT_ONCE)
        self._parts = torch.zeros(shape, dtype=torch.int32).pin_memory()

    def read(self, addresses: Sequence[int]) -> list[int]:
        found: list[int] = []
        for at in range(0, len(addresses), _WORDS_AT_ONCE):
            found += self._read(addresses[at : at + _WORDS_AT_ONCE])
        return found

    def write(self, values: Iterable[tuple[int, int]]) -> None:
        pairs = list(values)
        with self._driver.current():
            for index in self._free():
                stream = self._streams[index]
                for address, value in pairs:
                    written = cu.cuStreamWriteValue32(stream, address, value, 0)
                    check("cuStreamWriteValue32", written)
                if self._comes_to_its_end(index):
                    return

    def close(self) -> None:
        with self._driver.current():
            for stream in self._streams:
                check("cuStreamDestroy", cu.cuStreamDestroy(stream))
        self._streams.clear()

    def _read(self, addresses: Sequence[int]) -> list[int]:
        with self._driver.current():
            for index in self._free():
                part = self._parts[index]
                for number, address in enumerate(addresses):
                    target = part.data_ptr() + number * _WORD_NBYTES
                    copied = cu.cuMemcpyDtoHAsync(
                        target, address, _WORD_NBYTES, self._streams[index]
                    )
                    check("cuMemcpyDtoHAsync", copied)
                if self._comes_to_its_end(index):
                    return [each & 0xFFFF_FFFF for each in part[: len(addresses)].tolist()]
        raise TimeoutError("every stream that could read the words of signals is held")

    def _free(self) -> list[int]:
        return [index for index in range(len(self._streams)) if self._is_done(index)]

    def _comes_to_its_end(self, index: int) -> bool:
        end = time.monotonic() + _PATIENCE_S
        while not self._is_done(index):
            if time.monotonic() > end:
                return False
            time.sleep(_NAP_S)
        return True

    def _is_done(self, index: int) -> bool:
        (code,) = cu.cuStreamQuery(self._streams[index])
        if code == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check("cuStreamQuery", (code,))
        return True


def _word(address: int) -> ctypes.c_uint32:
    """What lies at an address, to be read and written."""
    return ctypes.c_uint32.from_address(address)
