"""One rank of a group: does what pytest asks until the socket closes.

Started as ``python -m harness.worker SOCKET OPTIONS`` by a launcher, once per rank; OPTIONS are
the keyword arguments of ``tpspan.init`` in JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import leaks
from harness.messages import Hello, Ready, Report, Run, Settle, Stop, receive, send

# A rank that hangs is asked for its stacks and killed by pytest. If pytest itself is gone, the
# rank ends by itself this long after the body's deadline.
_ORPHAN_S = 30.0


def main() -> None:
    address, options = sys.argv[1], json.loads(sys.argv[2])
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(address)
    connection = Connection(client.detach())
    stacks = (Path(address).parent / f"stacks.{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    send(connection, Hello(os.getpid()))
    complaints = leaks.Complaints()
    complaints.listen()
    gc.disable()  # an eighth of the time that importing torch takes
    try:
        import tpspan  # after Hello: a failing import is reported, not just seen as a death

        if options.get("backend") == "cuda":
            options.setdefault("share_device", True)
        world = tpspan.init(**options)
    except BaseException:
        send(connection, Ready(-1, traceback.format_exc()))
        raise
    send(connection, Ready(world.rank))
    num_modules = _keep_what_exists()
    measure = _device_memory(world)
    last = leaks.take(measure)
    while True:
        try:
            request = receive(connection)
        except (EOFError, ConnectionResetError):
            os._exit(1)  # pytest is gone; peers may be in any state
        if isinstance(request, Stop):
            break
        if isinstance(request, Settle):
            growth: dict[str, str] = {}
            if request.looks:
                last, growth = leaks.settle(last, measure, patient=request.patient)
            else:
                gc.collect()  # what nobody closed complains
            if not growth and len(sys.modules) > num_modules + 100:
                num_modules = _keep_what_exists()
            answer = Report(world.rank, growth=growth, complaints=complaints.drain())
        else:
            faulthandler.dump_traceback_later(request.deadline_s + _ORPHAN_S, exit=True)
            answer = perform(world, request)
            faulthandler.cancel_dump_traceback_later()
        send(connection, answer)
        del request, answer  # a value may hold memory of the world
    world.close()
    send(connection, Report(world.rank, complaints=complaints.drain()))


def perform(world: Any, request: Run) -> Report:
    """Run one body. Its frames are gone when this returns, so nothing of it is kept alive."""
    try:
        module, _, function = request.body.partition(":")
        if module not in sys.modules:
            gc.disable()
            importlib.import_module(module)
            _keep_what_exists()
        value = getattr(sys.modules[module], function)(world, **request.kwargs)
        pickle.dumps(value)
        return Report(world.rank, value=value)
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # pytest.skip() in a body
            return Report(world.rank, skipped=str(error))
        return Report(world.rank, error=traceback.format_exc())


def _keep_what_exists() -> int:
    """Modules stay: collections in and after bodies need not walk torch's and numba's objects.

    They take 25 ms otherwise, as long as many a body. Returns how many modules there are.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    return len(sys.modules)


def _device_memory(world: Any) -> Callable[[], int] | None:
    if world.backend != "cuda":
        return None
    is_ours_alone = os.environ.get("TPSPAN_TESTS_SHARE_GPU") != "1"
    import torch  # CUDA only: the host backend's ranks need nothing of torch.cuda

    def used_nbytes() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = world.driver.memory_info()
        return int(total - free) if is_ours_alone else 0

    return used_nbytes


if __name__ == "__main__":
    main()
