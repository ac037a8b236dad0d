"""Scores as keys, 32 bits that order as the scores do, and as probabilities in fixed point."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(score: tl.tensor) -> tl.tensor:
    """int64 in [0, 2**32), in the order of the scores; 0 and -0 are equal."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 2147483648, -1 - bits)


@triton.jit
def score_of(key: tl.tensor) -> tl.tensor:
    """float32, the inverse of `key_of`."""
    bits = tl.where(key >= 2147483648, key - 2147483648, -1 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def ratio_to_best(score: tl.tensor, best: tl.tensor) -> tl.tensor:
    """float64, a token's probability by that of the best token."""
    return tl.exp(score.to(tl.float64) - best.to(tl.float64))


@triton.jit
def mass_of(score: tl.tensor, best: tl.tensor) -> tl.tensor:
    """int64, `ratio_to_best` in fixed point: 2**18 scores can be summed."""
    return (ratio_to_best(score, best) * 17592186044416.0).to(tl.int64)  # 2**44


@triton.jit
def mass_kept(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """int64, how much of a row's mass top-p keeps at least."""
    removed = (1.0 - top_p).to(tl.float32).to(tl.float64)  # transformers compares in float32
    return tl.maximum(total - (removed * total.to(tl.float64)).to(tl.int64), 1)
