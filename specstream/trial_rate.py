"""The rate that the rounds of a trial come to.

Where acceptance is made up chance should not decide between settings. So a verification counts for what it is expected
to give, and with lookahead, where a round takes far longer if drafting has to follow it, as many outcomes are taken to
have had no branch as are expected to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True)
class TrialRound:
    """One round."""

    seconds: float
    tokens: float
    """That it gave, or was expected to give."""
    missed: bool = False
    """Whether drafting followed, since there was no branch for what came out."""


def rate_of(
    blocks: Sequence[Sequence[TrialRound]], missing: float | None = None, late: Callable[[], float] = lambda: 0.0
) -> float:
    """Tokens a second: the middle one of the rates of blocks.

    Args:
        missing: the share of rounds that is expected to be missed; None: whatever share of them was.
        late: by how many seconds missed rounds are predicted to take longer; called if all or none were missed.
    """
    longer = seconds_longer([each for block in blocks for each in block], late)
    return median(_rate(block, missing, longer) for block in blocks)


def seconds_longer(rounds: Sequence[TrialRound], late: Callable[[], float]) -> float:
    """By how much missed rounds take longer than others, on average."""
    missed, others = ([each.seconds for each in rounds if each.missed is wanted] for wanted in (True, False))
    return mean(missed) - mean(others) if missed and others else late()


def _rate(block: Sequence[TrialRound], missing: float | None, longer: float) -> float:
    seconds, missed = sum(each.seconds for each in block), sum(each.missed for each in block)
    if missing is not None:
        seconds += (missing * len(block) - missed) * longer
    return sum(each.tokens for each in block) / seconds
