"""SwiGLU, silu(gate) * up, for CUDA devices (Triton): with its two linear maps, for few rows, or by itself.

The activation costs no launch where gate and up are made: a program has the same outputs of both, and each value is
computed once. The map that reads the values would compute all of them in every program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.triton_linear import MOST_ROWS, choose_linear_tiling, load_tile, multiprocessors

BLOCK = 1024
"""Values of a program of `silu_and_mul`."""


def few_row_swiglu(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """`F.silu(F.linear(x, gate, ...)) * F.linear(x, up, ...)`, in float32, rounded once.

    A row's result does not depend on how many rows there are.

    Args:
        x: [rows, inputs], at most `MOST_ROWS` rows, the last dimension contiguous; float16 or bfloat16.
        weights: gate and up, [outputs, inputs] each, the last dimension contiguous, in x's dtype.
        biases: [outputs] for each weight, or none at all.

    Returns:
        [rows, outputs], contiguous.
    """
    rows, inputs = x.shape
    gate, up = weights
    assert rows <= MOST_ROWS
    assert not biases or len(biases) == 2
    assert gate.shape == up.shape == (len(gate), inputs)
    assert x.stride(1) == gate.stride(1) == up.stride(1) == 1
    out = torch.empty(rows, len(gate), dtype=x.dtype, device=x.device)
    tiling = choose_linear_tiling(
        rows, 2 * len(gate), inputs, x.element_size(), *multiprocessors(x.device), least_out=16
    )
    block_out = tiling.block_out // 2
    _swiglu_kernel[(triton.cdiv(len(gate), block_out),)](
        x,
        gate,
        up,
        *(biases or weights),  # not read without biases
        out,
        rows,
        len(gate),
        inputs,
        x.stride(0),
        gate.stride(0),
        up.stride(0),
        BIAS=bool(biases),
        WHOLE=inputs % tiling.block_in == 0,
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=tiling.block_in,
        WIDEN=x.dtype == torch.bfloat16 and not x.is_cuda,
        num_warps=2,
        num_stages=tiling.num_stages,
    )
    return out


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`F.silu(gate) * up`, in float32, rounded once, in one pass over memory.

    Args:
        gate: [..., width], the last dimension contiguous.
        up: as gate.

    Returns:
        [..., width], contiguous, in gate's dtype.
    """
    assert gate.shape == up.shape
    assert gate.stride(-1) == up.stride(-1) == 1
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    grid = (len(gate), triton.cdiv(width, BLOCK))
    _silu_and_mul_kernel[grid](gate, up, out, width, gate.stride(0), up.stride(0), BLOCK=BLOCK)
    return out


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    x: tl.tensor,
    gate_weight: tl.tensor,
    up_weight: tl.tensor,
    gate_bias: tl.tensor,
    up_bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One program: all rows, the same `BLOCK_OUT` outputs of both weights."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_valid, column_valid = row < rows, column < outputs
    x_at = x + row[:, None] * x_stride
    gate_at = gate_weight + column.to(tl.int64)[:, None] * gate_stride
    up_at = up_weight + column.to(tl.int64)[:, None] * up_stride
    gate = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in tl.range(0, inputs, BLOCK_IN):
        place = first + tl.arange(0, BLOCK_IN)
        a = load_tile(x_at, place, row_valid, inputs, WHOLE, WIDEN)
        b = load_tile(gate_at, place, column_valid, inputs, WHOLE, WIDEN)
        c = load_tile(up_at, place, column_valid, inputs, WHOLE, WIDEN)
        gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
    if BIAS:
        gate += tl.load(gate_bias + column, mask=column_valid, other=0.0).to(tl.float32)[None, :]
        up += tl.load(up_bias + column, mask=column_valid, other=0.0).to(tl.float32)[None, :]
    product = gate * tl.sigmoid(gate) * up
    out_at = out + row[:, None] * outputs + column[None, :]
    tl.store(out_at, product.to(out.dtype.element_ty), mask=row_valid[:, None] & column_valid[None, :])


@triton.jit
def _silu_and_mul_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: `BLOCK` values of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < width
    a = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=valid)
