"""The search for the fastest settings: from those an engine would choose itself, one after another is changed.

Of each only values are measured with which the planner, whose figures are good to a few per cent, does not predict much
less. What is measured decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Choice = TypeVar("Choice")

WORTH_MEASURING = 0.85
"""Part of the best prediction: with less, a value is not measured."""
LEAST_GAIN = 1.01
"""By what factor a measured rate must be higher than the best to take its place: less is noise."""
VALUES_OF_A_SETTING = 3
"""That are measured in a row, the most promising ones."""


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

    def run(self, start: Choice, changed: Mapping[str, Callable[[Choice], Sequence[Choice]]]) -> None:
        """Searches until no change helps, or there is no time.

        Args:
            start: measured first.
            changed: for each setting, what a choice becomes with other values of it.
        """
        self._look_at(start)
        before: Choice | None = None
        while self.best is not None and self.best != before:
            before = self.best
            for others in changed.values():
                for choice in self._promising(others(self.best)):
                    self._look_at(choice)

    def _promising(self, choices: Sequence[Choice]) -> Iterator[Choice]:
        predicted = {choice: self.predict(choice) for choice in choices if choice not in self.measured}
        known = {choice: rate for choice, rate in predicted.items() if rate is not None}
        best = self.best
        least = WORTH_MEASURING * max([*known.values(), (best and self.predict(best)) or 0.0])
        order = sorted(known, key=lambda choice: -known[choice])
        yield from [choice for choice in order if known[choice] >= least][:VALUES_OF_A_SETTING]

    def _look_at(self, choice: Choice) -> None:
        if choice not in self.measured and (not self.measured or self.may_go_on()):
            best = self.best
            self.measured[choice] = self.measure(choice, 0.0 if best is None else self._rate(best))

    def _rate(self, choice: Choice) -> float:
        rate = self.measured[choice]
        assert rate is not None
        return rate
