"""A plan for people: its structure, its bytes, its predicted lanes and waits, as plain text."""

from __future__ import annotations

from specstream.options import format_size
from specstream.plan import Lane, Plan
from specstream.simulate import Timeline, simulate

WIDTH = 72
"""Columns of the lane drawing."""


def describe_plan(plan: Plan) -> str:
    """The text that `print(plan)` shows."""
    spec = plan.spec
    timeline = simulate(plan)
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
    lines.append(f"predicted {timeline.round_us / 1e3:.2f} ms")
    lines += [_draw(timeline, lane) for lane in Lane if timeline.busy_us(lane)]
    bubbles = timeline.bubbles()
    waited = sum(s.waited_us for s in bubbles)
    lines.append(f"target waits {waited / 1e3:.2f} ms in {len(bubbles)} bubble(s)")
    lines += [f"  {s.waited_us:8.0f} us before {s.task}, for {s.cause}" for s in bubbles[:3]]
    return "\n".join(lines)


def _draw(timeline: Timeline, lane: Lane) -> str:
    """One lane as a bar: '#' where it is busy, '.' where it stands still."""
    spans = [s for s in timeline.spans if s.lane is lane]
    scale = WIDTH / max(s.stop_us for s in timeline.spans)
    bar = ["."] * WIDTH
    for span in spans:
        for column in range(int(span.start_us * scale), min(WIDTH, int(span.stop_us * scale) + 1)):
            bar[column] = "#"
    busy = timeline.busy_us(lane)
    return f"  {lane.value:<6} |{''.join(bar)}| {busy / 1e3:.2f} ms busy"
