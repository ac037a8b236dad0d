"""Why draft steps are exposed, and that a plan says so."""

from __future__ import annotations

from dataclasses import replace

from specstream.exposure import exposure
from specstream.planner import Planner
from specstream.profiles import H200
from specstream.round_plan import Lane, Plan
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.round_work import DraftWork
from specstream.why_exposed import WhyNoBubble, why_exposed
from tests.test_profiles import KV_BYTES, LAYERS, QWEN3_06B, qwen3_8b

STREAMED = RoundSpec(LAYERS, 4, 32, 256 * KV_BYTES, (SeatSpec(0, 0, 3, 31, 0, 31, 2),), 0, 4)
"""One request of 8K."""


def planned(spec: RoundSpec, draft: DraftWork = QWEN3_06B) -> Plan:
    return Planner(qwen3_8b(), H200, draft, 5).bound(spec.warm())


def why(plan: Plan) -> WhyNoBubble | None:
    return why_exposed(plan, exposure(plan, Lane.DRAFT))


def test_where_nothing_streams_there_is_no_bubble() -> None:
    resident = replace(STREAMED, seats=(SeatSpec(0, 32, 1, 0, 0, 31, 1),))
    assert why(planned(resident)) is WhyNoBubble.NOTHING_STREAMS
    assert why(planned(replace(resident, draft_steps=0))) is None


def test_where_the_target_is_slower_than_the_link_there_is_none_either() -> None:
    short = replace(STREAMED, seats=(SeatSpec(0, 29, 3, 1, 0, 31, 1),))
    assert why(planned(short)) is WhyNoBubble.TARGET_IS_SLOWER


def test_a_ring_may_be_too_short_for_the_draft() -> None:
    plan = planned(STREAMED)
    assert why(plan) is WhyNoBubble.RING_IS_SHORT
    assert f"exposed\n  {WhyNoBubble.RING_IS_SHORT.value}\n" in str(plan)
    longer = planned(replace(STREAMED, staging_slots=12))
    assert why(longer) is None
    assert "the ring is full" not in str(longer)


def test_a_plan_of_a_cohort_names_those_that_are_drafted_for() -> None:
    others = (ChunkRun(1, 0, 31), ChunkRun(2, 0, 31))
    plan = planned(replace(STREAMED, drafts_beside=True, next_runs=others))
    assert "\n  drafted for meanwhile: seats 1, 2\n" in str(plan)
    assert why(plan) is None
    assert "drafted for meanwhile" not in str(planned(STREAMED))
