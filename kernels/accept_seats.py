"""The kernels of acceptance that decide for a seat, one a program; see `specstream.kernels.accept`."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specstream.kernels.accept_tiles import count_of_seat, first_row, probabilities_tile, residual_tile, step_of
from specstream.kernels.philox import ACCEPT, DRAFT, RESIDUAL, TOKEN, uniform_first
from specstream.kernels.score_keys import score_of


@triton.jit
def decide_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    row_start: tl.tensor,
    counts: tl.tensor,
    candidates: tl.tensor,
    candidates_stride: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    do_sample: tl.tensor,
    draft_probabilities: tl.tensor,
    draft_seat_stride: tl.tensor,
    draft_row_stride: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,
    row_top: tl.tensor,
    row_token: tl.tensor,
    row_mass: tl.tensor,
    accepted: tl.tensor,
    produced: tl.tensor,
    produced_stride: tl.tensor,
    best_key: tl.tensor,
    best: tl.tensor,
    best_stride: tl.tensor,
    STANDARD: tl.constexpr,
    PROPOSING: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """How many candidates are accepted, and the tokens produced. Where one is to be drawn, the best stands for it.

    Notes the best score of each of the seat's rows by the way.
    """
    seat = tl.program_id(0)
    now = step_of(step, PROPOSING)
    count = count_of_seat(counts, seat, now, PROPOSING)
    index = tl.arange(0, ROWS)
    chosen = tl.load(row_token + seat * rows + index, mask=index <= count, other=-1)
    proposed = index < count
    candidate = tl.load(candidates + seat * candidates_stride + index, mask=proposed, other=-1)
    agrees = candidate == chosen
    if STANDARD and tl.load(do_sample + seat):
        top = tl.load(row_top + seat * rows + index, mask=proposed, other=0.0)
        mass = tl.load(row_mass + seat * rows + index, mask=proposed, other=1.0)
        row = first_row(row_start, seat, PROPOSING) + index
        score = tl.load(scores + row * row_stride + candidate, mask=proposed, other=0.0).to(tl.float64)
        draft_place = seat.to(tl.int64) * draft_seat_stride + index * draft_row_stride + candidate
        draft = tl.load(draft_probabilities + draft_place, mask=proposed, other=0.0).to(tl.float64)
        uniform = uniform_first(tl.load(seeds + seat), ACCEPT, tl.load(positions + seat) + index)
        agrees = uniform * draft < tl.exp(score - top) / mass
    stop = tl.min(tl.where(proposed & ~agrees, index, count), axis=0)
    result = tl.where(index < stop, candidate, tl.where(index == stop, chosen, -1))
    if PROPOSING:
        tl.store(produced + seat * produced_stride + now + index, result, mask=index <= count)
    else:
        tl.store(produced + seat * produced_stride + index, result, mask=index < rows)
    tl.store(accepted + seat, stop)
    if best is not None:
        key = tl.load(best_key + first_row(row_start, seat, PROPOSING) + index, mask=index <= count, other=0)
        tl.store(best + seat * best_stride + now + index, score_of(key), mask=index <= count)


@triton.jit
def first_beyond(cumulative: tl.tensor, weights: tl.tensor, target: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The first index with a weight whose cumulative weight exceeds `target`; if rounding leaves none, the last."""
    index = tl.arange(0, SIZE)
    first = tl.min(tl.where((cumulative > target) & (weights > 0), index, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def draw_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    row_start: tl.tensor,
    counts: tl.tensor,
    accepted: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    do_sample: tl.tensor,
    draft_probabilities: tl.tensor,
    draft_seat_stride: tl.tensor,
    draft_row_stride: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    row_top: tl.tensor,
    row_mass: tl.tensor,
    sums: tl.tensor,
    produced: tl.tensor,
    produced_stride: tl.tensor,
    PROPOSING: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Draws the seat's own token: the tile by the tiles' sums, then the token in it, by one random number."""
    seat = tl.program_id(0)
    now = step_of(step, PROPOSING)
    count = count_of_seat(counts, seat, now, PROPOSING)
    if (count >= 0) & tl.load(do_sample + seat):
        index = tl.load(accepted + seat)
        rejected = index < count
        tile = tl.arange(0, TILES)
        residual_sums = tl.load(sums + seat * tiles + tile, mask=tile < tiles, other=0.0)
        target_sums = tl.load(sums + (tl.num_programs(0) + seat) * tiles + tile, mask=tile < tiles, other=0.0)
        equal = tl.sum(residual_sums, axis=0) == 0  # but for rounding
        tile_sums = tl.where(equal, target_sums, residual_sums)
        cumulative = tl.cumsum(tile_sums, axis=0)
        position = tl.load(positions + seat) + now + index
        if PROPOSING:
            uniform = uniform_first(tl.load(seeds + seat), DRAFT, position)
        else:
            uniform = uniform_first(tl.load(seeds + seat), tl.where(rejected, RESIDUAL, TOKEN), position)
        bound = uniform * tl.sum(tl.where(tile == tiles - 1, cumulative, 0.0), axis=0)
        drawn_tile = first_beyond(cumulative, tile_sums, bound, TILES)
        before = tl.sum(tl.where(tile == drawn_tile - 1, cumulative, 0.0), axis=0)

        offsets = drawn_tile * TILE + tl.arange(0, TILE)
        draft_place = seat.to(tl.int64) * draft_seat_stride + (now + index) * draft_row_stride
        if PROPOSING:
            weights = tl.load(draft_probabilities + draft_place + offsets, mask=offsets < vocab, other=0.0)
            weights = weights.to(tl.float64)
        else:
            row_place = (first_row(row_start, seat, PROPOSING) + index) * row_stride
            top, mass = tl.load(row_top + seat * rows + index), tl.load(row_mass + seat * rows + index)
            target = probabilities_tile(scores, row_place, offsets, vocab, top, mass)
            weights = residual_tile(target, draft_probabilities, draft_place, rejected & ~equal, offsets, vocab)
        token = drawn_tile * TILE + first_beyond(before + tl.cumsum(weights, axis=0), weights, bound, TILE)
        tl.store(produced + seat * produced_stride + now + index, token.to(tl.int64))
