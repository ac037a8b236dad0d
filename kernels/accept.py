"""Proposing and accepting candidates on the device: the rules of `specstream.speculate`, for all seats at once.

Nothing waits for the host, so both functions can be captured in a CUDA graph, once a call has compiled the kernels. One
captured step of proposing serves for all steps: its number is read on the device. The tokens are those of the host's
rules: the random numbers are the same, all arithmetic is in float64, and of equal scores the first is taken. Sums and
logarithms may differ from the host's in the last bits, which decides only where two sums, or a random number and its
bound, agree in about 14 digits.

The inputs are not checked. For a seat that samples, each of its rows of scores must be a distribution: no NaN, no +inf,
and not all -inf; for a greedy seat there must be no NaN. `draft_probabilities` must be what the candidates were drawn
from: finite, and not all 0. From anything else some token comes out that means nothing; `specstream.speculate` refuses
such rows.

A seat's own token, the one after the accepted candidates, is chosen in the same way whether it is the target's or a new
candidate of the draft's. So proposing runs the kernels of accepting, with no candidates to verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from specstream.kernels.accept_seats import decide_kernel, draw_kernel
from specstream.kernels.accept_tiles import reduce_kernel, survey_kernel, weigh_kernel

TILE = 1024
"""Tokens of the vocabulary that a program looks at."""

Method = Literal["standard", "coupled"]


@dataclass(frozen=True)
class Seats:
    """What a round does for each seat, on the device; the contents may change between replays."""

    candidates_count: Tensor
    """int32 [seats], at most K; -1 for a seat that is not in this round."""
    candidates: Tensor
    """int64 [seats, K]."""
    positions: Tensor
    """int64 [seats], the index in the text of the first candidate."""
    seeds: Tensor
    """int64 [seats], the lowest 64 bits of each seed."""
    do_sample: Tensor
    """bool [seats]; a seat that does not sample is greedy."""


@dataclass(frozen=True)
class Best:
    """The best score of each row that is used, NaN if there is any: a row is a distribution if it is finite."""

    keys: Tensor
    """int64 [rows], as `process` found them before it filtered."""
    scores: Tensor
    """float32 [seats, K + 1], of a seat's rows; when proposing [seats, K], of each step. Written."""


def accept(
    seats: Seats,
    scores: Tensor,
    row_start: Tensor,
    rejection_sample_method: Method,
    draft_probabilities: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    best: Best | None = None,
) -> tuple[Tensor, Tensor]:
    """Verifies the candidates of every seat.

    Args:
        scores: float32 [rows, vocab], the target's processed logits; a seat has one row more than it has candidates.
        row_start: int32 [seats], each seat's first row.
        draft_probabilities: float64 or float32 [seats, K, vocab], what candidates were drawn from; for "standard".
        out: where to write what is returned.
        best: noted too.

    Returns:
        How many candidates are accepted, int32 [seats], and the tokens produced, int64 [seats, K + 1]: the accepted
        ones and one of the target's own, then -1. A seat that is not in this round has -1 everywhere.
    """
    count, most = seats.candidates.shape
    if out is None:
        out = seats.candidates_count.new_empty(count), seats.candidates.new_empty(count, most + 1)
    coupled = rejection_sample_method == "coupled"
    _check_draft_probabilities(not coupled, draft_probabilities)
    _choose(seats, scores, row_start, draft_probabilities, *out, most + 1, None, coupled, not coupled, best)
    return out


def propose(
    seats: Seats,
    scores: Tensor,
    step: Tensor,
    rejection_sample_method: Method,
    draft_sample_method: Literal["greedy", "probabilistic"],
    draft_probabilities: Tensor | None = None,
    best: Best | None = None,
) -> None:
    """Writes the next candidate of every seat that has so many candidates to `seats.candidates`.

    Args:
        scores: float32 [seats, vocab], the draft's processed logits.
        step: int64 [1], the candidate's index: 0 <= step < K.
        draft_probabilities: float64 or float32 [seats, K, vocab]; for "standard", [:, step] receives what the
            candidates of seats that sample were drawn from. The rows of other seats may be overwritten.
        best: noted too.
    """
    standard, greedy = rejection_sample_method == "standard", draft_sample_method == "greedy"
    _check_draft_probabilities(standard, draft_probabilities)
    coupled, drawn = not standard and not greedy, standard and not greedy
    ends = torch.empty_like(seats.candidates_count)
    _choose(seats, scores, None, draft_probabilities, ends, seats.candidates, 1, step, coupled, drawn, best)
    if draft_probabilities is not None and standard and greedy:
        vocabulary = torch.arange(scores.shape[1], device=scores.device)
        certain = vocabulary == seats.candidates.index_select(1, step)
        draft_probabilities.index_copy_(1, step, certain[:, None].to(draft_probabilities.dtype))


def _check_draft_probabilities(standard: bool, draft_probabilities: Tensor | None) -> None:
    if standard and draft_probabilities is None:
        raise ValueError('draft_probabilities: got None; rejection_sample_method="standard" needs a tensor')


def _choose(
    seats: Seats,
    scores: Tensor,
    row_start: Tensor | None,
    draft_probabilities: Tensor | None,
    accepted: Tensor,
    produced: Tensor,
    rows: int,
    step: Tensor | None,
    coupled: bool,
    standard: bool,
    best: Best | None,
) -> None:
    """Verifies all candidates, by `rows` of each seat, or chooses the one of `step`."""
    count = produced.shape[0]
    vocab, device = scores.shape[1], scores.device
    tiles = triton.cdiv(vocab, TILE)
    # Each of its own, for it then begins at 16 bytes, or Triton would compile the kernels once more.
    tops, masses = (torch.empty(count, rows, tiles, dtype=torch.float64, device=device) for _ in range(2))
    tokens = torch.empty(count, rows, tiles, dtype=torch.int64, device=device)
    row_top, row_mass = (torch.empty(count, rows, dtype=torch.float64, device=device) for _ in range(2))
    row_token = torch.empty(count, rows, dtype=torch.int64, device=device)
    draft_strides = (0, 0) if draft_probabilities is None else draft_probabilities.stride()
    arguments = {
        "scores": scores,
        "row_stride": scores.stride(0),
        "vocab": vocab,
        "row_start": row_start,
        "counts": seats.candidates_count,
        "candidates": seats.candidates,
        "candidates_stride": seats.candidates.stride(0),
        "positions": seats.positions,
        "seeds": seats.seeds,
        "do_sample": seats.do_sample,
        "draft_probabilities": draft_probabilities,
        "draft_seat_stride": draft_strides[0],
        "draft_row_stride": draft_strides[1],
        "step": step,
        "rows": rows,
        "tiles": tiles,
        "tops": tops,
        "tokens": tokens,
        "masses": masses,
        "row_top": row_top,
        "row_token": row_token,
        "row_mass": row_mass,
        "sums": torch.empty(2, count, tiles, dtype=torch.float64, device=device) if standard else None,
        "accepted": accepted,
        "produced": produced,
        "produced_stride": produced.stride(0),
        "best_key": None if best is None else best.keys,
        "best": None if best is None else best.scores,
        "best_stride": None if best is None else best.scores.stride(0),
        "COUPLED": coupled,
        "STANDARD": standard,
        "PROPOSING": step is not None,
        "ROWS": triton.next_power_of_2(rows),
        "TILE": TILE,
        "TILES": triton.next_power_of_2(tiles),
    }
    _launch(survey_kernel, (tiles, rows, count), arguments)
    _launch(reduce_kernel, (rows, count), arguments)
    _launch(decide_kernel, (count,), arguments, num_warps=1)
    if standard:
        _launch(weigh_kernel, (tiles, count), arguments)
        _launch(draw_kernel, (count,), arguments)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int = 4) -> None:
    """Runs a kernel with those of `arguments` that it takes, by name."""
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, num_warps=num_warps)
