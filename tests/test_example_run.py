"""The run in docs/example_runs, recorded on an H200: rounds of two cohorts of Qwen3-8B, read as any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstream.traces.figures import measured_figures, planned_figures, run_figures
from specstream.traces.run_reader import RunReader, find_runs
from specstream.traces.validate import validate

ROUNDS = 20
MOST_BYTES = 400_000


@pytest.fixture
def example(root: Path) -> RunReader:
    (run,) = find_runs(root / "docs" / "example_runs").values()
    return RunReader(run)


def test_it_shows_a_link_that_never_stands_still_and_drafting_that_costs_nothing(example: RunReader) -> None:
    assert example.info.machine["device"] == "NVIDIA H200"
    assert (example.info.target, example.info.draft) == ("qwen3-8b", "qwen3-0.6b")
    summaries = example.summaries()
    assert len(summaries) == ROUNDS
    for summary in summaries:
        recorded = example.round(summary.index)
        plan = example.plan(recorded.plan)
        measured, planned = measured_figures(recorded, plan, example.info), planned_figures(plan, example.info)
        assert recorded.duration_us == pytest.approx(plan.period_us, rel=0.05)
        assert measured.streamed_bytes == recorded.streamed_bytes == planned.streamed_bytes
        assert measured.draft_us == pytest.approx(planned.draft_us, rel=0.1)
        assert measured.exposed_draft_us == planned.exposed_draft_us == 0
    assert run_figures(example.info, summaries).link_utilization == pytest.approx(1, abs=0.02)


def test_its_files_are_small_and_whole(example: RunReader) -> None:
    files = [file for file in example.path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    traces = [file for file in files if file.name.endswith(".pt.trace.json.gz")]
    assert len(traces) == 2
    assert [validate(file) for file in traces] == [[], []]
