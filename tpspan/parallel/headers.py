"""The headers of a channel's turns, in the producer's host page, and what was read of them.

There are more of them than blocks: on CUDA the producer's host may be turns ahead of the consumers'
hosts, which read a header until they release its turn. Turn t has header t modulo ``NUM_HEADERS``,
and is written only when the consumers' hosts have released turn t - NUM_HEADERS (invariant 6).
"""

from __future__ import annotations

import ctypes

from tpspan.parallel.packing import HEADER_WORDS, WORD_NBYTES, Spec, as_bytes, decode, encode
from tpspan.spans.pages import Pages

_OFFSET = 1 << 20  # counters lie before
_NBYTES = HEADER_WORDS * WORD_NBYTES
NUM_HEADERS = 256
"""As many as a page of 2 MiB has room for behind the counters."""
LARGEST_DEPTH = NUM_HEADERS


class Headers:
    """What the blocks hold, turn by turn.

    Args:
        pages: of the channel.
        producer: whose page holds them.
    """

    def __init__(self, pages: Pages, producer: int) -> None:
        self._base = pages.address_of(producer) + _OFFSET
        self._written: dict[int, tuple[Spec, ...]] = {}
        self._read: dict[int, tuple[bytes, tuple[Spec, ...]]] = {}

    def write(self, turn: int, specs: tuple[Spec, ...]) -> None:
        """Say what a turn's block holds; before it is given."""
        index = turn % NUM_HEADERS
        if self._written.get(index) == specs:
            return
        raw = as_bytes(encode(specs))
        ctypes.memmove(self._base + index * _NBYTES, raw, len(raw))
        self._written[index] = specs

    def is_of(self, turn: int, raw: bytes) -> bool:
        """Whether ``read`` would find what ``raw`` stands for, without taking it apart."""
        # The first word says how many there are, so equal beginnings are equal headers.
        address = self._base + turn % NUM_HEADERS * _NBYTES
        return ctypes.string_at(address, len(raw)) == raw

    def read(self, turn: int) -> tuple[Spec, ...]:
        """What a turn's block holds; after it was given, and before it is released."""
        index = turn % NUM_HEADERS
        address = self._base + index * _NBYTES
        num_words = min(ctypes.c_uint64.from_address(address).value, HEADER_WORDS)
        raw = ctypes.string_at(address, num_words * WORD_NBYTES)
        known = self._read.get(index)
        if known is None or known[0] != raw:
            words = [
                int.from_bytes(raw[at : at + WORD_NBYTES], "little")
                for at in range(0, len(raw), WORD_NBYTES)
            ]
            known = self._read[index] = (raw, decode(words))
        return known[1]
