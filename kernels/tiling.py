"""How an attention launch is cut into programs: from shapes alone, so that it is known when a graph is captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_OWN_ROWS = 128
"""Rows of one seat that an ancestor mask can tell apart."""
MAX_SPLITS = 64
STAGE_BYTES = 32 << 10
"""K and V of one tile: three of them in flight leave room for two programs on a multiprocessor of 228 KiB."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one attention launch."""

    block_rows: int
    """Packed rows (query rows x heads of a group) of a program, a power of two from 16 on."""
    row_tiles: int
    """Programs for the packed rows of a seat and KV head: enough for the most rows that a seat may have."""
    block_keys: int
    """Keys of one step, a power of two from 16 on."""
    splits: int
    """Parts that a seat's listed keys are cut into."""
    num_warps: int = 4
    num_stages: int = 3


def choose_tiling(
    seats: int,
    kv_heads: int,
    group: int,
    max_rows: int,
    max_keys: int,
    head_dim: int,
    dtype: torch.dtype,
    processors: int = 132,
) -> Tiling:
    """The tiling for up to `max_rows` rows and `max_keys` listed keys a seat, on a device of so many multiprocessors.

    `group` is the query heads of a KV head.
    """
    packed = group * max_rows
    block_rows = min(max(power_of_two(packed), 16), 64 if dtype.itemsize == 2 else 16)
    padded_dim = power_of_two(head_dim)
    block_keys = min(max(STAGE_BYTES // (2 * padded_dim * dtype.itemsize), 16), 64)
    num_warps = 8 if block_rows * padded_dim > 64 * 128 else 4  # the output of a tile stays in registers
    row_tiles = -(-packed // block_rows)
    splits = choose_splits(seats * kv_heads * row_tiles, -(-max_keys // block_keys), 2 * processors)
    return Tiling(block_rows, row_tiles, block_keys, splits, num_warps)


def choose_splits(programs: int, key_tiles: int, slots: int) -> int:
    """The number of parts with the least time, in key tiles, if `slots` programs run at a time.

    A program costs about four tiles more than its keys: it starts with nothing in flight, and its result is written
    and merged.
    """

    def time(splits: int) -> int:
        return -(-programs * splits // slots) * (-(-key_tiles // splits) + 4)

    return min(range(1, min(MAX_SPLITS, max(key_tiles, 1)) + 1), key=time)


def power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
