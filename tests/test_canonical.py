"""Rounds that differ only in how many chunks their groups hold run one plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.batch import RoundBatch
from specstream.plan import Plan
from specstream.round_spec import RoundSpec, SeatSpec
from tests.helpers import new_engine, prompt
from tests.toy import make_plan, round_spec, seat


@st.composite
def seats(draw: st.DrawFn, number: int) -> SeatSpec:
    resident, tail = draw(st.integers(0, 4)), draw(st.integers(3, 5))
    behind = draw(st.integers(0, tail - 1))
    span = draw(st.integers(1, tail - behind))
    if resident == 4:  # all that it has is on the device
        return SeatSpec(number, resident, tail, 0, 0, draw(st.integers(0, 4)), span)
    streamed, offload = draw(st.integers(0, 9)), draw(st.integers(0, behind + span))
    return SeatSpec(number, resident, tail, streamed, offload, resident + streamed + behind, span)


@st.composite
def specs(draw: st.DrawFn) -> RoundSpec:
    count = draw(st.integers(1, 2))
    chosen = [draw(seats(number)) for number in range(count)]
    spec = round_spec(*chosen, slots=draw(st.integers(1, 4)), group=draw(st.integers(1, 3)), warm=draw(st.booleans()))
    return spec


@settings(max_examples=400)
@given(specs())
def test_a_round_runs_the_plan_of_its_canonical_form(spec: RoundSpec) -> None:
    exact, shared = make_plan(spec), make_plan(spec.canonical())
    assert shared.steps == exact.steps
    assert len(spec.canonical().next_groups) == len(spec.next_groups)
    for task, other in zip(exact.tasks, shared.tasks, strict=True):
        assert (task.name, task.kind, task.slot, task.phase) == (other.name, other.kind, other.slot, other.phase)
        if task.run is not None:
            assert spec.run_of(other) == task.run
    assert spec.canonical().canonical() == spec.canonical()


def test_committed_chunks_change_the_canonical_form_only_when_a_group_is_added() -> None:
    forms = [round_spec(seat(streamed=count), group=4).canonical() for count in range(1, 13)]
    assert len(set(forms)) == 3
    assert forms[0] == forms[3] != forms[4]


def test_groups_that_differ_are_not_merged() -> None:
    spec = round_spec(seat(streamed=4, offload=1), group=4)
    assert spec.canonical() != replace(spec, seats=(seat(streamed=4),)).canonical()
    assert len(spec.canonical().next_groups) == 2


def test_an_engine_makes_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = set()
    with new_engine(gpu_kv_budget="64KiB", group_chunks=16, debug=False, max_model_len=320) as engine:
        run = engine._executor.run

        def watched(plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
            ran.add(spec)
            run(plan, spec, batch)

        monkeypatch.setattr(engine._executor, "run", watched)
        engine.generate([list(prompt(90))], max_new_tokens=200)
        assert engine._planner.num_planned < len(ran) / 3
