"""The plan interpreter's own cost stays under its bar."""

from __future__ import annotations

from tests.helpers import script


def test_a_plan_step_costs_at_most_15_microseconds() -> None:
    row = script("interpreter_overhead").measure(layers=36, groups=16, slots=4, rounds=10)
    assert row["steps"] > 3000
    assert row["median_us"] <= 15
