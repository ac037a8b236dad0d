"""The kernels of acceptance that read the vocabulary, a tile a program; see `specstream.kernels.accept`."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specstream.kernels.philox import TOKEN, uniform_tile


@triton.jit
def step_of(step: tl.tensor, PROPOSING: tl.constexpr) -> tl.tensor:
    """The step of proposing, int64; 0 when candidates are verified."""
    if PROPOSING:
        number = tl.load(step)
    else:
        number = tl.full((), 0, tl.int64)
    return number


@triton.jit
def count_of_seat(counts: tl.tensor, seat: tl.tensor, step: tl.tensor, PROPOSING: tl.constexpr) -> tl.tensor:
    """How many candidates the seat's rows verify, none when proposing; -1 if it is not in this round or step."""
    count = tl.load(counts + seat)
    if PROPOSING:
        count = tl.where(count > step, 0, -1)
    return count


@triton.jit
def first_row(row_start: tl.tensor, seat: tl.tensor, PROPOSING: tl.constexpr) -> tl.tensor:
    """The seat's first row of scores, int64."""
    if PROPOSING:
        row = seat.to(tl.int64)
    else:
        row = tl.load(row_start + seat).to(tl.int64)
    return row


@triton.jit
def survey_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    row_start: tl.tensor,
    counts: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    do_sample: tl.tensor,
    step: tl.tensor,
    tops: tl.tensor,
    tokens: tl.tensor,
    masses: tl.tensor,
    COUPLED: tl.constexpr,
    STANDARD: tl.constexpr,
    PROPOSING: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The best score of each tile and its token, with noise if coupled; if standard, also the sum of exp(score - best).

    The grid is (tiles, rows of a seat, seats); `tops`, `tokens` and `masses` are [seats, rows of a seat, tiles].
    """
    tile, index, seat = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    now = step_of(step, PROPOSING)
    if index <= count_of_seat(counts, seat, now, PROPOSING):
        start = tile * TILE
        offsets = start + tl.arange(0, TILE)
        row = first_row(row_start, seat, PROPOSING) + index
        values = tl.load(scores + row * row_stride + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float64)
        sampled = tl.load(do_sample + seat)
        if COUPLED and sampled:
            position = tl.load(positions + seat) + now + index
            uniform = uniform_tile(tl.load(seeds + seat), TOKEN, position, start, TILE)
            values -= tl.log(-tl.log(tl.maximum(uniform, 2.2250738585072014e-308)))
        top = tl.max(values, axis=0)
        place = (seat * tl.num_programs(1) + index) * tl.num_programs(0) + tile
        tl.store(tops + place, top)
        tl.store(tokens + place, (start + tl.argmax(values, axis=0)).to(tl.int64))
        if STANDARD and sampled:
            mass = tl.where(values > float("-inf"), tl.exp(values - top), 0.0)
            tl.store(masses + place, tl.sum(mass, axis=0))


@triton.jit
def reduce_kernel(
    counts: tl.tensor,
    do_sample: tl.tensor,
    step: tl.tensor,
    tiles: tl.tensor,
    tops: tl.tensor,
    tokens: tl.tensor,
    masses: tl.tensor,
    row_top: tl.tensor,
    row_token: tl.tensor,
    row_mass: tl.tensor,
    STANDARD: tl.constexpr,
    PROPOSING: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """From what was surveyed of a row's tiles to the same of the row; of equal scores the first counts.

    The grid is (rows of a seat, seats), and `row_top`, `row_token` and `row_mass` are [seats, rows of a seat].
    """
    index, seat = tl.program_id(0), tl.program_id(1)
    if index <= count_of_seat(counts, seat, step_of(step, PROPOSING), PROPOSING):
        row = seat * tl.num_programs(0) + index
        tile = tl.arange(0, TILES)
        top = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        best = tl.max(top, axis=0)
        tl.store(row_top + row, best)
        tl.store(row_token + row, tl.load(tokens + row * tiles + tl.argmax(top, axis=0)))
        if STANDARD and tl.load(do_sample + seat):
            mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0.0)
            tl.store(row_mass + row, tl.sum(tl.where(mass > 0, mass * tl.exp(top - best), 0.0), axis=0))


@triton.jit
def probabilities_tile(
    scores: tl.tensor, place: tl.tensor, offsets: tl.tensor, vocab: tl.tensor, top: tl.tensor, mass: tl.tensor
) -> tl.tensor:
    """float64, a row's softmax at `offsets`; the row begins at `place`, its best score and its mass are given."""
    values = tl.load(scores + place + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float64)
    return tl.exp(values - top) / mass


@triton.jit
def residual_tile(
    target: tl.tensor,
    draft_probabilities: tl.tensor,
    draft_place: tl.tensor,
    rejected: tl.tensor,
    offsets: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    """What the target's own token is drawn from: its probabilities, less the draft's if a candidate was rejected."""
    mask = (offsets < vocab) & rejected
    draft = tl.load(draft_probabilities + draft_place + offsets, mask=mask, other=0.0).to(tl.float64)
    return tl.maximum(target - draft, 0.0)


@triton.jit
def weigh_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    row_start: tl.tensor,
    counts: tl.tensor,
    accepted: tl.tensor,
    do_sample: tl.tensor,
    draft_probabilities: tl.tensor,
    draft_seat_stride: tl.tensor,
    draft_row_stride: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,
    row_top: tl.tensor,
    row_mass: tl.tensor,
    sums: tl.tensor,
    PROPOSING: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Sums over each tile what the seat's own token is drawn from, and writes it down if it is a candidate's.

    The grid is (tiles, seats); `sums` is [2, seats, tiles]: of the residual, and of the target's probabilities, which
    stand in for a residual that is zero everywhere.
    """
    tile, seat = tl.program_id(0), tl.program_id(1)
    now = step_of(step, PROPOSING)
    count = count_of_seat(counts, seat, now, PROPOSING)
    if (count >= 0) & tl.load(do_sample + seat):
        index = tl.load(accepted + seat)
        offsets = tile * TILE + tl.arange(0, TILE)
        row_place = (first_row(row_start, seat, PROPOSING) + index) * row_stride
        top, mass = tl.load(row_top + seat * rows + index), tl.load(row_mass + seat * rows + index)
        target = probabilities_tile(scores, row_place, offsets, vocab, top, mass)
        draft_place = seat.to(tl.int64) * draft_seat_stride + (now + index) * draft_row_stride
        if PROPOSING:
            written = target.to(draft_probabilities.dtype.element_ty)
            tl.store(draft_probabilities + draft_place + offsets, written, mask=offsets < vocab)
            residual = written.to(tl.float64)
        else:
            residual = residual_tile(target, draft_probabilities, draft_place, index < count, offsets, vocab)
        place = seat * tl.num_programs(0) + tile
        tl.store(sums + place, tl.sum(residual, axis=0))
        tl.store(sums + tl.num_programs(1) * tl.num_programs(0) + place, tl.sum(target, axis=0))
