"""What tests of kernels draw, and the words and the GPU they run them on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kernel_team import words
from tpspan import kernels
from tpspan.kernels.board import COUNT_MASK

GUARD = 64
SECOND_NS = 10**9

counts = st.one_of(st.integers(0, COUNT_MASK), st.sampled_from([0, 1, COUNT_MASK, 1 << 31]))
sizes = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.sampled_from([4096, 16384, 16400]))
Piece = tuple[int, int, int]


def lay_out(draws: Sequence[tuple[int, int, int]]) -> list[Piece]:
    """Pieces that read anywhere and write one after another, with gaps."""
    pieces, target = [], 0
    for source, gap, nbytes in draws:
        pieces.append((source, target + gap, nbytes))
        target += gap + nbytes
    return pieces


drawn_pieces = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20), sizes), max_size=8)


def prepared_gpu() -> int:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch sees none")
    kernels.prepare(0)
    return 0


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def device_words(*values: int) -> torch.Tensor:
    return torch.from_numpy(words(*values).view(np.int32)).cuda()


def host_words(tensor: torch.Tensor) -> list[int]:
    return tensor.cpu().numpy().view(np.uint32).tolist()


def pinned_words(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.int32).pin_memory()
