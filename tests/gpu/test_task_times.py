"""When tasks ran on a device: worked out from ends that kernels note, in graphs too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specstream.traces.run_reader import RunReader
from tests.cuda_cases import cuda_engine, cuda_executor, slow_readers
from tests.helpers import prompt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["replayed", "interpreted"])
def test_spans_cover_the_rounds_that_ran(dtype: torch.dtype, tmp_path: Path) -> None:
    with cuda_engine(dtype, drafts=True) as engine:
        before: Any = engine.generate([list(prompt(300))], max_new_tokens=60)
        with engine.trace(tmp_path, run="r") as path:
            traced: Any = engine.generate([list(prompt(300))], max_new_tokens=60)
        assert bool(cuda_executor(engine)._graphs) == (dtype == torch.float32)
    assert torch.equal(before, traced)
    reader = RunReader(path)
    decoded = [reader.round(each.index) for each in reader.summaries() if not each.prompt_tokens]
    assert len(decoded) > 8
    for recorded in decoded[2:-1]:
        plan = reader.plan(recorded.plan)
        tasks = {task.name: task for task in plan.tasks}
        seen = {span.task for span in recorded.spans}
        assert {name for name in tasks if not name.startswith("offload/")} <= seen | {
            name for name in tasks if name.startswith("ahead/")
        }
        for lane in {task.lane for task in plan.tasks}:
            spans = sorted((s.start_us, s.stop_us) for s in recorded.spans if tasks[s.task].lane == lane)
            assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(spans))
            assert all(start <= stop for start, stop in spans)
        target = [s for s in recorded.spans if tasks[s.task].lane == "target"]
        assert 0 <= min(s.start_us for s in target) < recorded.duration_us
        assert max(s.stop_us for s in target) <= recorded.duration_us + 100


def test_a_task_that_takes_long_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to each group sleeps for a millisecond."""
    with cuda_engine(torch.float32) as engine:
        slow_readers(monkeypatch, 1.0)
        with engine.trace(tmp_path, run="r") as path:
            engine.generate([list(prompt(300))], max_new_tokens=12)
    reader = RunReader(path)
    recorded = reader.round(reader.summaries()[-2].index)
    attends = [span for span in recorded.spans if span.task.startswith("attend/")]
    assert attends
    for span in attends:
        assert 700 < span.stop_us - span.start_us < 3_000
