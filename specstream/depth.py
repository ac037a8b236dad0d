"""How many candidates a round: what `num_speculative_tokens="auto"` stands for on a device, for two models.

That is the most that a request is drafted for. One whose candidates are right less often than was assumed is drafted
for as few as pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specstream.errors import OutOfBudget
from specstream.memory import MemoryPlan
from specstream.options import MOST_AUTO_CANDIDATES, Options
from specstream.planner import Planner
from specstream.policy import Planned, choose_drafting, longest_round, period_us, verified_us
from specstream.speculate import ASSUMED_ACCEPTANCE

DEPTHS = (1, 2, 3, 4, 6, 8, 12, MOST_AUTO_CANDIDATES)


def choose_depth(options: Options, planned: Planned) -> int:
    """The number of candidates with which the longest requests are predicted to get the most tokens a second.

    By the policy that would be chosen for that number. Where drafting is hidden behind the link, more candidates cost a
    round nothing; where everything is resident, each costs a draft step.

    Raises:
        OutOfBudget: not even one candidate fits.
    """
    rates: dict[int, float] = {}
    for depth in DEPTHS:
        settings = replace(options, num_speculative_tokens=depth)
        try:
            if settings.drafting == "auto":
                _, period = choose_drafting(settings, planned)
            else:
                period = verified_us(settings, *planned(settings))
        except OutOfBudget:
            if not rates:
                raise
            break
        rates[depth] = expected_tokens(ASSUMED_ACCEPTANCE, depth) / period
    return max(rates, key=rates.__getitem__)


@dataclass(frozen=True)
class Depths:
    """What a request is drafted for, by how often its candidates were right. Nothing else counts, neither the other
    requests nor how long rounds have taken: the tokens of one that samples depend on it."""

    periods_us: Mapping[int, float]
    """By number of candidates: how long a round is predicted to take, of as many requests of `max_model_len` as there
    can be."""

    def best(self, acceptance: float) -> int:
        """The number with the most tokens a second, at this chance that a candidate is right if those before are."""
        return max(self.periods_us, key=lambda depth: expected_tokens(acceptance, depth) / self.periods_us[depth])


def depths_of(options: Options, memory: MemoryPlan, planner: Planner) -> Depths | None:
    """For an engine that drafts after acceptance; None for others, where more candidates cost a round little."""
    if options.drafting != "sequential":
        return None
    most = options.most_candidates
    numbers = sorted({depth for depth in DEPTHS if depth < most} | {most})
    rounds = {depth: longest_round(memory, options.max_num_seqs, depth) for depth in numbers}
    return Depths({depth: period_us(planner, spec) for depth, spec in rounds.items()})


def expected_tokens(acceptance: float, depth: int) -> float:
    """Of a round: the target's own token, and each candidate if it and all before it are right (a geometric series)."""
    return sum(acceptance**right for right in range(depth + 1))
