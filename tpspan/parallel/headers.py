"""The headers of a channel's blocks, in the producer's host page, and what was read of them."""

from __future__ import annotations

import ctypes

from tpspan.parallel.packing import HEADER_WORDS, Spec, decode, encode
from tpspan.spans.pages import Pages

_OFFSET = 1 << 20  # counters lie before
_WORD = 8
_NBYTES = HEADER_WORDS * _WORD
LARGEST_DEPTH = 256
"""As many headers as a page of 2 MiB has room for behind the counters."""


class Headers:
    """A header for each block. What it says holds between a block's giving and its freeing.

    Args:
        pages: of the channel.
        producer: whose page holds them.
    """

    def __init__(self, pages: Pages, producer: int) -> None:
        self._base = pages.address_of(producer) + _OFFSET
        self._written: dict[int, list[Spec]] = {}
        self._read: dict[int, tuple[bytes, tuple[Spec, ...]]] = {}

    def write(self, block: int, specs: list[Spec]) -> None:
        """Say what a block holds; before it is given."""
        if self._written.get(block) == specs:
            return
        words = encode(specs)
        raw = b"".join(word.to_bytes(_WORD, "little") for word in words)
        ctypes.memmove(self._base + block * _NBYTES, raw, len(raw))
        self._written[block] = list(specs)

    def read(self, block: int) -> tuple[Spec, ...]:
        """What a block holds; after it was given."""
        address = self._base + block * _NBYTES
        num_words = min(ctypes.c_uint64.from_address(address).value, HEADER_WORDS)
        raw = ctypes.string_at(address, num_words * _WORD)
        known = self._read.get(block)
        if known is None or known[0] != raw:
            words = [
                int.from_bytes(raw[at : at + _WORD], "little") for at in range(0, len(raw), _WORD)
            ]
            known = self._read[block] = (raw, decode(words))
        return known[1]
