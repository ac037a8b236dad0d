"""Linear maps of few rows, for CUDA devices (Triton): several weights on one input in one launch.

With few rows a product takes as long as reading its weights. A library's kernels are made for many rows; these read
a weight once, in tiles of so many outputs that every multiprocessor has some, at nearly the memory's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
MOST_WEIGHTS = 3
"""Weights of one launch: as many as q, k and v."""
LEAST_SHARED_BYTES = 96 << 10
"""Shared memory of a multiprocessor: what every device of compute capability 8.0 or more has."""


def most_rows(weights: int) -> int:
    """Up to how many rows these kernels are the faster ones, for so many weights on one input.

    With more rows than the matrix units take at a time, only what is saved in launches and filled up pays.
    """
    return MOST_ROWS if weights > 1 else 16


@dataclass(frozen=True)
class LinearTiling:
    """Sizes of one launch."""

    block_rows: int
    """All rows, a power of two from 16 on."""
    block_out: int
    """Outputs of a program, of all weights that it reads, a power of two."""
    block_in: int
    """Inputs of one step, a power of two from 16 on."""
    num_stages: int


def choose_linear_tiling(
    rows: int,
    outputs: int,
    inputs: int,
    itemsize: int,
    shared_bytes: int = LEAST_SHARED_BYTES,
    processors: int = 132,
    least_out: int = 8,
) -> LinearTiling:
    """The tiling for `outputs` outputs, of all weights together, on a device of so many multiprocessors.

    Programs, of `least_out` outputs or more, are about as many as multiprocessors or more, and as much is in flight as
    lets all of them, up to three a multiprocessor, run at a time.
    """
    block_rows = max(16, triton.next_power_of_2(rows))
    block_out = max(least_out, min(64, 1 << (max(outputs * 33 // 32 // processors, 1).bit_length() - 1)))
    block_in = min(512, 16384 // itemsize // max(block_out, block_rows))
    while block_in > 64 and inputs % block_in:
        block_in //= 2
    together = min(3, triton.cdiv(triton.cdiv(outputs, block_out), processors))
    stage = (block_out + block_rows) * block_in * itemsize
    return LinearTiling(block_rows, block_out, block_in, max(2, min(5, shared_bytes // together // stage)))


def few_row_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """`F.linear(x, weight, bias)` for each weight, added up in float32.

    A row's result does not depend on how many rows there are.

    Args:
        x: [rows, inputs], at most `MOST_ROWS` rows, the last dimension contiguous; float16 or bfloat16.
        weights: [outputs, inputs] each, the last dimension contiguous, in x's dtype; `MOST_WEIGHTS` go into a launch.
        biases: [outputs] for each weight, or none at all.

    Returns:
        [rows, outputs] for each weight, contiguous.
    """
    rows, inputs = x.shape
    assert rows <= MOST_ROWS
    assert not biases or len(biases) == len(weights)
    assert x.stride(1) == 1
    assert all(weight.stride(1) == 1 and weight.shape[1] == inputs for weight in weights)
    return [
        out
        for first in range(0, len(weights), MOST_WEIGHTS)
        for out in _launch(x, weights[first : first + MOST_WEIGHTS], biases[first : first + MOST_WEIGHTS])
    ]


@cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory of a multiprocessor that programs can have, and how many multiprocessors there are."""
    if device.type != "cuda":
        return LEAST_SHARED_BYTES, 132
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


def _launch(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    rows, inputs = x.shape
    outs = [torch.empty(rows, len(weight), dtype=x.dtype, device=x.device) for weight in weights]
    tiling = choose_linear_tiling(rows, sum(map(len, weights)), inputs, x.element_size(), *multiprocessors(x.device))
    ends, end = [], 0
    for weight in weights:
        end += triton.cdiv(len(weight), tiling.block_out)
        ends.append(end)

    def padded(items: Sequence[object]) -> list[object]:
        return [*items, *[items[-1]] * (MOST_WEIGHTS - len(items))]

    _linear_kernel[(end,)](
        x,
        *padded(weights),
        *padded(biases or weights),  # not read without biases
        *padded(outs),
        *padded(ends),
        *padded([len(weight) for weight in weights]),
        rows,
        inputs,
        x.stride(0),
        *padded([weight.stride(0) for weight in weights]),
        WEIGHTS=len(weights),
        BIAS=bool(biases),
        WHOLE=inputs % tiling.block_in == 0,
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        WIDEN=x.dtype == torch.bfloat16 and not x.is_cuda,
        num_warps=2,
        num_stages=tiling.num_stages,
    )
    return outs


@triton.jit(do_not_specialize=["rows", "end0", "end1", "end2"])
def _linear_kernel(
    x: tl.tensor,
    weight0: tl.tensor,
    weight1: tl.tensor,
    weight2: tl.tensor,
    bias0: tl.tensor,
    bias1: tl.tensor,
    bias2: tl.tensor,
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    end0: tl.tensor,
    end1: tl.tensor,
    end2: tl.tensor,
    outputs0: tl.tensor,
    outputs1: tl.tensor,
    outputs2: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    WEIGHTS: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One program: all rows, `BLOCK_OUT` outputs of one weight."""
    tile = tl.program_id(0)
    if tile < end0:
        _linear_tile(
            x, weight0, bias0, out0, tile, outputs0, rows, inputs, x_stride, stride0,
            BIAS, WHOLE, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, WIDEN,
        )  # fmt: skip
    if WEIGHTS > 1:  # noqa: SIM102 -- decided when the kernel is compiled
        if (tile >= end0) & (tile < end1):
            _linear_tile(
                x, weight1, bias1, out1, tile - end0, outputs1, rows, inputs, x_stride, stride1,
                BIAS, WHOLE, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, WIDEN,
            )  # fmt: skip
    if WEIGHTS > 2:  # noqa: SIM102
        if tile >= end1:
            _linear_tile(
                x, weight2, bias2, out2, tile - end1, outputs2, rows, inputs, x_stride, stride2,
                BIAS, WHOLE, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, WIDEN,
            )  # fmt: skip


@triton.jit
def _linear_tile(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tile: tl.tensor,
    outputs: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    row = tl.arange(0, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_valid, column_valid = row < rows, column < outputs
    x_at = x + row[:, None] * x_stride
    weight_at = weight + column.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in tl.range(0, inputs, BLOCK_IN):
        place = first + tl.arange(0, BLOCK_IN)
        a = load_tile(x_at, place, row_valid, inputs, WHOLE, WIDEN)
        b = load_tile(weight_at, place, column_valid, inputs, WHOLE, WIDEN)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column_valid, other=0.0).to(tl.float32)[None, :]
    out_at = out + row[:, None] * outputs + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_valid[:, None] & column_valid[None, :])


@triton.jit
def load_tile(
    at: tl.tensor,
    place: tl.tensor,
    valid: tl.tensor,
    inputs: tl.tensor,
    WHOLE: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Those inputs of rows that begin `at` [rows, 1]; 0 for rows and inputs that there are not."""
    mask = valid[:, None]
    if not WHOLE:
        mask = mask & (place < inputs)[None, :]
    tile = tl.load(at + place[None, :], mask=mask, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile
