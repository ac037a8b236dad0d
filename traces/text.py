"""A plan for people: its structure, its bytes, its predicted lanes and waits, as plain text."""

from __future__ import annotations

import math

from specstream.bubbles import bubbles
from specstream.critical_path import critical_path
from specstream.exposure import exposure
from specstream.options import format_size
from specstream.round_graph import TaskKind
from specstream.round_plan import Lane, Plan
from specstream.timeline import Timeline
from specstream.why_exposed import why_exposed

WIDTH = 72
"""Columns of the lane drawing."""
LONGEST_BUBBLES = 3
"""How many are shown."""


def describe_plan(plan: Plan) -> str:
    """The text that `print(plan)` shows."""
    spec = plan.spec
    kinds = {kind: sum(t.kind.value == kind for t in plan.tasks) for kind in ("piece", "fetch", "attend", "offload")}
    lines = [
        f"round of {len(spec.seats)} request(s), {spec.num_layers} layers: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count),
        f"streams {format_size(spec.streamed_bytes)} in {len(spec.groups)} group(s) a layer through "
        f"{spec.staging_slots} slot(s); {len(spec.entry)} fetches in flight at the start, "
        f"{len(spec.exit)} at the end",
    ]
    for seat in spec.seats:
        offload = f", writes out {seat.offload}" if seat.offload else ""
        lines.append(
            f"  seat {seat.seat}: {min(seat.resident, seat.open)} resident chunks, {seat.streamed} streamed{offload}"
        )
    if spec.drafts_beside:
        verified = {seat.seat for seat in spec.seats}
        others = sorted({run.seat for run in spec.next_runs or ()} - verified)
        whom = f"seats {', '.join(map(str, others))}" if others else "likely outcomes of this round"
        lines.append(f"  drafted for meanwhile: {whom}")
    drafts = exposure(plan, Lane.DRAFT)
    timeline = drafts.timeline
    following = "from one round to the next" if timeline.repeats else "for this round alone"
    lines.append(f"predicted {timeline.period_us / 1e3:.2f} ms {following}")
    lines += [_draw(timeline, lane) for lane in Lane if timeline.busy_us(lane)]
    path = critical_path(timeline)
    shares = [f"{lane.value} {path.share(lane):.0%}" for lane in Lane if path.share(lane) > 0.005]
    lines.append(f"critical path: {', '.join(shares)}")
    if plan.by_kind[TaskKind.DRAFT]:
        hidden, exposed = drafts.hidden_us / 1e3, drafts.exposed_us / 1e3
        lines.append(f"drafts: {hidden:.2f} ms hidden ({drafts.hidden_share:.0%}), {exposed:.2f} ms exposed")
        reason = why_exposed(plan, drafts)
        lines += [f"  {reason.value}"] if reason else []
    waits = bubbles(timeline)
    waited = sum(bubble.duration_us for bubble in waits)
    lines.append(f"target waits {waited / 1e3:.2f} ms in {len(waits)} bubble(s)")
    lines += [f"  {bubble}" for bubble in sorted(waits, key=lambda b: -b.duration_us)[:LONGEST_BUBBLES]]
    return "\n".join(lines)


def _draw(timeline: Timeline, lane: Lane) -> str:
    """One lane as a bar: '#' where it is busy, '-' where it is for less than half of the time, '.' not at all."""
    width_us = timeline.period_us / WIDTH
    filled = [0.0] * WIDTH
    for start, stop in timeline.times(lane):
        for column in range(max(0, int(start / width_us)), min(WIDTH, math.ceil(stop / width_us))):
            filled[column] += min(stop / width_us, column + 1) - max(start / width_us, column)
    bar = "".join("#" if share >= 0.5 else "-" if share > 0.01 else "." for share in filled)
    busy = timeline.busy_us(lane)
    return f"  {lane.value:<6} |{bar}| {busy / 1e3:.2f} ms busy, {busy / timeline.period_us:.0%}"
