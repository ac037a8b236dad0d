"""What a simulated round says of its plan: bubbles and their causes, the critical path, what drafts cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.bubbles import BusyRun, bubbles
from specstream.critical_path import critical_path
from specstream.exposure import exposure, without_cost
from specstream.round_graph import TaskKind
from specstream.round_plan import Lane, Plan
from specstream.simulate import simulate
from specstream.steady import steady_round
from specstream.timeline import Why
from tests.simulation_cases import random_plans, streaming_plans
from tests.toy import make_plan, round_spec, seat

PLANS = st.one_of(random_plans(), streaming_plans())
GAPS = st.integers(0, 5)
QUICK = dict.fromkeys(TaskKind, 1.0)


def priced(plan: Plan, **costs: float) -> Plan:
    """Every task takes 1 us, but for those of the kinds named."""
    by_kind = QUICK | {TaskKind(kind): cost for kind, cost in costs.items()}
    return replace(plan, tasks=tuple(task._replace(cost_us=by_kind[task.kind]) for task in plan.tasks))


@given(PLANS, GAPS)
def test_busy_time_and_bubbles_of_a_lane_add_up_to_the_period(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    for lane in {span.lane for span in timeline.spans} if timeline.repeats else ():
        waited = sum(bubble.duration_us for bubble in bubbles(timeline, lane))
        assert timeline.busy_us(lane) + waited == pytest.approx(timeline.period_us, abs=1e-6)


@given(PLANS, GAPS)
def test_a_bubble_ends_when_its_cause_does(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    for bubble in bubbles(timeline):
        assert bubble.stop_us == pytest.approx(timeline.by_task[bubble.task].start_us, abs=1e-6)
        if bubble.why is Why.WAIT and not bubble.earlier:
            assert bubble.stop_us == timeline.by_task[bubble.cause].stop_us
        for run in bubble.chain:
            assert timeline.by_task[run.first].lane is timeline.by_task[run.last].lane is run.lane is not bubble.lane


@given(PLANS, GAPS)
def test_the_critical_path_lasts_as_long_as_the_round(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    path = critical_path(timeline)
    lasts = path.rounds * timeline.period_us if timeline.repeats else timeline.left.ends[timeline.left.ended_by]
    assert path.total_us == pytest.approx(lasts, abs=1e-6)
    assert sum(path.share(lane) for lane in Lane) <= 1 + 1e-9


@given(PLANS, GAPS)
def test_what_is_not_on_the_critical_path_could_take_no_time(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    on_path = {step.task for step in critical_path(timeline).steps}
    tasks = tuple(task if task.name in on_path else task._replace(cost_us=0.0) for task in plan.tasks)
    assert steady_round(replace(plan, tasks=tasks), gap).period_us == pytest.approx(timeline.period_us, abs=1e-6)


@given(PLANS, GAPS)
def test_exposed_time_is_part_of_the_busy_time(plan: Plan, gap: int) -> None:
    for tasks in (*Lane, *TaskKind):
        figures = exposure(plan, tasks, gap)
        assert -1e-6 <= figures.hidden_us <= figures.busy_us + 1e-6
        assert figures.beside_link_us <= figures.busy_us + 1e-6


def test_a_late_fetch_is_explained_by_the_slot_that_was_not_free() -> None:
    plan = priced(make_plan(round_spec(seat(streamed=4), layers=1, slots=1, drafts=0)), fetch=10, attend=3)
    timeline = steady_round(plan)
    found = [(b.task, b.start_us, b.duration_us, b.cause, b.earlier) for b in bubbles(timeline)]
    assert found == [("attend/0/0", 3, 4, "ahead/0/0", True), ("attend/0/1", 10, 10, "fetch/0/1", False)]
    fetch = "fetch/0/1"
    assert bubbles(timeline)[1].chain == (BusyRun(Lane.LINK, fetch, fetch, Why.WAIT, "attend/0/0", earlier=False),)
    assert (
        str(bubbles(timeline)[1])
        == "10 us before attend/0/1, for fetch/0/1: link busy since fetch/0/1, which waits for attend/0/0"
    )


def test_a_late_fetch_is_explained_by_the_link_that_was_busy_before() -> None:
    plan = priced(make_plan(round_spec(seat(streamed=4), slots=3, drafts=0)), fetch=20)
    [bubble] = [b for b in bubbles(steady_round(plan)) if b.task == "attend/1/1"]
    assert bubble.cause == "fetch/1/1"
    assert [(run.last, run.why) for run in bubble.chain] == [("fetch/1/1", Why.LANE)]
    assert str(bubble).endswith("fetch/1/1: link busy since the round before")


def test_drafts_at_the_end_are_a_bubble_of_the_target() -> None:
    plan = priced(make_plan(round_spec(seat(), drafts=2)), draft=30)
    first = bubbles(steady_round(plan, host_gap_us=5))[0]
    assert (first.start_us, first.duration_us, first.task) == (-65, 65, "piece/0")
    assert (first.why, first.cause, first.earlier) == (Why.HOST, "draft/1", True)
    assert [(run.first, run.last, run.cause) for run in first.chain] == [("draft/0", "draft/1", "accept")]


def test_the_critical_path_of_a_slow_link_is_the_link() -> None:
    plan = priced(make_plan(round_spec(seat(streamed=4), slots=4, group=1, layers=3)), fetch=20)
    path = critical_path(steady_round(plan))
    assert (path.share(Lane.LINK), path.rounds, path.total_us) == (1, 1, 12 * 20)
    assert {(step.why, step.waited_us) for step in path.steps} == {(Why.LANE, 0)}


def test_the_critical_path_of_a_slow_target_goes_through_drafts_and_the_host() -> None:
    plan = priced(make_plan(round_spec(seat(), drafts=2)), piece=100, draft=20)
    timeline = steady_round(plan, host_gap_us=10)
    path = critical_path(timeline)
    assert timeline.period_us == timeline.busy_us(Lane.TARGET) + 40 + 10
    assert path.share(Lane.DRAFT) * path.total_us == pytest.approx(40)
    assert path.share(Lane.LINK) == 0
    assert [(step.task, step.waited_us) for step in path.steps if step.why is Why.HOST] == [("piece/0", 10)]


def test_the_critical_path_of_a_single_round_begins_with_it() -> None:
    plan = priced(make_plan(round_spec(seat(), warm=False)), fetch=20)
    path = critical_path(simulate([plan])[0])
    assert (path.steps[0].task, path.steps[-1].task) == ("fetch/0/0", "draft/1")
    assert path.total_us == simulate([plan])[0].period_us


def test_drafts_are_hidden_as_far_as_the_link_has_work_meanwhile() -> None:
    spec = round_spec(seat(streamed=8), slots=4, group=1, layers=3, drafts=2)
    hidden = exposure(priced(make_plan(spec), fetch=20, draft=10), TaskKind.DRAFT)
    assert (hidden.busy_us, hidden.exposed_us, hidden.hidden_share, hidden.beside_link_us) == (20, 0, 1, 20)
    partly = exposure(priced(make_plan(spec), fetch=20, draft=60), TaskKind.DRAFT)
    assert 0 < partly.hidden_us < partly.busy_us == 120
    alone = exposure(priced(make_plan(spec), attend=20, draft=60), Lane.DRAFT)
    assert (alone.busy_us, alone.exposed_us) == (120, 120)


def test_a_lane_and_a_kind_of_the_same_name_are_told_apart() -> None:
    plan = priced(make_plan(round_spec(seat(streamed=3, offload=1))))
    free = {task.name for task in without_cost(plan, TaskKind.FETCH).tasks if not task.cost_us}
    assert free == {task.name for task in plan.tasks if task.kind is TaskKind.FETCH}
    free = {task.kind for task in without_cost(plan, Lane.TARGET).tasks if not task.cost_us}
    assert free == set(TaskKind) - {TaskKind.FETCH, TaskKind.OFFLOAD, TaskKind.DRAFT}


def test_a_plan_prints_its_figures() -> None:
    steady = make_plan(round_spec(seat(streamed=8), slots=4, group=1, layers=3, drafts=2))
    lines = str(priced(steady, fetch=2000, draft=1000)).splitlines()
    assert "predicted 48.00 ms from one round to the next" in lines
    assert f"  link   |{'#' * 72}| 48.00 ms busy, 100%" in lines
    assert "critical path: link 100%" in lines
    assert "drafts: 2.00 ms hidden (100%), 0.00 ms exposed" in lines
    cause = "for draft/1 of the round before: draft busy since draft/0, which waits for accept"
    assert any(line.endswith(f"us before piece/0, {cause}") for line in lines)
    alone = str(make_plan(round_spec(seat(), warm=False, drafts=0)))
    assert "ms for this round alone" in alone
    assert "drafts:" not in alone
