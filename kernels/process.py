"""The settings of sampling that a captured graph applies itself, row by row, as transformers' warpers do.

Nothing waits for the host; a first call compiles the kernels, outside a capture.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.score_keys import key_of, mass_of, ratio_to_best, score_of
from specstream.kernels.threshold import COUNT_SUMS, MASS_SUMS, find_survivors, find_threshold

TILE = 1024
"""Tokens of the vocabulary that a program looks at."""
CAPACITY = 512
"""Tokens that top-k may leave of a row before top-p has to search the vocabulary."""
MAX_VOCAB = 1 << 18
"""So many probabilities can be summed in fixed point."""


@triton.jit
def _scale_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    best_key: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Applies the temperature, and finds each row's best score, NaN if there is any; the grid is (tiles, rows)."""
    row = tl.program_id(1)
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = row.to(tl.int64) * row_stride + offsets
    score = tl.load(logits + place, mask=offsets < vocab, other=float("-inf")).to(tl.float32)
    if temperature is not None:
        score = tl.div_rn(score, tl.load(temperature + row))
    tl.store(scores + row.to(tl.int64) * vocab + offsets, score, mask=offsets < vocab)
    key = tl.where(score == score, key_of(score), 4294967295)  # a NaN with a sign would be the lowest
    tl.atomic_max(best_key + row, tl.max(key, axis=0), sem="relaxed")


@triton.jit
def _count_equal_kernel(
    scores: tl.tensor, vocab: tl.tensor, bound_key: tl.tensor, equal: tl.tensor, TILE: tl.constexpr
) -> None:
    """int32 [rows, tiles], how many scores are equal to top-p's bound; the grid is (tiles, rows)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    offsets = tile * TILE + tl.arange(0, TILE)
    score = tl.load(scores + row.to(tl.int64) * vocab + offsets, mask=offsets < vocab, other=float("-inf"))
    is_equal = (offsets < vocab) & (key_of(score) == tl.load(bound_key + row))
    tl.store(equal + row * tl.num_programs(0) + tile, tl.sum(is_equal.to(tl.int32), axis=0))


@triton.jit
def _filter_kernel(
    scores: tl.tensor,
    vocab: tl.tensor,
    best_key: tl.tensor,
    least_key: tl.tensor,
    bound_key: tl.tensor,
    bound_left: tl.tensor,
    equal: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Writes -inf over the scores that a setting removes; the grid is (tiles, rows)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    offsets = tile * TILE + tl.arange(0, TILE)
    place = scores + row.to(tl.int64) * vocab + offsets
    score = tl.load(place, mask=offsets < vocab, other=float("-inf"))
    key, best = key_of(score), score_of(tl.load(best_key + row))
    kept = offsets < vocab
    if least_key is not None:
        kept &= key >= tl.load(least_key + row)
    if top_p is not None:  # of the equals of the bound, the last ones, as far as their mass is wanted
        bound = tl.where(tl.load(top_p + row) < 1, tl.load(bound_key + row), -1)  # every key is above -1
        tiles = tl.arange(0, TILES)
        mask = (tiles > tile) & (tiles < tl.num_programs(0))
        after = tl.sum(tl.load(equal + row * tl.num_programs(0) + tiles, mask=mask, other=0), axis=0)
        is_equal = ((offsets < vocab) & (key == bound)).to(tl.int32)
        after += tl.sum(is_equal, axis=0) - tl.cumsum(is_equal, axis=0)
        wanted = (key == bound) & (after * mass_of(score, best) < tl.load(bound_left + row))
        kept &= (key > bound) | wanted
    if min_p is not None:
        kept &= ratio_to_best(score, best).to(tl.float32) >= tl.load(min_p + row)
    tl.store(place, float("-inf"), mask=(offsets < vocab) & ~kept)


def process(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits after temperature, top-k, top-p and min-p, in this order; a setting that is None is used by no row.

    The same tokens are kept as by transformers' warpers on the CPU, but where a sum of probabilities and 1 - top_p, or
    a probability and min_p, agree to float32 rounding. Of equal scores at top-p's bound as many are kept as there,
    those with the highest ids; which ones a sort puts last differs between devices.

    Args:
        logits: [rows, vocab], any float dtype, each row contiguous; at most `MAX_VOCAB` tokens.
        temperature: float32 [rows]; 1 changes nothing.
        top_k: int32 [rows]; 0 changes nothing.
        top_p: float64 [rows]; 1 changes nothing.
        min_p: float32 [rows]; 0 changes nothing.

    Returns:
        float32 [rows, vocab], with -inf for the tokens that are filtered out; and int64 [rows], the key of each row's
        best score as the temperature leaves it, by `specstream.kernels.score_keys`. A row is a distribution if that is
        a finite score's: NaN counts as the best. What is filtered out of other rows is left to chance.
    """
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"logits: got a vocabulary of {vocab}; allowed: up to {MAX_VOCAB}")
    tiles, device = triton.cdiv(vocab, TILE), logits.device
    grid = (tiles, rows)
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    each = (0 if top_k is None else COUNT_SUMS, 0 if top_p is None else MASS_SUMS, 1, 1)
    sizes = [size * (rows + rows % 2) for size in each]  # parts begin at 16 bytes, or Triton would compile once more
    zeros = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # filled by one launch
    count_sums, mass_sums, best_key, survivor_count = torch.split(zeros, sizes)
    best_key, survivor_count = best_key[:rows], survivor_count[:rows]
    _scale_kernel[grid](logits, logits.stride(0), scores, vocab, temperature, best_key, TILE=TILE)
    if top_k is None and top_p is None and min_p is None:
        return scores, best_key
    survivors = least_key = bound_key = bound_left = equal = None
    if top_k is not None and top_p is not None:
        survivors = find_survivors(scores, top_k, count_sums, survivor_count, CAPACITY, TILE)
        least_key = survivors.least_key
    elif top_k is not None:
        least_key, _ = find_threshold(scores, best_key, top_k, count_sums, False, TILE)
    if top_p is not None:
        bound_key, bound_left = find_threshold(scores, best_key, top_p, mass_sums, True, TILE, survivors)
        equal = torch.empty(rows, tiles, dtype=torch.int32, device=device)
        _count_equal_kernel[grid](scores, vocab, bound_key, equal, TILE=TILE)
    _filter_kernel[grid](
        scores, vocab, best_key, least_key, bound_key, bound_left, equal, top_p, min_p,
        TILE=TILE, TILES=triton.next_power_of_2(tiles),
    )  # fmt: skip
    return scores, best_key
