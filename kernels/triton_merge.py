"""Merge of partial attention into the output, for CUDA devices (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import power_of_two
from specstream.kernels.triton_attend import Seats

VALUES_AT_ONCE = 1 << 13
"""Numbers that a program loads at a time, 64 registers of four warps: each time takes as long as memory needs to
answer."""

FEW_SEATS = 8
"""Up to so many share one kernel."""
FEW_PARTS = 16
"""Up to so many partial results share one kernel."""


def parts_at_once(parts: int, head_dim: int) -> int:
    """How many of a row's partial results a program loads at a time: what the kernel is compiled for."""
    return min(max(1, VALUES_AT_ONCE // power_of_two(head_dim)), max(FEW_PARTS, power_of_two(parts)))


def merge(parts: AttentionState, seats: Seats, part_count: Tensor, out: Tensor) -> None:
    """Merges partial results over disjoint keys, and writes the attention's output.

    The output of a row that has seen no key, or is of no seat, is 0.

    Args:
        parts: as `attend` writes them: out [parts, num_heads, rows, head_dim], lse [parts, num_heads, rows].
        seats: whose rows are where.
        part_count: int32 [seats]; the first so many parts of a seat's rows are merged.
        out: [num_heads, rows, head_dim], the last dimension contiguous, of any float dtype.
    """
    _, num_heads, num_rows, head_dim = parts.out.shape
    assert parts.out.is_contiguous()
    assert parts.lse.is_contiguous()
    assert out.stride(2) == 1
    num_seats, padded_dim = seats.row_start.shape[0], power_of_two(head_dim)
    _merge_kernel[(num_rows, num_heads)](
        parts.out,
        parts.lse,
        seats.row_start,
        seats.row_count,
        part_count,
        out,
        num_seats,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_PARTS=parts_at_once(len(parts.out), head_dim),
        PADDED_SEATS=max(FEW_SEATS, power_of_two(num_seats)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seats"])
def _merge_kernel(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    row_start: tl.tensor,
    row_count: tl.tensor,
    part_count: tl.tensor,
    out: tl.tensor,
    num_seats: tl.tensor,
    out_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PADDED_SEATS: tl.constexpr,
) -> None:
    """One program: one row of one head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(0)
    num_heads = tl.num_programs(1)

    seat = tl.arange(0, PADDED_SEATS)
    seat_valid = seat < num_seats
    start = tl.load(row_start + seat, mask=seat_valid, other=0)
    count = tl.load(row_count + seat, mask=seat_valid, other=0)
    counts = tl.load(part_count + seat, mask=seat_valid, other=0)
    num_parts = tl.max(tl.where((row >= start) & (row < start + count), counts, 0), 0)

    dim = tl.arange(0, PADDED_DIM)
    dim_valid = dim < HEAD_DIM
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for first in tl.range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        part_row = (part.to(tl.int64) * num_heads + head) * num_rows + row
        valid = part < num_parts
        lse = tl.load(part_lse + part_row, mask=valid, other=float("-inf"))
        partial = tl.load(
            part_out + (part_row * HEAD_DIM)[:, None] + dim[None, :],
            mask=valid[:, None] & dim_valid[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(lse - base)
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(partial * weight[:, None], 0)
        top = new_top
    merged = acc / tl.where(total != 0.0, total, 1.0)
    out_at = out + head * out_head_stride + row * out_row_stride
    tl.store(out_at + dim, merged.to(out.dtype.element_ty), mask=dim_valid)
