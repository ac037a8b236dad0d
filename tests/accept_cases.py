"""Rounds and settings for the kernels that choose tokens, and what the rules of the host make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specstream.kernels.accept import Best, Seats, accept, propose
from specstream.sampling import Noise, Sampling
from specstream.speculate import (
    Accepted,
    Candidates,
    Speculation,
    accept_coupled,
    accept_greedy,
    accept_standard,
)

INF = float("inf")

Method = Literal["standard", "coupled"]
DraftMethod = Literal["greedy", "probabilistic"]


@dataclass
class Round:
    """What `accept` takes."""

    seats: Seats
    scores: Tensor
    row_start: Tensor
    draft_probabilities: Tensor

    def tensors(self) -> list[Tensor]:
        return [*vars(self.seats).values(), self.scores, self.row_start, self.draft_probabilities]

    def to(self, device: torch.device) -> Round:
        *seats, scores, row_start, draft_probabilities = (tensor.to(device) for tensor in self.tensors())
        return Round(Seats(*seats), scores, row_start, draft_probabilities)

    def copy_(self, other: Round) -> None:
        for mine, new in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(new)


def random_scores(rows: int, vocab: int, ties: bool) -> Tensor:
    """float32 [rows, vocab] with some -inf; with ties, of few different values."""
    scores = torch.randint(-2, 3, (rows, vocab)).float() if ties else torch.randn(rows, vocab) * 3
    scores[torch.rand(rows, vocab) < 0.2] = -INF
    scores[torch.arange(rows), torch.randint(vocab, (rows,))] = 2.0  # a row has at least one token
    return scores


def random_round(
    seats: int, depth: int, vocab: int, *, ties: bool = False, dtype: torch.dtype = torch.float64
) -> Round:
    """Seats with any number of candidates, some of them absent or greedy, candidates good and bad; on the CPU.

    What no kernel may use is NaN: rows of scores that are nobody's and probabilities of candidates that are not there.
    """
    counts = torch.randint(-1, depth + 1, (seats,), dtype=torch.int32)
    counts[0] = depth
    starts = 1 + torch.cumsum(counts + 1, 0) - (counts + 1)
    scores = torch.full((2 + seats * (depth + 1), vocab), torch.nan)
    draft = torch.full((seats, depth, vocab), torch.nan, dtype=torch.float64)
    candidates = torch.randint(vocab, (seats, depth))
    positions, seeds = torch.randint(100, (seats,)), torch.randint(-(2**63), 2**63 - 1, (seats,))
    do_sample = torch.rand(seats) < 0.75
    for seat, (count, start) in enumerate(zip(counts.tolist(), starts.tolist(), strict=True)):
        if count < 0:
            continue
        rows = random_scores(count + 1, vocab, ties)
        scores[start : start + count + 1] = rows
        closeness, factor = torch.rand(2).tolist()
        other = torch.softmax(random_scores(count, vocab, ties).double(), -1)
        draft[seat, :count] = closeness * torch.softmax(rows[:count].double(), -1) + (1 - closeness) * other
        if factor < 0.2:  # nowhere is the target's larger: no residual
            draft[seat, :count] = 4 * torch.softmax(rows[:count].double(), -1)
        noise = Noise(int(seeds[seat]))
        for index in range(count):
            if torch.rand(()) < 0.8:
                coupled = rows[index] + noise.gumbel(int(positions[seat]) + index, vocab)
                picks = [rows[index].argmax(), coupled.argmax(), torch.multinomial(draft[seat, index], 1)[0]]
                candidates[seat, index] = picks[int(torch.randint(3, ()))] if do_sample[seat] else picks[0]
    places = Seats(counts, candidates, positions, seeds, do_sample)
    return Round(places, scores, starts.int(), draft.to(dtype))


def expected(given: Round, seat: int, method: Method) -> Accepted | None:
    """What the host's rule gives a seat; None if it is absent."""
    seats = given.seats
    count, start, position = (int(x[seat]) for x in (seats.candidates_count, given.row_start, seats.positions))
    if count < 0:
        return None
    scores, candidates = given.scores[start : start + count + 1], seats.candidates[seat, :count].tolist()
    noise = Noise(int(seats.seeds[seat]))
    if not seats.do_sample[seat]:
        return accept_greedy(scores, candidates)
    if method == "coupled":
        return accept_coupled(scores, candidates, noise, position)
    return accept_standard(scores, candidates, list(given.draft_probabilities[seat, :count].double()), noise, position)


def accept_round(given: Round, method: Method, best: Best | None = None) -> tuple[Tensor, Tensor]:
    draft = given.draft_probabilities if method == "standard" else None
    return accept(given.seats, given.scores, given.row_start, method, draft, best=best)


def check_accepted(given: Round, method: Method, result: tuple[Tensor, Tensor]) -> None:
    """Compares with the host's rule for each seat of a round on the CPU."""
    accepted, produced = (tensor.cpu() for tensor in result)
    for seat, tokens in enumerate(produced.tolist()):
        want = expected(given, seat, method)
        count = int(accepted[seat])
        assert tokens[count + 1 :] == [-1] * (len(tokens) - count - 1)
        assert (None if count < 0 else (count, tokens[: count + 1])) == want


def propose_step(
    given: Round, scores: Tensor, step: int, method: Method, draft_method: DraftMethod, best: Best | None = None
) -> None:
    draft = given.draft_probabilities if method == "standard" else None
    number = torch.full((1,), step, device=scores.device)
    propose(given.seats, scores, number, method, draft_method, draft, best)


def check_proposed(
    before: Round, after: Round, scores: Tensor, step: int, method: Method, draft_method: DraftMethod
) -> None:
    """Compares a step of proposing, from `before` to `after`, with the host's; the scores are on the CPU."""
    candidates = after.seats.candidates.cpu()
    speculation = Speculation(method, draft_method)
    for seat, count in enumerate(before.seats.candidates_count.tolist()):
        want = before.seats.candidates[seat].clone()
        if count > step:
            sampling = Sampling(bool(before.seats.do_sample[seat]), int(before.seats.seeds[seat]))
            made = Candidates()
            speculation.propose(sampling, scores[seat], [0] * (int(before.seats.positions[seat]) + step), made)
            want[step] = made.tokens[0]
            if made.probabilities:
                got = after.draft_probabilities[seat, step].cpu()
                torch.testing.assert_close(got.double(), made.probabilities[0], rtol=1e-6, atol=1e-15)
        assert torch.equal(candidates[seat], want)


def odd_logits(rows: int, vocab: int) -> Tensor:
    """float32 [rows, vocab]: rows with NaN of both signs, with infinities, with nothing but -inf, and good ones."""
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    logits = torch.randn(rows, vocab) * 3
    values = torch.tensor([torch.nan, 0, INF, -INF, torch.nan, torch.nan]).where(torch.arange(6) != 1, negative_nan)
    for row, value in enumerate(values[:rows]):
        logits[row, int(torch.randint(1, vocab, ()))] = value
    logits[4:5, 0] = INF
    logits[6:7] = -INF
    logits[7:8] = -logits[7:8].abs()
    return logits


def check_best(best: Tensor, logits: Tensor, temperature: Tensor | None = None) -> None:
    """Compares with the best of what the temperature leaves, [rows], where any NaN shows; all on the CPU."""
    scores = logits if temperature is None else logits / temperature[:, None]
    torch.testing.assert_close(best, scores.amax(-1), rtol=0, atol=0, equal_nan=True)


NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
DTYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float32}

CORNERS = [
    NEUTRAL,
    NEUTRAL | {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    NEUTRAL | {"temperature": 1.7, "top_k": 10**6, "top_p": 1e-6, "min_p": 1.0},
    NEUTRAL | {"top_k": 7, "top_p": 0.95},
    NEUTRAL | {"top_p": 0.0, "min_p": 0.01},
    NEUTRAL | {"top_p": 0.999},
]
FEW_AND_MANY = [
    NEUTRAL | {"top_k": 5, "top_p": 0.9},
    NEUTRAL | {"top_k": 0, "top_p": 0.8},
    NEUTRAL | {"top_k": 50, "top_p": 0.6},
    NEUTRAL | {"top_k": 8, "top_p": 1.0},
    NEUTRAL | {"top_k": 1, "top_p": 0.0},
]
"""Of the first and of the last two rows top-k leaves at most 8, unless scores are equal."""


def setting_tensors(rows: list[dict[str, Any]], used: list[str]) -> dict[str, Tensor]:
    """Of the settings `used`, the arguments of `process`."""
    return {name: torch.tensor([row[name] for row in rows], dtype=DTYPES[name]) for name in used}


def warp(logits: Tensor, settings: dict[str, Any]) -> Tensor:
    """float32 [vocab] by transformers' own warpers, of those settings that change something."""
    warpers: list[Any] = [
        settings["temperature"] != 1 and TemperatureLogitsWarper(settings["temperature"]),
        settings["top_k"] > 0 and TopKLogitsWarper(settings["top_k"]),
        settings["top_p"] < 1 and TopPLogitsWarper(settings["top_p"]),
        settings["min_p"] > 0 and MinPLogitsWarper(settings["min_p"]),
    ]
    scores = logits.float().unsqueeze(0)
    for warper in filter(None, warpers):
        scores = warper(None, scores)
    return scores[0]


def check_processed(processed: Tensor, logits: Tensor, rows: list[dict[str, Any]], used: list[str]) -> None:
    """Compares what `process` made of logits, with the settings `used`, with transformers' warpers on the CPU."""
    assert processed.dtype == torch.float32
    for got, row_logits, row in zip(processed.cpu(), logits.cpu(), rows, strict=True):
        check_row(got, row_logits, NEUTRAL | {name: row[name] for name in used})


def check_row(got: Tensor, logits: Tensor, settings: dict[str, Any]) -> None:
    """They may differ by which of equal scores top-p keeps, and for tokens where float32 rounding decides."""
    want = warp(logits, settings)
    if torch.equal(got, want) or torch.equal(got.sort().values, want.sort().values):
        return
    scores = warp(logits, settings | {"top_p": 1.0, "min_p": 0.0})
    different = (got != want).nonzero()[:, 0]
    kept = torch.where(got[different] > -INF, got[different], want[different])
    assert torch.equal(kept, scores[different]), "not the scores at that temperature"
    probabilities = torch.softmax(scores.double(), -1)
    ascending, order = probabilities.sort(stable=True)
    cumulative = torch.empty_like(ascending).scatter_(0, order, ascending.cumsum(0))
    near_top_p = (cumulative - (1 - settings["top_p"])).abs() < 3e-6
    near_min_p = (probabilities - settings["min_p"] * probabilities.max()).abs() < 1e-6 * probabilities
    assert (near_top_p | near_min_p)[different].all()
