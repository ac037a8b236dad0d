"""A planned round as a run on disk, which TensorBoard shows beside measured ones."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from specstream.bench_machine import versions
from specstream.fit_report import FitReport
from specstream.traces.planned import planned_round
from specstream.traces.records import RunInfo
from specstream.traces.run_writer import RunWriter


def trace_plan(report: FitReport, logdir: str | Path) -> Path | None:
    """Writes the round of a report in a folder of its own below `logdir`.

    Returns:
        The folder; None if it does not fit, so that there is no round.

    Raises:
        InvalidOption: the folder cannot be made.
    """
    plan, memory = report.plan, report.memory
    if plan is None or memory is None:
        return None
    now, link = datetime.now(timezone.utc), report.profile.host_to_device_bytes_per_us
    name = now.strftime("%Y-%m-%d_%H-%M-%S_plan")
    info = RunInfo(
        name=name,
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
    with RunWriter(logdir, name, info) as writer:
        writer.plan_id(plan.spec, lambda number: planned_round(plan, number, link))
    return writer.path
