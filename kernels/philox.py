"""Random numbers on the device: bit for bit those of `specstream.sampling.Noise`, numpy's Philox4x64-10.

The key is (seed, purpose), the counter (block + 1, 0, 0, position): numpy steps the counter before it makes the first
block. A block is four numbers.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The values of `specstream.sampling.Purpose`, as kernels can read them.
TOKEN = tl.constexpr(0)
DRAFT = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)

TILE = 1024
"""Numbers a program makes."""


@triton.jit
def _to_uniform(bits: tl.tensor) -> tl.tensor:
    """uint64 -> float64 in [0, 1)."""
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def uniform_tile(
    seed: tl.tensor, purpose: tl.constexpr, position: tl.tensor, start: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """float64 [TILE]: numbers `start` and on of a stream.

    Args:
        seed, position: int64 scalars.
        purpose: an int.
        start: a multiple of 4.
        TILE: a power of two, at least 4.
    """
    block = (start // 4 + 1 + tl.arange(0, TILE // 4)).to(tl.uint64)
    zero = tl.zeros_like(block)
    key = zero + seed.to(tl.uint64)
    a, b, c, d = tl.philox_impl(block, zero, zero, zero + position.to(tl.uint64), key, zero + purpose)
    return _to_uniform(tl.join(tl.join(a, c), tl.join(b, d)).reshape(TILE))


@triton.jit
def uniform_first(seed: tl.tensor, purpose: tl.constexpr, position: tl.tensor) -> tl.tensor:
    """float64, the first number of a stream for each of `position`, an int64 scalar or block."""
    counter = position.to(tl.uint64)
    zero = counter ^ counter
    a, _, _, _ = tl.philox_impl(zero + 1, zero, zero, counter, zero + seed.to(tl.uint64), zero + purpose)
    return _to_uniform(a)


@triton.jit
def _uniform_kernel(
    out: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    count: tl.tensor,
    PURPOSE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    start = tl.program_id(0) * TILE
    row = tl.program_id(1)
    numbers = uniform_tile(tl.load(seeds + row), PURPOSE, tl.load(positions + row), start, TILE)
    offsets = start + tl.arange(0, TILE)
    tl.store(out + row.to(tl.int64) * count + offsets, numbers, mask=offsets < count)


def uniform(seeds: Tensor, positions: Tensor, purpose: int, count: int) -> Tensor:
    """The first `count` numbers of each row's stream, float64 [rows, count] in [0, 1).

    Args:
        seeds: int64 [rows], a seed's lowest 64 bits.
        positions: int64 [rows], positions in the text.
        purpose: what the numbers are for.
    """
    out = torch.empty(len(seeds), count, dtype=torch.float64, device=seeds.device)
    grid = (triton.cdiv(count, TILE), len(seeds))
    _uniform_kernel[grid](out, seeds, positions, count, PURPOSE=purpose, TILE=TILE)
    return out
