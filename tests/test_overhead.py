"""What plans cost stays under its bars: the interpreter's own time a step, and making a plan."""

from __future__ import annotations

from tests.helpers import script


def test_a_plan_step_costs_at_most_15_microseconds_and_a_plan_few_milliseconds() -> None:
    row = script("interpreter_overhead").measure(layers=36, groups=16, slots=4, rounds=10)
    assert row["steps"] > 3000
    assert row["median_us"] <= 15
    assert row["plan_ms"] <= 100, "16 on an idle machine"
    assert row["proof_ms"] <= 150, "22 on an idle machine"
