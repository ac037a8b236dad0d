"""A draft's window in whole blocks, as a drafter on a CUDA device keeps it. To plan one, no device is needed."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.draft import FEED_TOKENS, Branches, DraftWindow
from specstream.round_spec import SeatSpec

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class BlockWindow:
    """A window in whole blocks: sinks stay, later blocks are used in turn, the oldest dropped first."""

    sink_blocks: int
    ring_blocks: int
    window: int
    """Tokens; the latest that must be there."""

    @classmethod
    def of(cls, window: DraftWindow) -> BlockWindow:
        whole = -(-window.capacity // BLOCK_TOKENS)
        if window.window is None:
            return cls(whole, 0, window.capacity)
        sinks = -(-window.sink // BLOCK_TOKENS)
        ring = -(-(window.window + FEED_TOKENS) // BLOCK_TOKENS) + 1
        return cls(sinks, ring, window.window) if sinks + ring < whole else cls(whole, 0, window.capacity)

    @property
    def blocks(self) -> int:
        return self.sink_blocks + self.ring_blocks

    def blocks_for(self, seats: int, branches: Branches) -> int:
        """Blocks of so many requests, and of copies of them."""
        return self.blocks * seats + branches.count * blocks_of_branch(branches.tokens)

    def seat(self, seat: int, length: int, rows: int, since: int = 0) -> SeatSpec:
        """Where a request's KV is while `rows` more tokens are computed; blocks that are dropped count as streamed.

        So do those from the sinks to token `since`, which are not computed.
        """
        dropped = max(0, max(length - self.window, since) // BLOCK_TOKENS - self.sink_blocks)
        first, last = length // BLOCK_TOKENS, (length + rows - 1) // BLOCK_TOKENS
        return SeatSpec(seat, self.sink_blocks, max(1, self.ring_blocks), dropped, 0, first, last + 1 - first)


def blocks_of_branch(tokens: int) -> int:
    """Blocks that so many tokens fall into, wherever they begin."""
    return 1 + -(-tokens // BLOCK_TOKENS)
