"""Signals on a GPU against their reference, and in a captured graph."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from kernel_cases import SECOND_NS, device_words, host_words, pinned_words, prepared_gpu, stream
from kernel_team import words
from tpspan import kernels
from tpspan.kernels import reference
from tpspan.kernels.board import COUNT_MASK


@pytest.fixture(scope="module")
def gpu() -> int:
    return prepared_gpu()


@pytest.mark.cuda
@pytest.mark.parametrize("start", [0, COUNT_MASK - 2, (1 << 31) - 2])
def test_device_post_and_wait_equal_the_reference(gpu: int, start: int) -> None:
    ours, theirs = device_words(start, start, start), words(start, start, start)
    status = pinned_words(1)
    counter, sent, expected = (ours.data_ptr() + 4 * index for index in range(3))
    host_counter, host_sent, host_expected = (theirs.ctypes.data + 4 * i for i in range(3))
    for _ in range(5):
        kernels.post(counter, sent, device=gpu, stream=stream())
        kernels.wait(counter, expected, status.data_ptr(), SECOND_NS, device=gpu, stream=stream())
        reference.reference_post(host_counter, host_sent)
        assert reference.reference_wait(host_counter, host_expected) == ()
    assert host_words(ours) == theirs.tolist()
    assert host_words(status) == [0]


@pytest.mark.cuda
def test_invariant_9_a_device_wait_ends_at_its_deadline(gpu: int) -> None:
    counter, expected, status = device_words(0), device_words(0), pinned_words(1)
    torch.cuda.synchronize()
    start = time.monotonic()
    place = (counter.data_ptr(), expected.data_ptr(), status.data_ptr())
    kernels.wait(*place, SECOND_NS // 10, device=gpu, stream=stream())
    torch.cuda.synchronize()
    assert 0.09 < time.monotonic() - start < 5
    assert host_words(status) == [1] and host_words(expected) == [1]


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2, 3, 32, 33, 1024])
def test_device_barrier_equals_the_reference(gpu: int, world_size: int) -> None:
    """Peers play no part: what they would have stored stands in the board, or does not."""
    chance = random.Random(world_size)
    slot, epoch = 2, COUNT_MASK - 1
    page_nbytes = kernels.LINE_NBYTES * world_size * (slot + 1)
    for rank in {0, world_size // 2, world_size - 1}:
        for chance_missing in (0.0, 0.3):
            board = np.zeros(world_size * page_nbytes // 4, np.uint32)
            for peer in range(world_size):
                place = kernels.counter_address(0, page_nbytes, world_size, slot, rank, peer)
                ahead = 0 if chance.random() < chance_missing else chance.choice((1, 2))
                board[place // 4] = (epoch + ahead) & COUNT_MASK
            there = torch.from_numpy(board.view(np.int32)).cuda()
            our_epoch, their_epoch = device_words(epoch), words(epoch)
            status = pinned_words(world_size)
            shape = (page_nbytes, slot, rank, world_size)
            kernels.barrier(
                there.data_ptr(),
                *shape,
                our_epoch.data_ptr(),
                status.data_ptr(),
                SECOND_NS // 100,
                device=gpu,
                stream=stream(),
            )
            epoch_address = their_epoch.ctypes.data
            missing = reference.reference_barrier(board.ctypes.data, *shape, epoch_address)
            assert host_words(our_epoch) == their_epoch.tolist()
            assert host_words(there) == board.tolist()
            assert tuple(np.flatnonzero(host_words(status))) == missing


@pytest.mark.cuda
def test_a_captured_graph_advances_its_counts_at_every_replay(gpu: int) -> None:
    board, own = torch.zeros(1024, dtype=torch.int32, device="cuda"), device_words(0, 0, 0)
    status = pinned_words(2)
    epoch, sent, expected = (own.data_ptr() + 4 * index for index in range(3))
    source = torch.arange(100_000, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        base, flags = board.data_ptr(), status.data_ptr()
        shape = (base, 4096, 1, 0, 1, epoch, flags, SECOND_NS)
        kernels.barrier(*shape, device=gpu, stream=stream())
        kernels.post(base, sent, device=gpu, stream=stream())
        side.wait_stream(torch.cuda.current_stream())
        here = {"device": gpu, "stream": side.cuda_stream}
        kernels.wait(base, expected, flags + 4, SECOND_NS, **here)
        kernels.rotated_copy(target.data_ptr(), source.data_ptr(), 400_000, 1234, **here)
        torch.cuda.current_stream().wait_stream(side)
    assert host_words(own) == [0, 0, 0], "capture runs nothing"
    for replays in (1, 50):
        target.zero_()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(source, target)
    assert host_words(own) == [51, 51, 51] and host_words(board)[0] == 51
    assert host_words(status) == [0, 0]


@pytest.mark.cuda
def test_threads_without_a_context_may_launch(gpu: int) -> None:
    counter, sent = device_words(0), device_words(0)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            for _ in range(200):
                kernels.post(counter.data_ptr(), sent.data_ptr(), device=gpu, stream=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert host_words(sent) == host_words(counter) == [800]
