"""What plans cost stays under its bars: the interpreter's own time a step, and making a plan."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_a_plan_step_costs_at_most_15_microseconds_and_a_plan_few_milliseconds(root: Path) -> None:
    spec = importlib.util.spec_from_file_location("overhead", root / "benchmarks" / "interpreter_overhead.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    row = benchmark.measure(layers=36, groups=16, slots=4, rounds=10)
    assert row["steps"] > 3000
    assert row["median_us"] <= 15
    assert row["plan_ms"] <= 100, "16 on an idle machine"
    assert row["proof_ms"] <= 150, "22 on an idle machine"
