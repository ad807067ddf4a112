"""Many ranks on the host backend, forked from one process. Run: python many_ranks.py NUMBER."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

import torch

import tpspan
from tpspan.memory import PAGE_NBYTES
from tpspan.spans import Signals, Span  # noqa: F401  imported before the fork, for all


def rank_main(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    with tpspan.init("host", timeout_s=90) as world:
        assert world.world_size == world_size
        start = time.monotonic()
        with Span.allocate(world, (world_size, PAGE_NBYTES), torch.uint8) as span:
            span.local[0, :: PAGE_NBYTES // 2] = rank + 1
            span.barrier()
            expected = torch.arange(1, world_size + 1, dtype=torch.uint8)
            assert span.gathered[:, 0].equal(expected)
            assert span.gathered[:, PAGE_NBYTES // 2].equal(expected)
            last = world_size - 1
            span.barrier()
            span.swap(0, last * PAGE_NBYTES, after=span.fence())
            assert span.gathered[[0, last], 0].tolist() == [world_size, 1]
            span.barrier()
        if rank == 0:
            print(f"{world_size} ranks agree after {time.monotonic() - start:.1f} s", flush=True)


def main() -> int:
    world_size = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(rank, world_size, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    failed = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
