"""What ranks pay to wait for each other, and to launch a kernel."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from tpspan import kernels
from tpspan.tools.bench import values
from tpspan.tools.bench.measuring import Bench

GROUP = "barrier"
_NUM_CALLS = 100
_NUM_BEFORE = 25


def measure_barrier(bench: Bench) -> None:
    """Barriers one after another, on the stream and by the host's clock. Collective."""
    span = values.allocate(bench.world, 1)
    many = "of many, one after another"
    if not bench.is_cuda:
        samples = bench.sample(bench.wall(span.barrier, _NUM_CALLS), most=100)
        bench.add_us(GROUP, f"host, {many}", samples, bench.crowd)
        samples = bench.sample(bench.wall(bench.board.barrier, _NUM_CALLS), most=100)
        bench.add_us(GROUP, "board of messages, host", samples, "what collective calls vote with")
        span.close()
        return

    both = bench.sample(lambda: bench.queued(span.barrier, 2 * _NUM_CALLS, _NUM_BEFORE), most=50)
    bench.add_us(GROUP, f"on the stream, {many}", [on for on, _ in both], "queued ahead")
    bench.add_us(GROUP, "host time of a call", [host for _, host in both])
    samples = bench.sample(bench.on_stream(span.barrier, _NUM_CALLS), most=50)
    bench.add_us(GROUP, "on the stream as the host issues them", samples, "the slower of the two")
    samples = bench.sample(bench.wall(span.barrier), most=200)
    bench.add_us(GROUP, "one, host waiting for the device", samples)
    samples = bench.sample(bench.wall(bench.board.barrier, _NUM_CALLS), most=100)
    bench.add_us(GROUP, "board of messages, host", samples, "what collective calls vote with")
    span.close()


def measure_launch(bench: Bench) -> None:
    """Host time of launching one of our kernels; on the host, of a post that nobody sleeps for."""
    samples = bench.sample(_additions, most=100)
    bench.add_us(
        "launch", "1000 additions in Python", samples, "how fast the host's processors are just now"
    )
    if not bench.is_cuda:
        words = (ctypes.c_uint32 * 2)()
        counter, sent = (ctypes.addressof(words) + 4 * index for index in range(2))
        samples = bench.sample(bench.wall(lambda: kernels.host_post(counter, sent), 1000), most=100)
        bench.add_us("launch", "post of a signal, host", samples, "no sleeper to wake; with Python")
        return
    device = bench.world.device.index
    counts = torch.zeros(64, dtype=torch.int32, device=bench.world.device)
    counter, sent = counts.data_ptr(), counts.data_ptr() + 128
    stream = torch.cuda.current_stream(bench.world.device).cuda_stream
    data = torch.zeros(1, device=bench.world.device)

    def host_time(body: Callable[[], object]) -> float:
        for _ in range(_NUM_CALLS // 4):  # the first calls after a rest say more about the rest
            body()
        start = time.perf_counter()
        for _ in range(_NUM_CALLS):
            body()
        took = time.perf_counter() - start
        torch.cuda.synchronize(bench.world.device)
        return took / _NUM_CALLS

    def post() -> None:
        kernels.post(counter, sent, device=device, stream=stream)

    samples = bench.sample(lambda: host_time(post), most=100)
    bench.add_us("launch", "kernel of ours (post), host time", samples)
    samples = bench.sample(lambda: host_time(lambda: data.add_(1)), most=100)
    bench.add_us("launch", "torch add_, host time", samples, "for comparison")


def _additions() -> float:
    start = time.perf_counter()
    total = 0
    for number in range(1000):
        total += number
    return time.perf_counter() - start
