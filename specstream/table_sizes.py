"""Sizes of what a round's attention kernels read and leave: from shapes alone, to plan without a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specstream.batch import MIN_ROWS, padded_rows
from specstream.kernels.tiling import MAX_OWN_ROWS, Tiling, choose_tiling
from specstream.kv import ChunkLayout


@dataclass(frozen=True)
class TableSizes:
    """Sizes of the tables of one kind of round."""

    seats: int
    rows: int
    """Padded: rows beyond those of seats are computed and ignored."""
    rows_per_seat: int
    """The most rows of a seat, or more."""
    blocks: int
    """Device blocks that a seat may attend to."""
    append_blocks: int
    """Device blocks that a seat's rows may fall into."""
    groups: int
    """Groups that stream in each layer."""
    groups_per_seat: int
    """The most of them that are of one seat."""
    chunks_per_group: int

    @classmethod
    def of(
        cls,
        layout: ChunkLayout,
        chunks_per_group: int,
        *,
        seats: int,
        rows: int,
        rows_of_seat: int,
        blocks: int,
        groups: int,
        groups_per_seat: int,
    ) -> TableSizes:
        """Of a round of so many rows, and so many of a seat at most: few sizes occur."""
        return cls(
            seats=seats,
            rows=padded_rows(rows),
            rows_per_seat=min(MAX_OWN_ROWS, max(MIN_ROWS, 1 << (rows_of_seat - 1).bit_length())),
            blocks=blocks,
            append_blocks=1 + -(-MAX_OWN_ROWS // layout.chunk_tokens),
            groups=groups,
            groups_per_seat=groups_per_seat,
            chunks_per_group=chunks_per_group,
        )


MOST_STAGED_PARTS = 32
"""Partial results of a row over streamed keys: a group's attention is to be quicker than its transfer, no more."""


@dataclass(frozen=True)
class Tilings:
    """How the launches of a layer are cut."""

    local: Tiling
    """Over the keys on the device."""
    staged: Tiling
    """Over the keys of a group."""

    @classmethod
    def of(cls, sizes: TableSizes, layout: ChunkLayout, num_heads: int) -> Tilings:
        def tiling(seats: int, chunks: int) -> Tiling:
            heads, keys = layout.num_kv_heads, chunks * layout.chunk_tokens
            rows, dim = sizes.rows_per_seat, layout.head_dim
            return choose_tiling(seats, heads, num_heads // heads, rows, keys, dim, layout.dtype)

        staged = tiling(1, sizes.chunks_per_group)
        splits = max(1, min(staged.splits, MOST_STAGED_PARTS // max(1, sizes.groups_per_seat)))
        return cls(tiling(sizes.seats, sizes.blocks), replace(staged, splits=splits))

    @property
    def local_parts(self) -> int:
        """Partial results of the keys on the device, the round's own rows included."""
        return self.local.splits + 1

    def parts(self, sizes: TableSizes) -> int:
        """Partial results of a row, at most."""
        return self.local_parts + sizes.groups_per_seat * self.staged.splits
