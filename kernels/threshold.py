"""The least score that top-k or top-p keeps, found without sorting.

Scores are compared by their keys, 32 bits that order as the scores do. A search settles the threshold's key from the
top bits down: each pass sums, for every value of the next bits, the weight of the scores whose key begins as the
threshold's does; the pass after it goes down from the highest value until it has the weight that is wanted. For top-k a
score weighs 1, for top-p its probability in fixed point. All sums are of integers, so their order does not matter.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def settled(
    wanted: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    vocab: tl.tensor,
    row: tl.tensor,
    PASS: tl.constexpr,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The threshold's leading bits after PASS passes, and the weight wanted of the scores that begin with them.

    Args:
        wanted: [rows], top_p if MASS, else top_k.
        sums: int64 [rows, passes, 2**BITS]: of each pass, the weight for each value of its bits.
        states: int64 [rows, passes, 2]: what was returned after pass 0, 1 and so on, but for the last.
    """
    PASSES: tl.constexpr = 32 // BITS
    prefix = tl.full((), 0, tl.int64)
    left = tl.full((), 0, tl.int64)
    if PASS > 0:
        value = tl.arange(0, 1 << BITS)
        weight = tl.load(sums + ((row * PASSES + PASS - 1) << BITS) + value)
        total = tl.sum(weight, axis=0)
        if PASS > 1:
            prefix = tl.load(states + (row * PASSES + PASS - 1) * 2)
            left = tl.load(states + (row * PASSES + PASS - 1) * 2 + 1)
        elif MASS:
            removed = (1.0 - tl.load(wanted + row)).to(tl.float32).to(tl.float64)  # transformers compares in float32
            left = tl.maximum(total - (removed * total.to(tl.float64)).to(tl.int64), 1)
        else:
            top_k = tl.load(wanted + row)
            left = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab).to(tl.int64)
        beginning = total - tl.cumsum(weight, axis=0) + weight  # of this value or higher
        bits = tl.max(tl.where(beginning >= left, value, 0), axis=0)
        prefix = (prefix << BITS) + bits
        left -= tl.sum(tl.where(value > bits, weight, 0), axis=0)
    return prefix, left


@triton.jit
def search_kernel(
    scores: tl.tensor,
    vocab: tl.tensor,
    best_key: tl.tensor,
    least_key: tl.tensor,
    wanted: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    PASS: tl.constexpr,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A pass of a search; the grid is (tiles, rows).

    Args:
        best_key: int64 [rows], the keys of the best scores.
        least_key: int64 [rows], keys below which scores weigh nothing; None: all have their weight.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    PASSES: tl.constexpr = 32 // BITS
    SHIFT: tl.constexpr = 32 - BITS * (PASS + 1)
    prefix, left = settled(wanted, sums, states, vocab, row, PASS, MASS, BITS)
    if PASS > 0 and tile == 0:
        tl.store(states + (row * PASSES + PASS) * 2, prefix)
        tl.store(states + (row * PASSES + PASS) * 2 + 1, left)
    offsets = tile * TILE + tl.arange(0, TILE)
    score = tl.load(scores + row.to(tl.int64) * vocab + offsets, mask=offsets < vocab, other=float("-inf"))
    key = key_of(score)
    weighs = (offsets < vocab) & ((key >> (SHIFT + BITS)) == prefix)
    if least_key is not None:
        weighs &= key >= tl.load(least_key + row)
    value = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
    place = sums + ((row * PASSES + PASS) << BITS)
    if MASS:
        mass = mass_of(score, score_of(tl.load(best_key + row)))
        for bits in tl.static_range(1 << BITS):
            total = tl.sum(tl.where(weighs & (value == bits), mass, 0), axis=0)
            tl.atomic_add(place + bits, total, mask=total > 0, sem="relaxed")
    else:
        histogram = tl.histogram(value, 1 << BITS, mask=weighs)
        counts = histogram.to(tl.int64)
        tl.atomic_add(place + tl.arange(0, 1 << BITS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def finish_kernel(
    vocab: tl.tensor,
    wanted: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    threshold_key: tl.tensor,
    threshold_left: tl.tensor,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Writes the key found, and the weight wanted of the scores that are equal to it; the grid is (rows,)."""
    row = tl.program_id(0)
    key, left = settled(wanted, sums, states, vocab, row, 32 // BITS, MASS, BITS)
    tl.store(threshold_key + row, key)
    tl.store(threshold_left + row, left)


def find_threshold(
    scores: Tensor, best_key: Tensor, least_key: Tensor | None, wanted: Tensor, mass: bool, tile: int
) -> tuple[Tensor, Tensor]:
    """The key of the least score kept in each row, and how much of the weight of its equals is kept.

    Args:
        scores: float32 [rows, vocab], contiguous.
        best_key: int64 [rows], the keys of the best scores.
        least_key: int64 [rows], keys below which scores weigh nothing; None: all have their weight.
        wanted: [rows], float64 top_p if `mass`, else int32 top_k.
        tile: tokens that a program looks at.

    Returns:
        Two tensors int64 [rows].
    """
    rows, vocab = scores.shape
    bits = 4 if mass else 8  # a sum of masses for each value costs a reduction, a histogram of counts is one
    passes = 32 // bits
    new = partial(torch.empty, dtype=torch.int64, device=scores.device)
    sums = torch.zeros(rows, passes, 1 << bits, dtype=torch.int64, device=scores.device)
    states, key, left = new(rows, passes, 2), new(rows), new(rows)
    options = {"MASS": mass, "BITS": bits}
    for number in range(passes):
        search_kernel[(triton.cdiv(vocab, tile), rows)](
            scores, vocab, best_key, least_key, wanted, sums, states, PASS=number, TILE=tile, **options
        )
    finish_kernel[(rows,)](vocab, wanted, sums, states, key, left, **options)
    return key, left
