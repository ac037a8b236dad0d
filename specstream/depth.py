"""How many candidates a round: what `num_speculative_tokens="auto"` stands for on a device, for two models."""

from __future__ import annotations

from dataclasses import replace

from specstream.errors import OutOfBudget
from specstream.options import MOST_AUTO_CANDIDATES, Options
from specstream.policy import Planned, longest_round
from specstream.steady import steady_round

DEPTHS = (1, 2, 3, 4, 6, 8, 12, MOST_AUTO_CANDIDATES)
ASSUMED_ACCEPTANCE = 0.8
"""The chance that a candidate is right if those before it are, as long as nothing is known of the texts."""


def choose_depth(options: Options, planned: Planned) -> int:
    """The number of candidates with which the longest requests are predicted to get the most tokens a second.

    Where histories stream, and the ring holds what the link brings while the draft proposes, more candidates cost a
    round nothing; where everything is resident, each costs a draft step.

    Raises:
        OutOfBudget: not even one candidate fits.
    """
    rates: dict[int, float] = {}
    for depth in DEPTHS:
        try:
            memory, planner = planned(replace(options, num_speculative_tokens=depth))
        except OutOfBudget:
            if not rates:
                raise
            break
        period = steady_round(planner.exact(longest_round(memory, options.max_num_seqs, depth))).period_us
        rates[depth] = expected_tokens(ASSUMED_ACCEPTANCE, depth) / period
    return max(rates, key=rates.__getitem__)


def expected_tokens(acceptance: float, depth: int) -> float:
    """Of a round: the target's own token, and each candidate if it and all before it are right (a geometric series)."""
    return sum(acceptance**right for right in range(depth + 1))
