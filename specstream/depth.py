"""How many candidates a round: what `num_speculative_tokens="auto"` stands for on a device, for two models."""

from __future__ import annotations

from dataclasses import replace

from specstream.errors import OutOfBudget
from specstream.options import MOST_AUTO_CANDIDATES, Options
from specstream.policy import Planned, choose_drafting, verified_us
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
                settings = replace(settings, drafting=choose_drafting(settings, planned))
            period = verified_us(settings, planned)
        except OutOfBudget:
            if not rates:
                raise
            break
        rates[depth] = expected_tokens(ASSUMED_ACCEPTANCE, depth) / period
    return max(rates, key=rates.__getitem__)


def expected_tokens(acceptance: float, depth: int) -> float:
    """Of a round: the target's own token, and each candidate if it and all before it are right (a geometric series)."""
    return sum(acceptance**right for right in range(depth + 1))
