"""A planned round as a run on disk, which TensorBoard shows beside measured ones."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from specstream.bench_machine import versions
from specstream.fit_report import FitReport
from specstream.traces.planned import planned_round
from specstream.traces.records import PlannedRound, RunInfo
from specstream.traces.run_writer import RunWriter


def trace_plan(report: FitReport, logdir: str | Path) -> Path:
    """Writes the round of a report, of what fits, in a folder of its own below `logdir`, and returns the folder.

    Raises:
        InvalidOption: the folder cannot be made.
    """
    info, round_ = planned_run(report)
    with RunWriter(logdir, info.name, info) as writer:
        writer.plan_id(0, lambda number: round_)
    return writer.path


def planned_run(report: FitReport) -> tuple[RunInfo, PlannedRound]:
    """A report of what fits as a run, and its round, which has the id 0."""
    plan, memory = report.plan, report.memory
    assert plan is not None
    assert memory is not None
    now, link = datetime.now(timezone.utc), report.profile.host_to_device_bytes_per_us
    info = RunInfo(
        name=now.strftime("%Y-%m-%d_%H-%M-%S_plan"),
        started=now.isoformat(timespec="milliseconds"),
        kind="plan",
        machine={"device": report.profile.title},
        versions=versions(),
        target=report.target,
        draft=report.draft,
        options=asdict(report.options),
        memory={each: size for each, size in asdict(memory).items() if size is not None},
        link_bytes_per_us=link,
    )
    return info, planned_round(plan, 0, link)
