"""The merge of partial attention, for kernels that do it: in a launch of their own or at the end of one (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

VALUES_AT_ONCE = 1 << 13
"""Partial results that a program loads at a time: 64 registers of four warps, as many as attention leaves free."""
CLEARED_ROWS = tl.constexpr(16)
"""Rows of padding that are written at a time."""


def merge_block(num_parts: int, rows: int, padded_dim: int) -> tuple[int, int]:
    """Parts and rows to merge at a time, of so many; both are powers of two.

    Each time takes as long as memory needs to answer. So all parts are loaded at once if they can be, and two rows at
    least: a draft step's only row is two in a group of two heads.
    """
    parts = min(triton.next_power_of_2(num_parts), max(1, VALUES_AT_ONCE // padded_dim))
    return parts, min(rows, max(2, VALUES_AT_ONCE // (parts * padded_dim)))


@triton.jit
def merge_rows(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    row: tl.tensor,
    row_valid: tl.tensor,
    part_rows: tl.tensor,
    first_part: tl.tensor,
    last_part: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
) -> tl.tensor:
    """Merges the parts [first_part, last_part) of some rows, in this order; float32 [len(row), PADDED_DIM].

    A row that has seen no key gets 0. `row` counts through the heads: a part has `part_rows`, rows x heads.
    """
    dim = tl.arange(0, PADDED_DIM)
    top = tl.full([row.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    acc = tl.zeros([row.shape[0], PADDED_DIM], tl.float32)
    for first in tl.range(first_part, last_part, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        part_row = part.to(tl.int64)[:, None] * part_rows + row[None, :]
        valid = (part < last_part)[:, None] & row_valid[None, :]
        at = part_out + (part_row * HEAD_DIM)[:, :, None] + dim[None, None, :]
        # Past the L1 cache, which may be older than what other programs of the same launch have written.
        lse = tl.load(part_lse + part_row, mask=valid, other=float("-inf"), cache_modifier=".cg")
        mask = valid[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        partial = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(lse - base[None, :])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept[:, None] + tl.sum(partial * weight[:, :, None], 0)
        top = new_top
    return acc / tl.where(total != 0.0, total, 1.0)[:, None]


@triton.jit
def merge_packed(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    first_head: tl.tensor,
    first_row: tl.tensor,
    first_packed: tl.tensor,
    last_packed: tl.tensor,
    num_rows: tl.tensor,
    part_rows: tl.tensor,
    first_part: tl.tensor,
    last_part: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Merges rows packed as `attend` packs them, from `first_packed` up to `last_packed`, and writes them to `out`."""
    dim = tl.arange(0, PADDED_DIM)
    for first in tl.range(first_packed, last_packed, BLOCK_ROWS):
        packed = first + tl.arange(0, BLOCK_ROWS)
        valid = packed < last_packed
        head = first_head + packed % GROUP
        row = (first_row + packed // GROUP).to(tl.int64)
        merged = merge_rows(
            part_out,
            part_lse,
            head * num_rows + row,
            valid,
            part_rows,
            first_part,
            last_part,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_PARTS,
        )
        at = (out + head * head_stride + row * row_stride)[:, None] + dim[None, :]
        tl.store(at, merged.to(out.dtype.element_ty), mask=valid[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def arrives_last(arrived: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Whether all of so many programs have come here now; what they have written before can be read then.

    `arrived` is where they count, 0 for the first; it is 0 again for the next launch.
    """
    # All threads of a program store before the barrier, and one of them counts after it: what its atomic releases are
    # the stores of all. The last program's atomic comes after those of the others, so it acquires what they released;
    # its threads load after they have its result, which Triton hands them behind a barrier as well. Nobody is left who
    # would count, so the counter can be reset; the next launch of the stream, or of a graph, comes after this one.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def clear_padding(
    out: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    first_head: tl.tensor,
    row_start: tl.tensor,
    row_count: tl.tensor,
    num_seats: tl.tensor,
    num_rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SEATS: tl.constexpr,
) -> None:
    """Writes 0 to the rows of no seat, in so many heads."""
    seat = tl.arange(0, PADDED_SEATS)
    start = tl.load(row_start + seat, mask=seat < num_seats, other=0)[None, :]
    count = tl.load(row_count + seat, mask=seat < num_seats, other=0)[None, :]
    dim = tl.arange(0, PADDED_DIM)
    zeros = tl.zeros([CLEARED_ROWS, PADDED_DIM], out.dtype.element_ty)
    for first in tl.range(0, num_rows, CLEARED_ROWS):
        row = first + tl.arange(0, CLEARED_ROWS)
        taken = (row[:, None] >= start) & (row[:, None] < start + count)
        padding = (tl.max(taken.to(tl.int32), 1) == 0) & (row < num_rows)
        row_at = out + row.to(tl.int64) * row_stride
        for head in tl.range(first_head, first_head + HEADS):
            at = (row_at + head * head_stride)[:, None] + dim[None, :]
            tl.store(at, zeros, mask=padding[:, None] & (dim < HEAD_DIM)[None, :])
