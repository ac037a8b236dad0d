"""Spans of a device's tasks, which are worked out from when these ended."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specstream.round_plan import Lane, lane_of
from specstream.simulate import simulate
from specstream.task_times import BEGIN, DRAFTING, spans_of
from tests.toy import make_plan, round_spec, seat

SPECS = {
    "streamed": round_spec(seat(), seat(1, streamed=3, offload=1), layers=4, slots=3),
    "resident": round_spec(seat(streamed=0, resident=3), layers=3),
    "first": round_spec(seat(streamed=6), layers=2, warm=False),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_they_are_those_of_the_tasks_that_ended_then(spec: object) -> None:
    """Of a simulated round, whose lanes start as early as they may: in which each task began as was worked out."""
    plan = make_plan(spec)  # type: ignore[arg-type]
    first, second = simulate([plan, plan]) if plan.spec.entry == plan.spec.exit else (simulate([plan])[0],) * 2
    in_flight = dict(zip((t.name for t in plan.tasks if t.phase == "before"), first.left.ahead, strict=False))
    start = first.period_us if first is not second else 0.0
    ends = {BEGIN: 0.0, **{span.task: span.stop_us for span in second.spans}}
    ends |= {name: first.left.ends[ahead] - start for name, ahead in in_flight.items()}
    if drafts := [span for span in second.spans if span.lane is Lane.DRAFT]:
        ends[DRAFTING] = drafts[0].start_us
    spans = {span.task: (span.start, span.stop) for span in spans_of(plan, ends)}
    late = {span.task: span for span in second.spans if span.start_us >= 0}
    assert len(late) > 10
    for name, span in late.items():
        if lane_of(plan.by_name[name]) is not Lane.LINK or not span.earlier:
            assert spans[name] == pytest.approx((span.start_us, span.stop_us)), name


def test_what_did_not_end_has_no_span_and_lanes_stay_in_order() -> None:
    plan = make_plan(SPECS["streamed"])
    ends = {BEGIN: 5.0, "piece/0": 7.0, "append/0": 8.0, "local/0": 9.0}
    spans = spans_of(plan, ends)
    assert [(span.task, span.start, span.stop) for span in spans] == [
        ("piece/0", 5.0, 7.0),
        ("append/0", 7.0, 8.0),
        ("local/0", 8.0, 9.0),
    ]
