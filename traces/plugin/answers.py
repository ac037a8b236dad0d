"""What the plugin's routes answer. Tables are lists of rows, with their columns named once, so that they stay short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specstream.traces.figures import (
    link_floor_us,
    measured_figures,
    measured_layers,
    planned_figures,
    planned_layers,
    run_figures,
)
from specstream.traces.records import PlannedTask, RoundSummary
from specstream.traces.run_reader import RunReader
from specstream.traces.waits import (
    Interval,
    Wait,
    exposed_draft,
    measured_drafting,
    measured_waits,
    planned_drafting,
    planned_waits,
    tasks_of,
)

Answer = dict[str, Any]


def runs(found: Mapping[str, Path]) -> list[str]:
    """Names of all runs."""
    return list(found)


def run(reader: RunReader) -> Answer:
    """What the run is, its figures, and its rounds in short."""
    summaries = reader.summaries()
    return {
        "info": asdict(reader.info),
        "num_plans": reader.num_plans,
        "figures": asdict(run_figures(reader.info, summaries)),
        "rounds": _table(RoundSummary, summaries),
        "link_floors_us": [link_floor_us(each.streamed_bytes, reader.info) for each in summaries],
    }


def plan(reader: RunReader, number: int) -> Answer:
    """A plan with all its tasks, and where its target waits."""
    planned = reader.plan(number)
    waits = planned_waits(planned)
    return {
        "id": planned.id,
        "text": planned.text,
        "why_exposed": planned.why_exposed,
        "seats": planned.seats,
        "figures": asdict(planned_figures(planned, reader.info)),
        "layers": [asdict(layer) for layer in planned_layers(planned)],
        "tasks": _table(PlannedTask, planned.tasks),
        **_waiting(waits, planned_drafting(planned)),
    }


def round(reader: RunReader, index: int) -> Answer:
    """A round as it was measured. Of each span: name, start, stop, and which of the plan's tasks it is."""
    recorded = reader.round(index)
    planned = reader.plan(recorded.plan)
    named, place = tasks_of(planned), {task.name: number for number, task in enumerate(planned.tasks)}
    waits = measured_waits(recorded, planned)
    return {
        "index": recorded.index,
        "plan": recorded.plan,
        "start_us": recorded.start_us,
        "fetched_bytes": recorded.fetched_bytes,
        "requests": [asdict(each) for each in recorded.requests],
        "figures": asdict(measured_figures(recorded, planned, reader.info)),
        "layers": [asdict(layer) for layer in measured_layers(recorded, planned)],
        "spans": [[span.task, span.start_us, span.stop_us, place[named[span.task].name]] for span in recorded.spans],
        **_waiting(waits, measured_drafting(recorded, planned)),
    }


def _waiting(waits: Iterable[Wait], drafting: Iterable[Interval]) -> Answer:
    waits = list(waits)
    return {"waits": _table(Wait, waits), "exposed": exposed_draft(drafting, waits)}


def _table(kind: type[Any], records: Iterable[Any]) -> Answer:
    names = [each.name for each in fields(kind)]
    return {"columns": names, "rows": [[getattr(record, name) for name in names] for record in records]}
