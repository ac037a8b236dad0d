"""What lookahead reckons with: the likeliest outcomes of a verification, and how often one of them comes true."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specstream.speculate import GUESSES, Candidates

Shares = tuple[float, ...]
"""The chance that the target's own token, where it is not the candidate, is the draft's next best, second next, ..."""


@dataclass(frozen=True)
class FanOut:
    """How much is foreseen."""

    branches: int
    """Of all requests together, at most. Each takes memory, and a draft step of all of them more time than of one."""
    rank_shares: Shares
    """As `benchmarks/recovery_ranks.py` measures them."""

    def of_each(self, requests: int) -> FanOut:
        """Of one of so many requests."""
        return replace(self, branches=max(1, self.branches // max(1, requests)))


SECOND_MODEL = FanOut(64, (0.37, 0.17, 0.10, 0.07, 0.05, 0.04, 0.02))
"""Shares are those of the bundled pair, on a novel."""
ITSELF = FanOut(32, (0.73, 0.15, 0.07, 0.01))
"""A target that drafts for itself, whose guesses are better and whose steps are dearer. Shares are those of
SmolLM2-135M-Instruct with a window of 1,024 tokens."""


@dataclass(frozen=True)
class Outcome:
    """What a verification may come to."""

    accepted: int
    token: int
    """The target's own."""
    share: float
    """Of the outcomes with as many accepted those with this token, as is assumed."""


def likely_outcomes(acceptance: float, fan_out: FanOut, candidates: Candidates) -> list[Outcome]:
    """The likeliest outcomes of one request, the likeliest first: as many as it has branches, at most.

    Args:
        acceptance: the chance that a candidate is right if those before it are.
        candidates: with guesses of what follows the first 0, 1, ... of them.
    """
    weighed = []
    count, rank_shares = len(candidates.tokens), fan_out.rank_shares
    for accepted, guesses in enumerate(candidates.guesses[: count + 1]):
        chance = acceptance**accepted
        if accepted < count:
            chance *= 1 - acceptance
            others, shares = [token for token in guesses if token != candidates.tokens[accepted]], rank_shares
        else:  # the first guess is what the draft itself would propose
            others, shares = guesses, (acceptance, *((1 - acceptance) * share for share in rank_shares))
        for token, share in zip(others, shares, strict=False):
            weighed.append((chance * share, Outcome(accepted, token, share)))
    weighed.sort(key=lambda each: -each[0])  # a stable order: of equals the shorter first
    return [outcome for _, outcome in weighed[: fan_out.branches]]


def expected_hit_rate(acceptance: float, depth: int, fan_out: FanOut) -> float:
    """The chance that an outcome of so many candidates of a request has a branch: that of each number of accepted ones,
    times the shares of its branches."""
    guesses = [[index * GUESSES + guess for guess in range(GUESSES)] for index in range(depth + 1)]
    candidates = Candidates([tokens[0] for tokens in guesses[:depth]], guesses=guesses)
    chances = [acceptance**accepted * (1 - acceptance) for accepted in range(depth)] + [acceptance**depth]
    outcomes = likely_outcomes(acceptance, fan_out, candidates)
    return sum(chances[outcome.accepted] * outcome.share for outcome in outcomes)
