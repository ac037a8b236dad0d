"""Runs made up for tests of traces, and what lies on disk of one, read without the package's own reader."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specstream.traces.planned import planned_round
from specstream.traces.records import (
    MeasuredSpan,
    PlannedRound,
    RecordedRound,
    RequestRound,
    RoundSummary,
    RunInfo,
    of,
)
from tests.toy import make_plan, round_spec, seat

LINK = 1000.0
INFO = RunInfo(
    name="made up",
    started="2026-01-01T00:00:00+00:00",
    kind="engine",
    machine={"device": "a device"},
    versions={"specstream": "0.1.0"},
    target="target",
    draft=None,
    options={"chunk_tokens": 16},
    memory={"ring": 4096},
    link_bytes_per_us=LINK,
)


@cache
def toy_plan(number: int = 0, streamed: int = 3) -> PlannedRound:
    """A plan with tasks on all lanes."""
    spec = round_spec(seat(0, streamed=streamed, offload=1), layers=2, slots=2, warm=True, drafts=2)
    return planned_round(make_plan(spec), number, LINK)


def toy_round(index: int, plan: PlannedRound, *, measured: bool = True) -> RecordedRound:
    """A round that went as planned, 10 us after the one before."""
    spans = tuple(MeasuredSpan(task.name, task.start_us, task.stop_us) for task in plan.tasks) if measured else ()
    start = index * (plan.period_us + 10)
    requests = (RequestRound(7, 0, 4, index % 5, index % 5 + 1), RequestRound(8, 16, 0, 0, 1))
    return RecordedRound(index, start, plan.period_us, plan.id, plan.streamed_bytes, 99, requests, spans)


@dataclass(frozen=True)
class OnDisk:
    """What is in a run's folder."""

    info: RunInfo
    plans: dict[int, PlannedRound]
    summaries: list[RoundSummary]
    rounds: dict[int, RecordedRound]
    rounds_of_files: list[int]
    """How many there are in each."""
    traces: list[Path]


def on_disk(run: Path) -> OnDisk:
    own = run / "specstream"
    files = [json.loads(gzip.decompress(file.read_bytes())) for file in sorted((own / "rounds").iterdir())]
    plans = [PlannedRound.from_json(line) for line in json_lines(own / "plans.jsonl")]
    rounds = [RecordedRound.from_json(each) for file in files for each in file]
    assert len({plan.id for plan in plans}) == len(plans)
    assert [each.index for each in rounds] == sorted({each.index for each in rounds})
    return OnDisk(
        info=of(RunInfo, json.loads((own / "run.json").read_text())),
        plans={plan.id: plan for plan in plans},
        summaries=[of(RoundSummary, line) for line in json_lines(own / "summary.jsonl")],
        rounds={each.index: each for each in rounds},
        rounds_of_files=[len(file) for file in files],
        traces=sorted(run.glob("*.pt.trace.json.gz")),
    )


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events
