"""The device that published memory is used on in this process, and its driver."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from tpspan.errors import DriverError
from tpspan.memory import Driver
from tpspan.memory.cuda import CudaDriver, cuda_device_count, device_uuid
from tpspan.memory.host import HostDriver
from tpspan.spans.fence import StreamsInUse

_TIMEOUT_S = 300.0

_drivers: dict[torch.device, Driver] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Local:
    """A device of this process; a ``Place`` for fences.

    Attributes:
        driver, device, backend: of that device.
        rank, timeout_s: of a process alone.
    """

    driver: Driver
    rank: int = 0
    timeout_s: float = _TIMEOUT_S

    @property
    def backend(self) -> str:
        """``cuda`` or ``host``."""
        return self.driver.name

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.driver.device

    def streams(self) -> StreamsInUse:
        """Streams that use a range on this device: none so far."""
        return StreamsInUse(self, _NoWaits())

    def synchronize(self) -> None:
        """Wait until everything on the current stream is done."""
        if self.backend == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def identity(self) -> str:
        """What the device is called in every process: ``cpu``, or ``cuda:`` and its UUID."""
        return "cpu" if self.backend == "host" else f"cuda:{device_uuid(self.device.index)}"


class _NoWaits:
    """Nobody waits on a stream for another process here."""

    def check(self) -> None:
        """Nothing can have failed."""


def local(device: torch.device | str) -> Local:
    """A device of this process, with the one driver that it has here.

    Raises:
        ValueError: it is neither a CPU nor a CUDA device.
        DriverError: there is no such GPU.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory can be published on cpu and cuda devices, not on {device}")
    index: int | None = device.index
    if device.type == "cpu":
        device = torch.device("cpu")
    elif index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _drivers:
            if device.type == "cuda":
                torch.cuda.init()  # tensors are made, and streams noted, without asking torch first
            _drivers[device] = HostDriver() if device.type == "cpu" else CudaDriver(device.index)
        return Local(_drivers[device])


def local_for(identity: str) -> Local:
    """The device on which memory of that identity is best mapped here.

    The GPU that owns it if this process sees it, otherwise the current one, over the link.

    Raises:
        DriverError: it is memory of a GPU, and this process sees none.
    """
    if identity == "cpu":
        return local("cpu")
    wanted = identity.partition(":")[2].split(",")
    visible = [device_uuid(index) for index in range(cuda_device_count())]
    if not visible:
        raise DriverError(
            "attach",
            0,
            "NO_DEVICE",
            {"device": identity},
            "It lies on a GPU, and this process sees none: check CUDA_VISIBLE_DEVICES, or publish "
            "it with device='cpu'",
        )
    index = next((visible.index(uuid) for uuid in wanted if uuid in visible), None)
    return local("cuda" if index is None else f"cuda:{index}")
