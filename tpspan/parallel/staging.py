"""A weight that several ranks hold, multiplied in place or through double buffers in local memory.

All copies of a rank go on one stream of their own. Work is forked from the current stream and
joined to it by events alone, so a CUDA graph captures it like any other, and scratch memory from
torch's allocator is used again no sooner than the joined stream allows. On the host a copy is done
when its call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tpspan.launch.world import World
from tpspan.parallel.chunks import Chunk, Piece, copy_order, plan_chunks
from tpspan.parallel.policy import Product
from tpspan.spans.span import Span

Mark = torch.cuda.Event | None
"""Where a stream has come to; None on the host, where everything has happened already."""


class CopyLane:
    """The copies of this rank, in order, beside the stream that multiplies."""

    def __init__(self, world: World) -> None:
        self._driver = world.driver
        self._stream = torch.cuda.Stream(world.device) if world.backend == "cuda" else None

    @classmethod
    def of(cls, world: World) -> CopyLane:
        """The lane of a world; made at the first call."""
        return world.resource("copy lane", cls)

    def close(self) -> None:
        """Nothing to give back: the stream is one of torch's."""

    def current(self) -> torch.cuda.Stream | None:
        """The stream that multiplies; None on the host."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device)

    def follow(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Hold later copies until streams, by default the current one, have come this far."""
        if self._stream is not None:
            for stream in streams or (torch.cuda.current_stream(self._stream.device),):
                self._stream.wait_event(stream.record_event())

    def copy(self, target: int, source: int, pieces: Iterable[Piece], shift: int = 0) -> Mark:
        """Copy pieces of what lies at ``source``; ``target`` stands for its byte ``shift``."""
        stream = 0 if self._stream is None else self._stream.cuda_stream
        for piece in pieces:
            at = piece.offset_bytes
            self._driver.copy(target + at - shift, source + at, piece.nbytes, stream)
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Hold the current stream until the copies before the mark are done."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def join(self, stream: torch.cuda.Stream | None = None) -> None:
        """Hold a stream, by default the current one, until all copies are done."""
        if self._stream is not None:
            stream = stream or torch.cuda.current_stream(self._stream.device)
            stream.wait_stream(self._stream)

    def reads(self, span: Span) -> None:
        """Say that the lane reads a span, so that fences wait for it."""
        if self._stream is not None:
            span.record_stream(self._stream)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Fork from the current stream and join it at the end, also after an error.

        Scratch that was allocated on the current stream needs no ``record_stream``: whatever gets
        the memory next comes behind the join.
        """
        self.follow()
        try:
            yield
        finally:
            self.join()


class SharedWeight:
    """A row-major matrix in a span, (out_features, in_features), and where its bytes lie.

    Args:
        span: holds it.
        shape, dtype: of the matrix.
        offset_bytes: of its first element in the span.
    """

    def __init__(
        self, span: Span, shape: tuple[int, int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> None:
        self.span, self.shape, self.dtype = span, shape, dtype
        self.offset_bytes = offset_bytes
        self.row_nbytes = shape[1] * dtype.itemsize
        self.nbytes = shape[0] * self.row_nbytes
        world = span.world
        self.pieces = tuple(
            Piece(run.offset_bytes - offset_bytes, run.nbytes, run.owner)
            for run in (span.layout.pieces(offset_bytes, self.nbytes) if self.nbytes else ())
        )
        self.remote_nbytes = sum(p.nbytes for p in self.pieces if p.owner != world.rank)
        self.copies = tuple(copy_order(self.pieces, world.rank, world.world_size))
        self.lane = CopyLane.of(world)
        self._plans: dict[tuple[bool, bool], tuple[Chunk, ...]] = {}

    @property
    def address(self) -> int:
        """Of the first element, in this rank's mapping.

        Raises:
            ClosedError: the span was closed.
        """
        return self.span.base_address + self.offset_bytes

    def in_place(self) -> torch.Tensor:
        """The matrix where it lies; notes the current stream in the span.

        Raises:
            ClosedError: the span was closed.
        """
        return self.span.tensor(self.shape, self.dtype, self.offset_bytes)

    def product(self, rows: int) -> Product:
        """The product with ``rows`` rows of x, in numbers."""
        out_features, in_features = self.shape
        itemsize = self.dtype.itemsize
        return Product(rows, out_features, in_features, itemsize, self.remote_nbytes)

    def chunks(self, rows: int) -> tuple[Chunk, ...]:
        """How a staged product with so many rows of x is cut."""
        key = rows <= 256, rows <= 2048
        if key not in self._plans:
            world = self.span.world
            self._plans[key] = plan_chunks(
                self.pieces, self.shape[0], self.row_nbytes, world.rank, world.world_size, rows
            )
        return self._plans[key]

    def scratch_nbytes(self, rows: int) -> int:
        """Bytes of the double buffers of a staged product; never more than two of the weight."""
        return sum(_buffer_rows(self.chunks(rows))) * self.row_nbytes

    @contextmanager
    def fetching(self) -> Iterator[torch.Tensor]:
        """Give the matrix in local memory; it is there at the end of the block, not before.

        What the block queues on the current stream goes on beside the copies.
        """
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.span.world.device)
        with self.lane.forked():
            self.lane.reads(self.span)
            self.lane.copy(whole.data_ptr(), self.address, self.copies)
            yield whole


def multiply(
    x_MK: torch.Tensor, w_NK: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write ``x @ w.T + bias`` into ``out``, which may be columns of a larger tensor."""
    w_NK = w_NK.to(x_MK.dtype)  # autocast
    if bias is None:
        torch.mm(x_MK, w_NK.T, out=out)
    else:
        torch.addmm(bias, x_MK, w_NK.T, out=out)


def staged_product(
    weight: SharedWeight, x_MK: torch.Tensor, bias: torch.Tensor | None, out_MN: torch.Tensor
) -> None:
    """Write ``x @ W.T + bias``, bringing the next rows of W while the last are multiplied.

    The rank's own rows are not copied. The others pass through two buffers; one is written again
    only when the multiplication that reads it is done. Products go straight into columns of the
    result: they are as fast there, and nothing has to be put together.

    Args:
        weight: (N, K), of the dtype of x or, under autocast, of another.
        x_MK, out_MN: at least one row, on the device of the world.
        bias: (N,) or None, of the dtype of x.

    Raises:
        ClosedError: the span was closed.
    """
    lane = weight.lane
    whole = weight.in_place()
    chunks = weight.chunks(x_MK.shape[0])
    copied = [chunk for chunk in chunks if chunk.copies]
    rows = _buffer_rows(chunks)
    storage = torch.empty(
        sum(rows) * weight.shape[1], dtype=weight.dtype, device=weight.span.world.device
    ).view(sum(rows), weight.shape[1])
    buffers = storage.split(rows) if rows else ()

    def bring(index: int) -> Mark:
        chunk = copied[index]
        shift = chunk.start * weight.row_nbytes
        target = buffers[index % 2].data_ptr()
        return lane.copy(target, weight.address, chunk.copies, shift)

    marks: list[Mark] = []
    num_done = 0

    def bring_ahead(num_ahead: int) -> None:
        while len(marks) < min(len(copied), num_done + num_ahead):
            if len(marks) >= 2:
                lane.follow()  # the buffer is free once what was just queued is done
            marks.append(bring(len(marks)))

    with lane.forked():
        lane.reads(weight.span)
        bring_ahead(1)
        for chunk in chunks:
            columns = slice(chunk.start, chunk.stop)
            part = whole[columns]
            if chunk.copies:
                lane.wait(marks[num_done])
                part = buffers[num_done % 2][: chunk.stop - chunk.start]
                num_done += 1
            multiply(x_MK, part, None if bias is None else bias[columns], out_MN[:, columns])
            # Behind the product that they go on beside: a host that queued all copies first would
            # leave the GPU without a product meanwhile.
            bring_ahead(2)


def _buffer_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Rows of the two buffers: the first takes every other copied chunk, the second the rest."""
    sizes = [chunk.stop - chunk.start for chunk in chunks if chunk.copies]
    return [max(part) for part in (sizes[0::2], sizes[1::2]) if part]
