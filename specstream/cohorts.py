"""Cohorts: requests verify in two groups, by turns, so that each is drafted for while the other's history streams."""

from __future__ import annotations

from collections.abc import Iterable

from specstream.sequence import Sequence


def next_turn(running: Iterable[Sequence], last: int) -> int | None:
    """Whose turn it is after a round of cohort `last`.

    None while not both have requests to draft for: then all verify, and are drafted for afterwards.
    """
    cohorts = {sequence.cohort for sequence in running if sequence.prompt_is_through and sequence.drafts}
    return 1 - last if len(cohorts) == 2 else None


def balance(running: Iterable[Sequence]) -> None:
    """Moves requests that are drafted for until the cohorts differ by one at most, the latest of the larger first."""
    cohorts: tuple[list[Sequence], list[Sequence]] = [], []
    for sequence in running:
        if sequence.prompt_is_through and sequence.drafts:
            cohorts[sequence.cohort].append(sequence)
    small, large = sorted(cohorts, key=len)
    while len(large) > len(small) + 1:
        moved = large.pop()
        moved.cohort = 1 - moved.cohort
        small.append(moved)
