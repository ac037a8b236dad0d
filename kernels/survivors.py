"""What top-k leaves of a row, gathered: top-p is then decided by one program, which never reads the vocabulary.

A row that keeps more than there is room for, because of many equal scores, a large top-k or none, is left to the passes
over the vocabulary; whether it does is known on the device only.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specstream.kernels.score_keys import key_of, mass_kept, mass_of, score_of
from specstream.kernels.threshold_passes import settled


@triton.jit
def gather_kernel(
    scores: tl.tensor,
    vocab: tl.tensor,
    top_k: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    least_key: tl.tensor,
    survivors: tl.tensor,
    survivor_count: tl.tensor,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Ends the search for top-k's threshold, and gathers the keys from there on; the grid is (tiles, rows).

    Args:
        least_key: int64 [rows], the threshold's key, written.
        survivors: int64 [rows, CAPACITY], the keys, written in any order.
        survivor_count: int64 [rows], counted up from 0: all of them, also those that there is no room for.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    least, _ = settled(top_k, sums, states, vocab, row, 32 // BITS, False, BITS)
    if tile == 0:
        tl.store(least_key + row, least)
    offsets = tile * TILE + tl.arange(0, TILE)
    score = tl.load(scores + row.to(tl.int64) * vocab + offsets, mask=offsets < vocab, other=float("-inf"))
    key = key_of(score)
    survives = (offsets < vocab) & (key >= least)
    number = tl.cumsum(survives.to(tl.int32), axis=0)
    count = tl.sum(survives.to(tl.int32), axis=0).to(tl.int64)
    if count > 0:
        place = tl.atomic_add(survivor_count + row, count, sem="relaxed") + number - 1
        tl.store(survivors + row * CAPACITY + place, key, mask=survives & (place < CAPACITY))


@triton.jit
def threshold_of_survivors(
    survivors: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    top_p: tl.tensor,
    CAPACITY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What a search by mass ends with: the highest key which, with those above it, has the mass that top-p keeps.

    Args:
        survivors: int64 [CAPACITY], of which the first `count` are there.
        best: the row's best score.
    """
    CHUNK: tl.constexpr = 32
    index = tl.arange(0, CAPACITY)
    key = tl.load(survivors + index, mask=index < count, other=0)
    mass = tl.where(index < count, mass_of(score_of(key), best), 0)
    left = mass_kept(tl.sum(mass, axis=0), top_p)
    beginning = tl.zeros((CAPACITY,), tl.int64)  # of this key or higher
    for start in tl.range(0, count.to(tl.int32), CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key = tl.load(survivors + other, mask=other < count, other=0)
        other_mass = tl.where(other < count, mass_of(score_of(other_key), best), 0)
        beginning += tl.sum(tl.where(other_key[None, :] >= key[:, None], other_mass[None, :], 0), axis=1)
    threshold = tl.max(tl.where(beginning >= left, key, 0), axis=0)
    left -= tl.sum(tl.where(key > threshold, mass, 0), axis=0)
    return threshold, left
