"""A plan as it is kept of a run: the same figures as its timeline has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from specstream.bubbles import bubbles
from specstream.exposure import exposure
from specstream.round_plan import Lane, Plan
from specstream.steady import steady_round
from specstream.traces.planned import planned_round
from specstream.traces.records import PlannedRound
from specstream.why_exposed import WhyNoBubble
from tests.simulation_cases import streaming_plans
from tests.test_why_exposed import STREAMED, planned
from tests.trace_cases import LINK


@given(streaming_plans())
def test_it_is_what_the_timeline_says(plan: Plan) -> None:
    timeline, kept = steady_round(plan), planned_round(plan, 3, LINK)
    assert (kept.id, kept.text, kept.period_us) == (3, str(plan), timeline.period_us)
    assert [(t.name, t.start_us, t.stop_us) for t in kept.tasks] == [
        (s.task, s.start_us, s.stop_us) for s in timeline.spans
    ]
    launched = {task.name for task in plan.tasks if task.phase != "before"}
    assert {task.name for task in kept.tasks} == launched
    for task in kept.tasks:
        own = plan.by_name[task.name]
        assert (task.layer, task.group, task.slot, task.step) == (own.layer, own.group, own.slot, own.step)
        assert (task.kind, task.bytes, task.memory_bytes) == (own.kind, own.link_bytes, own.memory_bytes)
    for lane in Lane:
        busy = sum(task.stop_us - task.start_us for task in kept.tasks if task.lane == lane)
        assert kept.busy_us[lane.value] == pytest.approx(busy)
    assert [bubble.text for bubble in kept.bubbles] == [str(bubble) for bubble in bubbles(timeline)]
    drafts = exposure(plan, Lane.DRAFT)
    assert (kept.exposed_draft_us, kept.hidden_draft_us) == (drafts.exposed_us, drafts.hidden_us)
    assert kept.link_floor_us == pytest.approx(plan.spec.streamed_bytes / LINK)
    assert [each["streamed"] for each in kept.seats] == [each.streamed for each in plan.spec.seats]


def test_it_says_why_drafting_is_exposed() -> None:
    plan = planned(replace(STREAMED, seats=(replace(STREAMED.seats[0], resident=29, streamed=1),)))
    kept = planned_round(plan, 0, LINK)
    assert kept.why_exposed == WhyNoBubble.TARGET_IS_SLOWER.value
    assert PlannedRound.from_json(vars(kept) | {"tasks": [], "bubbles": []}).why_exposed == kept.why_exposed
    assert planned_round(planned(replace(STREAMED, draft_steps=0)), 0, LINK).why_exposed is None
