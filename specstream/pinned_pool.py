"""Pinned memory that goes from one engine to the next: pinning takes half a second for each GiB."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PinnedPool:
    """What the host stores of closed engines have left, for those of engines that are made after them."""

    pieces: list[Tensor] = field(default_factory=list)
    """Of bytes."""

    @property
    def total_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def holds(self, size: int) -> bool:
        """Whether there is a piece of at least so many bytes."""
        return any(piece.nbytes >= size for piece in self.pieces)

    def take(self, size: int) -> Tensor | None:
        """So many bytes, of the smallest piece that has them; None if no piece does."""
        enough = [piece for piece in self.pieces if piece.nbytes >= size]
        if not enough:
            return None
        smallest = min(enough, key=lambda piece: piece.nbytes)
        self.pieces = [piece for piece in self.pieces if piece is not smallest]
        return smallest[:size]

    def release_one(self) -> None:
        """Releases the smallest piece, if there is any."""
        self.pieces = sorted(self.pieces, key=lambda piece: piece.nbytes)[1:]

    def keep(self, memory: Tensor) -> None:
        """Takes over all of the memory that a tensor lies in. Nobody may use it any more."""
        with torch.inference_mode(False):  # other threads will write to it, in no such mode
            self.pieces.append(torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()))
