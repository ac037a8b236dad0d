"""A plan as it is kept of a run: its tasks, when they are predicted to run, and what the target waits for."""

from __future__ import annotations

from specstream.bubbles import bubbles
from specstream.exposure import exposure
from specstream.round_graph import Task
from specstream.round_plan import Lane, Plan
from specstream.timeline import Span
from specstream.traces.records import PlannedBubble, PlannedRound, PlannedTask
from specstream.why_exposed import why_exposed


def planned_round(plan: Plan, id: int, link_bytes_per_us: float) -> PlannedRound:
    """What is predicted of a round of this plan among its like.

    Args:
        id: what rounds name it by.
        link_bytes_per_us: what the link brings to the device.
    """
    drafts = exposure(plan, Lane.DRAFT)
    timeline, reason = drafts.timeline, why_exposed(plan, drafts)
    return PlannedRound(
        id=id,
        text=str(plan),
        period_us=timeline.period_us,
        link_floor_us=plan.spec.streamed_bytes / link_bytes_per_us,
        streamed_bytes=plan.spec.streamed_bytes,
        busy_us={lane.value: timeline.busy_us(lane) for lane in Lane},
        exposed_draft_us=drafts.exposed_us,
        hidden_draft_us=drafts.hidden_us,
        why_exposed=reason.value if reason else None,
        seats=tuple(
            {
                "seat": seat.seat,
                "resident": min(seat.resident, seat.open),
                "streamed": seat.streamed,
                "offload": seat.offload,
            }
            for seat in plan.spec.seats
        ),
        tasks=tuple(_planned_task(plan.by_name[span.task], span) for span in timeline.spans),
        bubbles=tuple(PlannedBubble(each.start_us, each.duration_us, str(each)) for each in bubbles(timeline)),
    )


def _planned_task(task: Task, span: Span) -> PlannedTask:
    return PlannedTask(
        name=task.name,
        lane=span.lane.value,
        kind=task.kind.value,
        start_us=span.start_us,
        stop_us=span.stop_us,
        idle_us=span.idle_us,
        why=span.why.value,
        cause=span.cause,
        earlier=span.earlier,
        layer=task.layer,
        group=task.group,
        slot=task.slot,
        step=task.step,
        bytes=task.link_bytes,
        memory_bytes=task.memory_bytes,
    )
