"""The least score that top-k or top-p keeps, found without sorting.

Scores are compared by their keys, 32 bits that order as the scores do. A search settles the threshold's key from the
top bits down: each pass sums, for every value of the next bits, the weight of the scores whose key begins as the
threshold's does; the pass after it goes down from the highest value until it has the weight that is wanted. For top-k a
score weighs 1, for top-p its probability in fixed point. All sums are of integers, so their order does not matter.

Top-k usually leaves a few tokens, and top-p then needs no passes: the few are gathered, and each is compared with all.
The passes are launched all the same, for rows in which they are not few; those of other rows return at once.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.score_keys import score_of
from specstream.kernels.survivors import gather_kernel, threshold_of_survivors
from specstream.kernels.threshold_passes import search_kernel, settled

COUNT_BITS, MASS_BITS = 8, 4
"""Settled by a pass: a sum of masses for each value costs a reduction, a histogram of counts is one."""
COUNT_SUMS, MASS_SUMS = 32 // COUNT_BITS << COUNT_BITS, 32 // MASS_BITS << MASS_BITS
"""Sums of a row's search, over all passes."""


@dataclass(frozen=True)
class Survivors:
    """What top-k leaves of each row."""

    least_key: Tensor
    """int64 [rows]: scores of lower keys are filtered out."""
    keys: Tensor
    """int64 [rows, room], in any order; all of a row's if its `count` is no more than that."""
    count: Tensor
    """int64 [rows]."""


@triton.jit
def finish_kernel(
    vocab: tl.tensor,
    best_key: tl.tensor,
    survivors: tl.tensor,
    survivor_count: tl.tensor,
    wanted: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    threshold_key: tl.tensor,
    threshold_left: tl.tensor,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Writes the key found, and the weight wanted of the scores that are equal to it; the grid is (rows,)."""
    row = tl.program_id(0)
    if survivor_count is not None and tl.load(survivor_count + row) <= CAPACITY:
        best, count = score_of(tl.load(best_key + row)), tl.load(survivor_count + row)
        key, left = threshold_of_survivors(survivors + row * CAPACITY, count, best, tl.load(wanted + row), CAPACITY)
    else:
        key, left = settled(wanted, sums, states, vocab, row, 32 // BITS, MASS, BITS)
    tl.store(threshold_key + row, key)
    tl.store(threshold_left + row, left)


def find_survivors(scores: Tensor, top_k: Tensor, sums: Tensor, count: Tensor, room: int, tile: int) -> Survivors:
    """Finds what top-k leaves.

    Args:
        scores: float32 [rows, vocab], contiguous.
        top_k: int32 [rows]; 0 leaves all.
        sums: int64 [rows * COUNT_SUMS], zeros.
        count: int64 [rows], zeros; of what is returned.
        room: most keys of a row that are gathered, a power of two.
        tile: tokens that a program looks at.
    """
    rows, vocab = scores.shape
    states = _search(scores, top_k, sums, False, tile)
    found = Survivors(torch.empty_like(count), count.new_empty(rows, room), count)
    gather_kernel[(triton.cdiv(vocab, tile), rows)](
        scores, vocab, top_k, sums, states, found.least_key, found.keys, count,
        BITS=COUNT_BITS, CAPACITY=room, TILE=tile,
    )  # fmt: skip
    return found


def find_threshold(
    scores: Tensor,
    best_key: Tensor,
    wanted: Tensor,
    sums: Tensor,
    mass: bool,
    tile: int,
    survivors: Survivors | None = None,
) -> tuple[Tensor, Tensor]:
    """The key of the least score kept in each row, and how much of the weight of its equals is kept.

    Args:
        scores: float32 [rows, vocab], contiguous.
        best_key: int64 [rows], the keys of the best scores.
        wanted: [rows], float64 top_p if `mass`, else int32 top_k.
        sums: int64 [rows * (MASS_SUMS if `mass`, else COUNT_SUMS)], zeros.
        tile: tokens that a program looks at.
        survivors: all that has weight, for a search by mass; None: all scores.

    Returns:
        Two tensors int64 [rows].
    """
    states = _search(scores, wanted, sums, mass, tile, best_key, survivors)
    key, left = torch.empty_like(best_key), torch.empty_like(best_key)
    keys, count, room = _gathered(survivors)
    finish_kernel[(len(scores),)](
        scores.shape[1], best_key, keys, count, wanted, sums, states, key, left,
        MASS=mass, BITS=MASS_BITS if mass else COUNT_BITS, CAPACITY=room, num_warps=8,
    )  # fmt: skip
    return key, left


def _search(
    scores: Tensor,
    wanted: Tensor,
    sums: Tensor,
    mass: bool,
    tile: int,
    best_key: Tensor | None = None,
    survivors: Survivors | None = None,
) -> Tensor:
    """Makes the passes of a search, but in rows whose survivors were gathered; returns their states."""
    rows, vocab = scores.shape
    bits = MASS_BITS if mass else COUNT_BITS
    states = sums.new_empty(rows, 32 // bits, 2)
    least_key = None if survivors is None else survivors.least_key
    _, count, room = _gathered(survivors)
    for number in range(32 // bits):
        search_kernel[(triton.cdiv(vocab, tile), rows)](
            scores, vocab, best_key, least_key, count, wanted, sums, states,
            PASS=number, MASS=mass, BITS=bits, CAPACITY=room, TILE=tile,
        )  # fmt: skip
    return states


def _gathered(survivors: Survivors | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Their keys, how many they are, and for how many there is room."""
    return (None, None, 0) if survivors is None else (survivors.keys, survivors.count, survivors.keys.shape[1])
