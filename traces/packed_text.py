"""A compressed file that grows in memory: there is nothing left to compress when it is written."""

from __future__ import annotations

import zlib
from typing import Any, BinaryIO

GZIP = 16 + zlib.MAX_WBITS
"""The format, to zlib."""


class PackedText:
    """Text between a beginning and an end, added part by part."""

    def __init__(self, start: str, end: str) -> None:
        self._end = end
        self._state: tuple[int, bytes, Any] = 0, b"", zlib.compressobj(1, zlib.DEFLATED, GZIP)
        """How many parts there are, what they have come to, and what goes on from there. Set together, so that a part
        is there or it is not, wherever an interrupt strikes."""
        self._add(start, 0)

    @property
    def count(self) -> int:
        """Parts that were added."""
        return self._state[0]

    def add(self, part: str) -> None:
        self._add(part, 1)

    def write(self, file: BinaryIO) -> None:
        """Writes what there is, ended; more can be added afterwards. The same bytes for the same text."""
        _, packed, compressor = self._state
        last = compressor.copy()
        file.write(packed + last.compress(self._end.encode()) + last.flush())

    def _add(self, text: str, parts: int) -> None:
        count, packed, before = self._state
        compressor = before.copy()
        self._state = count + parts, packed + compressor.compress(text.encode()), compressor
