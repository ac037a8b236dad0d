"""Simulated rounds: the same times as from a scheduler that goes event by event, and what a steady round is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.errors import InvalidPlan
from specstream.round_plan import Lane, Plan, StepOp
from specstream.simulate import run_round, simulate
from specstream.steady import MOST_ROUNDS, steady_round
from specstream.timeline import Timeline
from tests.simulation_cases import Times, event_by_event, random_plans, streaming_plans
from tests.toy import make_plan, round_spec, seat

GAPS = st.integers(0, 5)


def absolute(timelines: Sequence[Timeline]) -> Times:
    """The same times from the start of the first round."""
    start, times = 0.0, []
    for timeline in timelines:
        times.append({s.task: (start + s.start_us, start + s.stop_us) for s in timeline.spans})
        start += timeline.period_us
    return times


def scaled(plan: Plan, factor: int) -> Plan:
    return replace(plan, tasks=tuple(task._replace(cost_us=factor * task.cost_us) for task in plan.tasks))


def with_costs(plan: Plan, costs: dict[str, float]) -> Plan:
    """Costs by the kind of task."""
    return replace(plan, tasks=tuple(task._replace(cost_us=costs[task.kind.value]) for task in plan.tasks))


@given(st.integers(0, 3).flatmap(lambda n: st.lists(random_plans(n), min_size=1, max_size=4)), GAPS)
def test_random_rounds_run_as_event_by_event(plans: list[Plan], gap: int) -> None:
    assert absolute(simulate(plans, gap)) == event_by_event(plans, gap)


@given(streaming_plans(), GAPS)
def test_streaming_rounds_run_as_event_by_event(plan: Plan, gap: int) -> None:
    in_flight = len([task for task in plan.tasks if task.phase == "before"])
    rounds = [plan] * (3 if in_flight <= len(simulate([plan])[0].left.ahead) else 1)
    assert absolute(simulate(rounds, gap)) == event_by_event(rounds, gap)


def test_a_wait_that_is_ignored_shows() -> None:
    plan = with_costs(make_plan(round_spec(seat())), dict.fromkeys(COSTS, 1.0) | {"fetch": 9.0})
    steps = tuple(step for step in plan.steps if step.op is not StepOp.WAIT or step.name != "fetch/1/0")
    assert absolute(simulate([replace(plan, steps=steps)])) != event_by_event([plan])


@given(random_plans(), st.data())
def test_without_a_wait_nothing_starts_later(plan: Plan, data: st.DataObject) -> None:
    waits = [i for i, step in enumerate(plan.steps) if step.op is StepOp.WAIT]
    if not waits:
        return
    dropped = data.draw(st.sampled_from(waits))
    freer = replace(plan, steps=plan.steps[:dropped] + plan.steps[dropped + 1 :])
    for now, then in zip(absolute(simulate([freer] * 3)), absolute(simulate([plan] * 3)), strict=True):
        assert all(now[name][0] <= then[name][0] for name in then)
    assert steady_round(freer).period_us <= steady_round(plan).period_us + 1e-6


@given(random_plans(), GAPS, st.integers(2, 5))
def test_all_times_scale_with_the_costs(plan: Plan, gap: int, factor: int) -> None:
    once, more = steady_round(plan, gap), steady_round(scaled(plan, factor), factor * gap)
    assert more.period_us == pytest.approx(factor * once.period_us)
    for span, longer in zip(simulate([plan])[0].spans, simulate([scaled(plan, factor)])[0].spans, strict=True):
        assert longer[2:5] == tuple(factor * us for us in span[2:5])


@given(st.one_of(random_plans(), streaming_plans()), GAPS)
def test_the_period_is_what_a_round_takes_in_the_long_run(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    if timeline.repeats:
        periods = [one.period_us for one in simulate([plan] * 240, gap)]
        assert sum(periods[-60:]) / 60 == pytest.approx(timeline.period_us)
    else:
        assert timeline == simulate([plan], gap)[0]


@given(st.one_of(random_plans(), streaming_plans()), GAPS)
def test_a_steady_round_leads_to_itself(plan: Plan, gap: int) -> None:
    timeline = steady_round(plan, gap)
    left = len(timeline.left.ahead)
    assert timeline.repeats == (left == len([task for task in plan.tasks if task.phase == "before"]))
    if timeline.repeats:
        for span, again in zip(timeline.spans, run_round(plan, timeline.left, gap).spans, strict=True):
            assert again[:2] == span[:2]
            assert again[2:4] == pytest.approx(span[2:4], abs=1e-6)


COSTS = {
    "fetch": 10.0,
    "attend": 3.0,
    "piece": 1.0,
    "append": 1.0,
    "local": 1.0,
    "merge": 1.0,
    "accept": 1.0,
    "draft": 2.0,
}


def test_a_hand_made_schedule() -> None:
    plan = with_costs(make_plan(round_spec(seat(streamed=4), layers=1, slots=1, warm=False, drafts=0)), COSTS)
    [timeline] = simulate([plan])
    spans = {s.task: (s.start_us, s.stop_us) for s in timeline.spans}
    expected = {
        "fetch/0/0": (0.0, 10.0),
        "attend/0/0": (10.0, 13.0),
        "fetch/0/1": (13.0, 23.0),  # one slot: it waits for the first attend
        "attend/0/1": (23.0, 26.0),
        "ahead/0/0": (26.0, 36.0),
        "accept": (28.0, 29.0),
    }
    assert {name: spans[name] for name in expected} == expected
    assert timeline.period_us == 29


def test_fetches_in_flight_arrive_when_they_really_end() -> None:
    """One slot: the fetch ahead starts at the last attend, and has run for 3 us when the next round starts."""
    plan = with_costs(make_plan(round_spec(seat(streamed=4), layers=1, slots=1, drafts=0)), COSTS)
    first, second, third = simulate([plan] * 3)
    assert first.by_task["attend/0/0"].start_us == 3, "after the local part"
    assert second.by_task["attend/0/0"].start_us == third.by_task["attend/0/0"].start_us == 7
    assert [first.period_us, second.period_us, steady_round(plan).period_us] == [22, 26, 26]
    assert steady_round(plan, host_gap_us=2).period_us == 26, "the fetch goes on while the host is busy"
    assert steady_round(plan, host_gap_us=20).period_us == 42


def test_a_link_that_is_a_little_slower_than_the_target_gives_the_period_at_once() -> None:
    """Round by round it would take hundreds: the lead that the link starts with melts by 0.1 us in each."""
    costs = dict.fromkeys(COSTS, 1.0) | {"fetch": 10.0, "attend": 9.0}
    plan = make_plan(round_spec(seat(streamed=16), layers=4, slots=8, drafts=0, group=1))
    target = simulate([with_costs(plan, costs)])[0].busy_us(Lane.TARGET)
    costs["fetch"] = (target + 0.1) / (4 * 16)
    plan = with_costs(plan, costs)
    assert steady_round(plan).period_us == pytest.approx(target + 0.1)
    assert simulate([plan] * 2 * MOST_ROUNDS)[-1].period_us == pytest.approx(target)


def test_a_round_that_leaves_other_fetches_than_it_found_is_simulated_alone() -> None:
    cold = make_plan(round_spec(seat(), warm=False))
    assert not steady_round(cold).repeats
    assert steady_round(cold) == simulate([cold])[0]


def test_rounds_of_different_plans() -> None:
    cold, warm = (with_costs(make_plan(round_spec(seat(), warm=warm)), COSTS) for warm in (False, True))
    first, second, third = simulate([cold, warm, warm])
    assert first.period_us > second.period_us == third.period_us == steady_round(warm).period_us
    nothing_ahead = make_plan(round_spec(seat(resident=9, streamed=0)))
    with pytest.raises(InvalidPlan, match="counts on 2 fetches in flight; the round before leaves 0"):
        simulate([nothing_ahead, warm])
