"""The search over settings, on rates that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from specstream.settings_search import Search, best_of


@dataclass(frozen=True)
class Made:
    """Settings of made-up engines."""

    chunk: int = 4
    depth: int = 1


def with_other(name: str, values: Sequence[int]) -> Callable[[Made], list[Made]]:
    return lambda now: [replace(now, **{name: value}) for value in values if value != getattr(now, name)]


CHANGES = {"depth": with_other("depth", range(1, 9)), "chunk": with_other("chunk", range(1, 9))}


def real(made: Made) -> float:
    """Best at chunks of 6 and a depth of 5."""
    return 100.0 - 3 * abs(made.chunk - 6) - 5 * abs(made.depth - 5)


@dataclass
class Bench:
    """Searches, and remembers what was measured."""

    predicted: Callable[[Made], float | None] = real
    most: int = 12
    failing: tuple[Made, ...] = ()
    seen: list[tuple[Made, float]] = field(default_factory=list)

    def found(self) -> Made | None:
        search = Search(self.predicted, self.measure, lambda: len(self.seen) < self.most)
        search.run([Made()], CHANGES)
        assert [made for made, _ in self.seen] == list(search.measured)
        return search.best

    def measure(self, made: Made, best: float) -> float | None:
        assert made not in {earlier for earlier, _ in self.seen}
        self.seen.append((made, best))
        return None if made in self.failing else real(made)


def test_it_finds_the_best_in_few_trials() -> None:
    bench = Bench()
    assert bench.found() == Made(6, 5)
    assert bench.seen[:2] == [(Made(), 0.0), (Made(6, 5), real(Made()))], "untuned, and what is predicted to be best"
    assert len(bench.seen) <= 12
    for index, (_, best) in enumerate(bench.seen[1:], 1):
        assert best == max(real(made) for made, _ in bench.seen[:index]), "what the next one is compared with"


def test_what_is_measured_decides_where_predictions_are_wrong() -> None:
    """They hold the best to be a tenth slower than its neighbours."""
    bench = Bench(lambda made: 90.0 if made == Made(6, 5) else real(replace(made, chunk=6)), most=100)
    assert bench.found() == Made(6, 5)


def test_what_is_predicted_to_be_much_slower_or_not_to_fit_is_not_measured() -> None:
    bench = Bench(lambda made: None if made.chunk > 4 else real(made), most=100)
    assert bench.found() == Made(4, 5)
    assert all(made.chunk <= 4 for made, _ in bench.seen)
    assert all(real(made) > 70 for made, _ in bench.seen[1:])


@pytest.mark.parametrize("most", [1, 2, 5])
def test_trials_are_counted(most: int) -> None:
    bench = Bench(most=most)
    bench.found()
    assert len(bench.seen) == most


def test_what_fails_is_passed_over() -> None:
    bench = Bench(failing=(Made(6, 5),), most=100)
    found = bench.found()
    assert found is not None
    assert real(found) == real(Made(5, 5))
    nothing = Bench(failing=(Made(),))
    assert nothing.found() is None
    assert len(nothing.seen) == 1, "nothing to go on from"


def test_the_best_is_an_earlier_one_unless_it_is_clearly_slower() -> None:
    assert best_of({"a": 100.0, "b": 100.5, "c": 99.0}) == "a"
    assert best_of({"a": 100.0, "b": 102.0, "c": None}) == "b"
    assert best_of({"a": None}) is None
    assert best_of({}) is None
