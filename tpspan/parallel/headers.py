"""The headers of a channel's turns, in the producer's host page, and what was read of them.

There are more of them than blocks: on CUDA the producer's host may be turns ahead of the consumers'
hosts, which read a header until they release its turn. Turn t has header t modulo ``NUM_HEADERS``,
and is written only when the consumers' hosts have released turn t - NUM_HEADERS (invariant 6).
"""

from __future__ import annotations

import ctypes

from tpspan.parallel.packing import HEADER_WORDS, Spec, decode, encode
from tpspan.spans.pages import Pages

_OFFSET = 1 << 20  # counters lie before
_WORD = 8
_NBYTES = HEADER_WORDS * _WORD
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
        words = encode(specs)
        raw = b"".join(word.to_bytes(_WORD, "little") for word in words)
        ctypes.memmove(self._base + index * _NBYTES, raw, len(raw))
        self._written[index] = specs

    def read(self, turn: int) -> tuple[Spec, ...]:
        """What a turn's block holds; after it was given, and before it is released."""
        index = turn % NUM_HEADERS
        address = self._base + index * _NBYTES
        num_words = min(ctypes.c_uint64.from_address(address).value, HEADER_WORDS)
        raw = ctypes.string_at(address, num_words * _WORD)
        known = self._read.get(index)
        if known is None or known[0] != raw:
            words = [
                int.from_bytes(raw[at : at + _WORD], "little") for at in range(0, len(raw), _WORD)
            ]
            known = self._read[index] = (raw, decode(words))
        return known[1]
