"""Rounds that differ only in how many chunks their groups hold run one plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.batch import RoundBatch
from specstream.planner import Planner
from specstream.profiles import CPU_PROFILE
from specstream.round_plan import Plan
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from tests.helpers import new_engine, prompt
from tests.toy import make_plan, round_spec, seat, toy_model


@st.composite
def seats(draw: st.DrawFn, number: int) -> SeatSpec:
    resident, tail = draw(st.integers(0, 4)), draw(st.integers(3, 5))
    behind = draw(st.integers(0, tail - 1))
    span = draw(st.integers(1, tail - behind))
    if resident == 4:  # all that it has is on the device
        return SeatSpec(number, resident, tail, 0, 0, draw(st.integers(0, 4)), span)
    streamed, offload = draw(st.integers(0, 9)), draw(st.integers(0, behind + span))
    if draw(st.booleans()):  # a part of a prompt, in the prompt buffer
        offload, begun = draw(st.integers(1, 9)), 0 if streamed else draw(st.integers(0, resident))
        span = begun + offload + draw(st.integers(0, 1))
        return SeatSpec(number, resident, tail, streamed, offload, resident + streamed - begun, span, 20 * number)
    return SeatSpec(number, resident, tail, streamed, offload, resident + streamed + behind, span)


@st.composite
def specs(draw: st.DrawFn) -> RoundSpec:
    numbers = draw(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True))
    chosen = [draw(seats(number)) for number in numbers]
    spec = round_spec(*chosen, slots=draw(st.integers(1, 4)), group=draw(st.integers(1, 3)), warm=draw(st.booleans()))
    return spec


def bound(spec: RoundSpec) -> Plan:
    return Planner(toy_model(spec.num_layers), CPU_PROFILE).bound(spec)


@settings(max_examples=300)
@given(specs(), st.data())
def test_a_round_may_run_the_plan_of_its_canonical_form(spec: RoundSpec, data: st.DataObject) -> None:
    """The proof of `Plan.check` holds of the shared steps on the round's own chunks, and on into the next round."""
    now = bound(spec)
    assert now.spec == spec
    exact = make_plan(spec)
    assert [task.name for task in now.tasks] == [task.name for task in exact.tasks]
    for task in exact.tasks:
        if task.run is not None:
            assert spec.run_of(task) == task.run
    now.check()
    following = []
    for one in spec.seats:
        full = 0 if one.resident == 4 else one.open + one.span - one.offloaded.stop
        more = data.draw(st.integers(0, min(1, max(0, full))))
        begins = max(one.open, one.offloaded.stop + more) if one.resident < 4 else one.open
        following.append(replace(one, streamed=one.streamed + one.offload, offload=more, open=begins, span=1))
    now.check(bound(replace(spec, seats=tuple(following)).warm()))
    assert len(spec.canonical().next_groups) == len(spec.next_groups)
    assert spec.canonical().canonical() == spec.canonical()


@settings(max_examples=300)
@given(specs())
def test_a_round_with_all_that_it_may_write_out_has_the_tasks_of_its_plan(spec: RoundSpec) -> None:
    for own in (spec, replace(spec, next_runs=tuple(one.next_on_host for one in spec.seats[::-1]))):
        whole = own.with_offloads()
        assert (whole.canonical(), whole.seating) == (own.canonical(), own.seating)
        shared = {task.name for task in make_plan(own.canonical()).tasks}
        assert {task.name for task in make_plan(whole).tasks} == shared
        assert abs(whole.streamed_bytes - own.streamed_bytes) <= len(own.seats) * own.num_layers * own.bytes_per_chunk
        assert whole.with_offloads() == whole


def test_committed_chunks_change_the_canonical_form_only_when_a_group_is_added() -> None:
    """A request that fills and writes out one chunk after the other, eight to a group: a form a group, and one more."""
    forms = [
        round_spec(seat(streamed=count, offload=offload), group=8).canonical()
        for count in range(1, 33)
        for offload in (0, 1)
    ]
    assert len(set(forms)) == 4 + 4
    assert len(set(forms[:14])) == 1


def test_who_sits_where_changes_no_plan() -> None:
    """Those whose history is fetched ahead neither."""
    ahead = (ChunkRun(3, 0, 4), ChunkRun(1, 0, 9))
    spec = replace(round_spec(seat(1, streamed=9), seat(2, streamed=3), group=4), next_runs=ahead)
    renumbered = {1: 5, 2: 0, 3: 7}
    seats = tuple(replace(one, seat=renumbered[one.seat]) for one in spec.seats)
    runs = tuple(replace(run, seat=renumbered[run.seat]) for run in ahead)
    assert replace(spec, seats=seats, next_runs=runs).canonical() == spec.canonical()
    turned = replace(spec, seats=spec.seats[::-1])
    assert turned.canonical() != spec.canonical()  # who has more groups comes later


def test_groups_that_differ_are_not_merged() -> None:
    spec = round_spec(seat(streamed=4, offload=1), group=4)
    assert spec.canonical() != replace(spec, seats=(seat(streamed=3, offload=1),)).canonical()
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
