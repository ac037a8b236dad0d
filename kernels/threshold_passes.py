"""The passes over the vocabulary of a search for the least score kept; see `specstream.kernels.threshold`."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specstream.kernels.score_keys import key_of, mass_kept, mass_of, score_of


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
            left = mass_kept(total, tl.load(wanted + row))
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
    survivor_count: tl.tensor,
    wanted: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    PASS: tl.constexpr,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A pass of a search; the grid is (tiles, rows).

    Args:
        best_key: int64 [rows], the keys of the best scores; only for a search by MASS.
        least_key: int64 [rows], keys below which scores weigh nothing; None: all have their weight.
        survivor_count: int64 [rows], how many have weight; a row where they are at most CAPACITY is left alone. None:
            all rows are searched.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    if survivor_count is not None and tl.load(survivor_count + row) <= CAPACITY:
        return
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
