"""Why draft steps are not hidden behind the link: there is no bubble to draft in, or the ring is too short for one."""

from __future__ import annotations

from enum import Enum

from specstream.exposure import Exposure
from specstream.round_plan import Lane, Plan

WORTH_SAYING = 0.01
"""Part of a round that drafting has to cost."""


class WhyNoBubble(Enum):
    """What keeps the draft from running while the link is what everything waits for."""

    NOTHING_STREAMS = "nothing streams, so that no time is left over in which to draft"
    TARGET_IS_SLOWER = "the target takes longer than the link, so that it leaves no time in which to draft"
    RING_IS_SHORT = (
        "the ring is full before the draft is done: more staging_slots, a larger gpu_kv_budget, fewer "
        'num_speculative_tokens, or drafting="cohorts" (for two or more requests) or "lookahead" would hide it'
    )


def why_exposed(plan: Plan, drafts: Exposure) -> WhyNoBubble | None:
    """The reason, if `drafts`, the exposure of the plan's draft steps, is worth saying; by prediction."""
    timeline = drafts.timeline
    if drafts.exposed_us <= WORTH_SAYING * timeline.period_us:
        return None
    if not plan.spec.groups:
        return WhyNoBubble.NOTHING_STREAMS
    if timeline.busy_us(Lane.TARGET) >= timeline.busy_us(Lane.LINK):
        return WhyNoBubble.TARGET_IS_SLOWER
    return WhyNoBubble.RING_IS_SHORT
