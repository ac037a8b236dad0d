"""Merge of partial attention into a running state or the output, for CUDA devices (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.attention import AttentionState
from specstream.kernels.triton_attend import Seats


def merge(
    parts: AttentionState,
    seats: Seats,
    state: AttentionState | None = None,
    resume: bool = False,
    out: Tensor | None = None,
) -> None:
    """Merges partial results over disjoint keys into `state`, and writes the attention's output to `out`.

    Rows of no seat have no partial results: a resumed state keeps what it has, a new one gets (0, -inf). The output
    of a row that has seen no key is 0.

    Args:
        parts: as `attend` writes them: out [parts, num_heads, rows, head_dim], lse [parts, num_heads, rows].
        seats: those of the `attend` that wrote them.
        state: float32, out [num_heads, rows, head_dim] and lse [num_heads, rows], contiguous.
        resume: `state` holds the result over earlier keys; else what it holds is not read.
        out: [num_heads, rows, head_dim], the last dimension contiguous, of any float dtype.
    """
    num_parts, num_heads, num_rows, head_dim = parts.out.shape
    assert parts.out.is_contiguous()
    assert parts.lse.is_contiguous()
    assert out is None or out.stride(2) == 1
    assert state is not None or not resume
    if state is not None:
        assert state.out.is_contiguous()
        assert state.lse.is_contiguous()
        assert state.out.shape == (num_heads, num_rows, head_dim)
        assert state.lse.shape == (num_heads, num_rows)
    running = state or parts  # not touched without `state`
    output = parts.out[0] if out is None else out  # not touched without `out`
    num_seats = seats.row_start.shape[0]
    _merge_kernel[(num_rows, num_heads)](
        parts.out,
        parts.lse,
        seats.row_start,
        seats.row_count,
        running.out,
        running.lse,
        output,
        num_parts,
        num_seats,
        output.stride(0),
        output.stride(1),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        PADDED_SEATS=triton.next_power_of_2(num_seats),
        STATE=state is not None,
        RESUME=resume,
        OUT=out is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_parts", "num_seats"])
def _merge_kernel(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    row_start: tl.tensor,
    row_count: tl.tensor,
    state_out: tl.tensor,
    state_lse: tl.tensor,
    out: tl.tensor,
    num_parts: tl.tensor,
    num_seats: tl.tensor,
    out_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PADDED_SEATS: tl.constexpr,
    STATE: tl.constexpr,
    RESUME: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    """One program: one row of one head. All its parts are loaded at once."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(0)
    num_heads = tl.num_programs(1)
    state_row = head * num_rows + row

    seat = tl.arange(0, PADDED_SEATS)
    start = tl.load(row_start + seat, mask=seat < num_seats, other=0)
    count = tl.load(row_count + seat, mask=seat < num_seats, other=0)
    covered = tl.max(((row >= start) & (row < start + count)).to(tl.int32), 0) != 0

    part = tl.arange(0, PADDED_PARTS)
    part_row = part.to(tl.int64) * (num_heads * num_rows) + state_row
    lse = tl.load(part_lse + part_row, mask=(part < num_parts) & covered, other=float("-inf"))
    top = tl.max(lse, 0)
    if RESUME:
        earlier_lse = tl.load(state_lse + state_row)
        top = tl.maximum(top, earlier_lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - base)
    total = tl.sum(weight, 0)

    dim = tl.arange(0, PADDED_DIM)
    dim_valid = dim < HEAD_DIM
    part_mask = (lse != float("-inf"))[:, None] & dim_valid[None, :]
    partial = tl.load(part_out + (part_row * HEAD_DIM)[:, None] + dim[None, :], mask=part_mask, other=0.0)
    acc = tl.sum(partial * weight[:, None], 0)
    if RESUME:
        earlier_weight = tl.exp(earlier_lse - base)
        total += earlier_weight
        acc += earlier_weight * tl.load(state_out + state_row * HEAD_DIM + dim, mask=dim_valid, other=0.0)
    norm = tl.where(total != 0.0, total, 1.0)
    merged = acc / norm
    if STATE:
        tl.store(state_out + state_row * HEAD_DIM + dim, merged, mask=dim_valid)
        tl.store(state_lse + state_row, tl.where(total != 0.0, base + tl.log(norm), float("-inf")))
    if OUT:
        out_at = out + head * out_head_stride + row * out_row_stride
        tl.store(out_at + dim, merged.to(out.dtype.element_ty), mask=dim_valid)
