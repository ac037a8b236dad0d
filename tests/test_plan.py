"""`Plan.check`: right plans pass, and each way of breaking one is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.errors import InvalidPlan
from specstream.round_graph import Task, TaskKind
from specstream.round_plan import Lane, Plan, Step, StepOp
from specstream.round_spec import SeatSpec
from tests.toy import make_plan, round_spec, seat

STEADY = round_spec(seat(streamed=4))
"""Two layers of two groups through two slots: nothing joins, nothing is written out."""
WRITING = round_spec(seat(streamed=3, offload=1))
"""The last chunk of the next round's first fetches is written out in this one."""


def without(plan: Plan, drop: Callable[[Step], bool]) -> Plan:
    return replace(plan, steps=tuple(step for step in plan.steps if not drop(step)))


def without_waits(lane: Lane, event: str) -> Callable[[Plan], Plan]:
    """Breaks a plan by dropping the lane's waits for events that start so."""

    def broken(plan: Plan) -> Plan:
        result = without(plan, lambda s: s.op is StepOp.WAIT and s.lane is lane and s.name.startswith(event))
        assert result != plan, "the plan had no such wait"
        return result

    return broken


def moved(plan: Plan, name: str, before: str) -> Plan:
    """Launches a task, with the waits in front of it, before another."""
    at = next(i for i, s in enumerate(plan.steps) if s.op is StepOp.LAUNCH and s.name == name)
    first = at
    while plan.steps[first - 1].op is StepOp.WAIT and plan.steps[first - 1].lane is plan.steps[at].lane:
        first -= 1
    block, rest = plan.steps[first : at + 1], plan.steps[:first] + plan.steps[at + 1 :]
    to = next(i for i, s in enumerate(rest) if s.op is StepOp.LAUNCH and s.name == before)
    return replace(plan, steps=rest[:to] + block + rest[to:])


def with_task(plan: Plan, name: str, **changes: object) -> Plan:
    tasks = tuple(t._replace(**changes) if t.name == name else t for t in plan.tasks)  # type: ignore[arg-type]
    return replace(plan, tasks=tasks)


def test_a_steady_round_repeats_itself() -> None:
    plan = make_plan(STEADY)
    assert plan.spec.entry == plan.spec.exit
    plan.check()
    plan.check(plan)


def test_a_round_that_writes_out_leads_to_a_longer_one() -> None:
    make_plan(WRITING).check(make_plan(round_spec(seat(streamed=4))))


def prompt_seat() -> SeatSpec:
    """A part of a prompt: two chunks computed and written out in the same round."""
    return SeatSpec(0, 0, 3, streamed=0, offload=2, open=0, span=2)


PROMPT = round_spec(prompt_seat(), warm=False, drafts=0)
AFTER_PROMPT = round_spec(SeatSpec(0, 0, 3, streamed=2, offload=2, open=2, span=2), drafts=0)
REUSING = round_spec(SeatSpec(0, 0, 3, streamed=2, offload=1, open=2, span=2))
"""A part of a prompt whose second chunk takes the device slot of the first one, long written out."""

BUFFERED = round_spec(
    SeatSpec(0, 1, 3, streamed=2, offload=4, open=3, span=5, buffer_start=0),
    SeatSpec(1, 2, 3, streamed=0, offload=1, open=1, span=2, buffer_start=5),
    layers=3,
    drafts=0,
)
"""Parts of two prompts in the prompt buffer; the third layer takes the slot of the first."""

BROKEN: dict[str, tuple[Plan, Callable[[Plan], Plan], Plan | None, str]] = {
    "slot refilled while it is read": (
        make_plan(STEADY),
        without_waits(Lane.LINK, "attend/0/0"),
        None,
        r"fetch/1/0 writes slot 0\[0:1\] while it may still be read by round 0: attend/0/0",
    ),
    "slot refilled while it is read, across rounds": (
        make_plan(STEADY),
        without_waits(Lane.LINK, "attend/1/1"),
        None,
        r"ahead/0/1 writes slot 1\[0:1\] while it may still be read by round 0: attend/1/1",
    ),
    "slot read before it is filled": (
        make_plan(STEADY),
        without_waits(Lane.TARGET, "fetch/1/0"),
        None,
        r"attend/1/0 reads slot 0\[0:1\] while it may still be written by round 0: fetch/1/0",
    ),
    "slot read before it is filled, across rounds": (
        make_plan(STEADY),
        without_waits(Lane.TARGET, "fetch/0/0"),
        None,
        r"attend/0/0 reads slot 0\[0:1\] while it may still be written by round 0: fetch/0/0",
    ),
    "slot filled with something else": (
        make_plan(STEADY),
        lambda plan: with_task(plan, "fetch/1/1", slot=0, leaves=plan.by_name["fetch/1/0"].leaves),
        None,
        r"attend/1/1 expects layer 1 seat 0 chunks 2:4 in slot 1\[0:1\] but finds layer 0 seat 0 chunks 2:4",
    ),
    "tail reused before its copy to the host": (
        make_plan(PROMPT),
        lambda plan: without(plan, lambda s: s.op is StepOp.SYNC and s.lane is Lane.STORE),
        make_plan(round_spec(SeatSpec(0, 0, 3, streamed=2, offload=2, open=2, span=2), warm=False, drafts=0)),
        r"round 1: append/0 writes device/0/0\[0:1\] while it may still be read by round 0: offload/0/0",
    ),
    "tail reused before its last reader": (
        make_plan(REUSING),
        lambda plan: replace(
            plan,
            tasks=(*plan.tasks, late_append(plan)),
            steps=(*plan.steps[:1], Step(StepOp.LAUNCH, Lane.STORE, "late"), *plan.steps[1:]),
        ),
        None,
        r"append/0 writes device/0/0\[2:3\] while it may still be written by round 0: late",
    ),
    "written out before it is computed": (
        make_plan(PROMPT),
        without_waits(Lane.STORE, "append/0"),
        None,
        r"offload/0/0 reads device/0/0\[0:1\] while it may still be written by round 0: append/0",
    ),
    "written out before it is computed, by launch order": (
        make_plan(PROMPT),
        lambda plan: moved(without_waits(Lane.STORE, "append/0")(plan), "offload/0/0", "piece/0"),
        None,
        r"offload/0/0 expects chunk 1 in device/0/0\[1:2\] but finds nothing",
    ),
    "first fetch before the chunk is on the host, across rounds": (
        make_plan(round_spec(seat(streamed=1, offload=1))),
        without_waits(Lane.LINK, "offload/0/0"),
        None,
        r"ahead/0/0 reads host/0/0\[0:2\] while it may still be written by round 0: offload/0/0",
    ),
    "first fetch of a chunk that was never written out": (
        make_plan(STEADY),
        lambda plan: plan,
        make_plan(round_spec(seat(streamed=5))),
        r"round 1: fetch/0/2 expects the chunk of that number in host/0/0\[4:5\] but finds nothing",
    ),
    "prompt buffer refilled before it is written out": (
        make_plan(BUFFERED),
        without_waits(Lane.TARGET, "offload/0"),
        None,
        r"append/2 writes prompt/0\[0:4\] while it may still be read by round 0: offload/0/0",
    ),
    "prompt buffer refilled before it is written out, across rounds": (
        make_plan(BUFFERED),
        lambda plan: without(plan, lambda s: s.op is StepOp.SYNC and s.lane is Lane.STORE),
        make_plan(replace(BUFFERED, in_flight=0)),
        r"round 1: append/0 writes prompt/0\[0:4\] while it may still be read by round 0: offload/2/0",
    ),
    "prompt buffer written out before it is filled": (
        make_plan(BUFFERED),
        without_waits(Lane.STORE, "append/1"),
        None,
        r"offload/1/0 reads prompt/1\[0:4\] while it may still be written by round 0: append/1",
    ),
    "prompt buffer read when another layer has it": (
        make_plan(BUFFERED),
        lambda plan: with_task(plan, "local/2", expects=plan.by_name["local/0"].expects),
        None,
        r"local/2 expects layer 0 seat 0 chunks 3:7 in prompt/0\[0:4\] but finds layer 2 seat 0 chunks 3:7",
    ),
    "part of a prompt that is not written out": (
        make_plan(BUFFERED),
        lambda plan: without_task(plan, "offload/1/1"),
        make_plan(round_spec(SeatSpec(0, 1, 3, 6, 0, 7, 1), SeatSpec(1, 2, 3, 1, 0, 3, 1), layers=3)),
        r"round 1: fetch/1/3 expects the chunk of that number in host/1/1\[2:3\] but finds nothing",
    ),
    "deadlock": (
        make_plan(STEADY),
        lambda plan: moved(plan, "attend/1/0", "fetch/1/0"),
        None,
        r"deadlock: target waits for round 0: fetch/1/0, which is recorded only later",
    ),
    "missing bytes": (
        make_plan(STEADY),
        lambda plan: without_task(plan, "fetch/1/1"),
        None,
        r"round 0 fetches 600 bytes; the streamed history has 800",
    ),
    "a group that nobody attends to": (
        make_plan(STEADY),
        lambda plan: without_task(plan, "attend/1/1"),
        None,
        "round 0 does not attend to every streamed chunk exactly once in each layer",
    ),
    "target waits for a draft of its round": (
        make_plan(STEADY),
        lambda plan: with_wait_for_draft(moved(without_waits(Lane.DRAFT, "accept")(plan), "draft/0", "merge/1")),
        None,
        r"merge/1 waits for a draft task of its own round",
    ),
    "a task launched twice": (
        make_plan(STEADY),
        lambda plan: replace(plan, steps=(*plan.steps, Step(StepOp.LAUNCH, Lane.TARGET, "merge/1"))),
        None,
        "tasks are not launched exactly once: merge/1",
    ),
    "a task on the wrong lane": (
        make_plan(STEADY),
        lambda plan: replace(
            plan, steps=tuple(s._replace(lane=Lane.DRAFT) if s.name == "merge/1" else s for s in plan.steps)
        ),
        None,
        "merge/1 is launched on the draft lane, not its own",
    ),
    "fetches that the round before did not issue": (
        make_plan(STEADY),
        lambda plan: plan,
        make_plan(round_spec(seat(streamed=4), group=1)),
        "round 1 counts on fetches that the round before did not issue",
    ),
    "fetches ahead whose end is not recorded": (
        make_plan(STEADY),
        lambda plan: without(plan, lambda s: s.op is StepOp.RECORD and s.name == "ahead/0/1"),
        None,
        "counts on ahead/0/1, whose end the round before did not record",
    ),
}


def late_append(plan: Plan) -> Task:
    """Something on another lane that still uses what the round appends to."""
    append = plan.by_name["append/0"]
    return Task("late", TaskKind.OFFLOAD, writes=append.writes[:1])


def without_task(plan: Plan, name: str) -> Plan:
    tasks = tuple(t for t in plan.tasks if t.name != name)
    return without(replace(plan, tasks=tasks), lambda s: s.name == name)


def with_wait_for_draft(plan: Plan) -> Plan:
    """Holds a merge for the first draft step, launched just before it."""
    at = next(i for i, s in enumerate(plan.steps) if s.op is StepOp.LAUNCH and s.name == "merge/1")
    extra = (Step(StepOp.RECORD, Lane.DRAFT, "draft/0"), Step(StepOp.WAIT, Lane.TARGET, "draft/0"))
    return replace(plan, steps=(*plan.steps[:at], *extra, *plan.steps[at:]))


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_plans_are_refused(fault: str) -> None:
    plan, breaking, following, reason = BROKEN[fault]
    broken = breaking(plan)
    with pytest.raises(InvalidPlan, match=reason):
        broken.check(following)


@pytest.mark.parametrize("fault", BROKEN)
def test_the_same_plans_unbroken_are_accepted(fault: str) -> None:
    plan, _, following, _ = BROKEN[fault]
    plan.check()
    if following is not None:
        following.check()


@st.composite
def specs(draw: st.DrawFn) -> tuple[SeatSpec, ...]:
    seats = []
    for number in range(draw(st.integers(1, 3))):
        tail = draw(st.sampled_from([3, 5]))
        resident, streamed = draw(st.integers(0, 3)), draw(st.integers(0, 9))
        if draw(st.booleans()):
            offload, rest = draw(st.integers(1, 9)), draw(st.integers(0, 1))
            seats.append(
                SeatSpec(number, resident, tail, streamed, offload, resident + streamed, offload + rest, 20 * number)
            )
            continue
        offload = draw(st.integers(0, tail - 2)) if streamed or draw(st.booleans()) else 0
        behind = draw(st.sampled_from([0, offload]))  # full chunks before the open one
        span = min(offload + 1, tail - behind)
        seats.append(SeatSpec(number, resident, tail, streamed, offload, resident + streamed + behind, span))
    return tuple(seats)


@given(specs(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_every_plan_of_every_structure_is_proven(
    seats: tuple[SeatSpec, ...], layers: int, slots: int, group: int, warm: bool, drafts: int
) -> None:
    spec = round_spec(*seats, layers=layers, slots=slots, group=group, warm=warm, drafts=drafts)
    plan = make_plan(spec)
    moved_on = tuple(
        replace(s, streamed=s.streamed + s.offload, offload=0, open=s.resident + s.streamed + s.offload, span=1)
        for s in seats
    )
    plan.check(make_plan(replace(spec, seats=moved_on).warm()))


@pytest.mark.parametrize("spec", [STEADY, WRITING, PROMPT])
def test_json_gives_the_plan_back(spec: object) -> None:
    plan = make_plan(spec)  # type: ignore[arg-type]
    assert Plan.from_json(plan.to_json()) == plan
    Plan.from_json(plan.to_json()).check()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": {}, "tasks": [], "steps": []}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="not a plan in JSON"):
        Plan.from_json(text)


def test_printing_names_lanes_bytes_and_bubbles() -> None:
    text = str(make_plan(STEADY))
    for words in ("2 layers", "streams 800 B in 2 group(s) a layer", "2 slot(s)", "target |", "link   |", "bubble"):
        assert words in text
