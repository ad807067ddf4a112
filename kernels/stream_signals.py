"""post, wait and barrier on a CUDA stream: one launch each, right under graph replay.

All addresses are as the device sees them. Ranks that share a device must not use wait and barrier:
they are time-sliced, and a kernel that spins keeps the one it waits for from running.
A timeout is relative, counted from the kernel's own start: an absolute one would be frozen into a
captured graph.
"""

from __future__ import annotations

from tpspan.kernels.compile import kernel

LARGEST_WORLD = 1024
_WARP = 32


def post(counter_address: int, sent_address: int, *, device: int, stream: int) -> None:
    """Advance this rank's count of sent signals and store it to the receiver's counter.

    Everything done on the stream before is visible to whoever sees the count.

    Args:
        counter_address: the receiver's counter, 32 bits, usually on another GPU.
        sent_address: this rank's own count, 32 bits in its device memory.
    """
    kernel("post", device)(stream, 1, 1, counter_address, sent_address)


def wait(
    counter_address: int,
    expected_address: int,
    status_address: int,
    timeout_ns: int,
    *,
    device: int,
    stream: int,
) -> None:
    """Advance this rank's count of expected signals and hold the stream until it has arrived.

    Args:
        counter_address: this rank's own counter, 32 bits.
        expected_address: this rank's own count, 32 bits in its device memory.
        status_address: a 32-bit word of pinned host memory; set to 1 if the time runs out, in which
            case the stream goes on. Nothing is written otherwise.
    """
    arguments = (counter_address, expected_address, status_address, timeout_ns)
    kernel("wait", device)(stream, 1, 1, *arguments)


def barrier(
    base: int,
    page_nbytes: int,
    slot: int,
    rank: int,
    world_size: int,
    epoch_address: int,
    status_address: int,
    timeout_ns: int,
    *,
    device: int,
    stream: int,
) -> None:
    """Hold the stream until the streams of all ranks have come here.

    Args:
        base, page_nbytes, slot: where the counters lie, see tpspan.kernels.board.
        epoch_address: this rank's own count, 32 bits in its device memory.
        status_address: world_size 32-bit words of pinned host memory; word t is set to 1 if rank t
            has not come in time. Nothing is written otherwise.

    Raises:
        ValueError: more ranks than threads of a block.
    """
    if not 0 < world_size <= LARGEST_WORLD:
        raise ValueError(f"a barrier takes 1 to {LARGEST_WORLD} ranks, not {world_size}")
    kernel("barrier", device)(
        stream,
        1,
        -(-world_size // _WARP) * _WARP,
        base,
        page_nbytes,
        slot,
        rank,
        world_size,
        epoch_address,
        status_address,
        timeout_ns,
    )
