"""The search for the fastest settings: from those an engine would choose itself, one is changed after another.

First by prediction alone, which takes no time to speak of, then by measuring: of each setting only values with which
the planner, whose figures are good to a few per cent, does not predict much less. What is measured decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Choice = TypeVar("Choice")

WORTH_MEASURING = 0.85
"""Part of the best prediction: with less, a value is not measured."""
LEAST_GAIN = 1.01
"""By what factor a measured rate must be higher than the best to take its place: less is noise."""


def best_of(rates: Mapping[Choice, float | None]) -> Choice | None:
    """The choice with the highest rate; an earlier one unless it is clearly slower; None if there are no rates."""
    best: tuple[Choice, float] | None = None
    for choice, rate in rates.items():
        if rate is not None and (best is None or rate > LEAST_GAIN * best[1]):
            best = choice, rate
    return best and best[0]


@dataclass
class Search(Generic[Choice]):
    """Finds the choice of the highest rate."""

    predict: Callable[[Choice], float | None]
    """The rate that is predicted; None if a choice cannot be had."""
    measure: Callable[[Choice, float], float | None]
    """The rate that is measured, given the best so far: a choice that turns out to be far slower need not be measured
    to the end. None if it failed."""
    may_go_on: Callable[[], bool]
    """Whether there is time for another measurement."""
    measured: dict[Choice, float | None] = field(default_factory=dict)
    """By choice, in the order in which they were measured."""

    @property
    def best(self) -> Choice | None:
        return best_of(self.measured)

    def run(self, first: Sequence[Choice], changed: Mapping[str, Callable[[Choice], Sequence[Choice]]]) -> None:
        """Searches until nothing promising is left, or there is no time.

        Args:
            first: what is measured first; after it what is predicted to be the fastest.
            changed: for each setting, what a choice becomes with other values of it. By turns each setting's most
                promising value is measured, from the best choice so far.
        """
        for choice in first:
            self._look_at(choice)
        if self.best is not None:
            self._look_at(self._predicted_best(self.best, changed.values()))
        before = 0
        while before < len(self.measured):
            before = len(self.measured)
            for others in changed.values():
                best = self.best
                promising = None if best is None else self._most_promising(best, others(best))
                if promising is not None:
                    self._look_at(promising)

    def _predicted_best(self, start: Choice, changed: Iterable[Callable[[Choice], Sequence[Choice]]]) -> Choice:
        """Where changing one setting after another to its best predicted value ends."""
        before, best = None, start
        while best != before:
            before = best
            for others in changed:
                rates = {choice: self.predict(choice) or 0.0 for choice in (best, *others(best))}
                fastest = max(rates, key=rates.__getitem__)
                if rates[fastest] > LEAST_GAIN * rates[best]:
                    best = fastest
        return best

    def _most_promising(self, best: Choice, choices: Sequence[Choice]) -> Choice | None:
        """Of those that are not measured the one with the highest prediction, if that is worth measuring."""
        known = {choice: self.predict(choice) or 0.0 for choice in choices if choice not in self.measured}
        choice = max(known, key=known.__getitem__, default=None)
        if choice is None or known[choice] <= 0 or known[choice] < WORTH_MEASURING * (self.predict(best) or 0.0):
            return None
        return choice

    def _look_at(self, choice: Choice) -> None:
        if choice not in self.measured and (not self.measured or self.may_go_on()):
            best = self.best
            self.measured[choice] = self.measure(choice, 0.0 if best is None else self._rate(best))

    def _rate(self, choice: Choice) -> float:
        rate = self.measured[choice]
        assert rate is not None
        return rate
