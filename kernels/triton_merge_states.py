"""Merge of two attention states in one pass over memory, for CUDA devices (Triton): of many rows, as prompts have."""

from __future__ import annotations

import triton
import triton.language as tl

from specstream.kernels.attention import AttentionState

BLOCK_ROWS = 16
"""Rows of one head that a program merges: enough loads in flight, few registers."""


def merge_into(merged: AttentionState, a: AttentionState, b: AttentionState) -> None:
    """Writes the state over the keys of both `a` and `b`, which are disjoint, to `merged`.

    The arithmetic is in the dtype of `merged.lse`. A row that saw no key has lse -inf, and its out, which may be
    anything, is not used; if it saw none in both, it becomes (0, -inf).

    Args:
        merged: out [num_heads, rows, head_dim] and lse [num_heads, rows], of any float dtypes; may be `a`.
        a, b: of the same shape, of any float dtypes. Of each tensor only the last dimension needs to be contiguous.
    """
    num_heads, num_rows, head_dim = merged.out.shape
    for state in (merged, a, b):
        assert state.out.shape == (num_heads, num_rows, head_dim)
        assert state.lse.shape == (num_heads, num_rows)
        assert state.out.stride(2) == 1 or head_dim == 1
        assert state.lse.stride(1) == 1 or num_rows == 1
    _merge_states_kernel[(triton.cdiv(num_rows, BLOCK_ROWS), num_heads)](
        a.out,
        a.lse,
        b.out,
        b.lse,
        merged.out,
        merged.lse,
        num_rows,
        a.out.stride(0),
        a.out.stride(1),
        a.lse.stride(0),
        b.out.stride(0),
        b.out.stride(1),
        b.lse.stride(0),
        merged.out.stride(0),
        merged.out.stride(1),
        merged.lse.stride(0),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_states_kernel(
    a_out: tl.tensor,
    a_lse: tl.tensor,
    b_out: tl.tensor,
    b_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_rows: tl.tensor,
    a_head_stride: tl.tensor,
    a_row_stride: tl.tensor,
    a_lse_stride: tl.tensor,
    b_head_stride: tl.tensor,
    b_row_stride: tl.tensor,
    b_lse_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    lse_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """One program: BLOCK_ROWS rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_valid = row < num_rows
    dim = tl.arange(0, PADDED_DIM)
    dim_valid = (dim < HEAD_DIM)[None, :]
    accumulator = lse.dtype.element_ty

    of_a = tl.load(a_lse + head * a_lse_stride + row, mask=row_valid, other=float("-inf")).to(accumulator)
    of_b = tl.load(b_lse + head * b_lse_stride + row, mask=row_valid, other=float("-inf")).to(accumulator)
    top = tl.maximum(of_a, of_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(of_a - base), tl.exp(of_b - base)
    total = weight_a + weight_b
    norm = tl.where(total != 0.0, total, 1.0)

    at_a = a_out + head * a_head_stride + row[:, None] * a_row_stride + dim[None, :]
    at_b = b_out + head * b_head_stride + row[:, None] * b_row_stride + dim[None, :]
    value_a = tl.load(at_a, mask=(of_a != float("-inf"))[:, None] & dim_valid, other=0.0).to(accumulator)
    value_b = tl.load(at_b, mask=(of_b != float("-inf"))[:, None] & dim_valid, other=0.0).to(accumulator)
    merged = value_a * (weight_a / norm)[:, None] + value_b * (weight_b / norm)[:, None]
    at = out + head * head_stride + row[:, None] * row_stride + dim[None, :]
    tl.store(at, merged.to(out.dtype.element_ty), mask=row_valid[:, None] & dim_valid)
    log = tl.where(total != 0.0, base + tl.log(norm), float("-inf"))
    tl.store(lse + head * lse_stride + row, log, mask=row_valid)
