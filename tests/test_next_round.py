"""Between two rounds there is little to do: plans are made ahead, and who joins or leaves is not waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.batch import RoundBatch
from specstream.engine import Engine
from specstream.errors import InvalidPlan
from specstream.passes.assign_lanes import AssignLanes
from specstream.pieces import AT_ONCE
from specstream.planner import Planner
from specstream.profiles import CPU_PROFILE
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import RoundSpec, SeatSpec
from tests.helpers import Request, best, check_free, new_engine, prompt, reference, serve, step_to_end
from tests.helpers import model as tiny
from tests.toy import make_plan, round_spec, seat, toy_model

STREAMING = {"gpu_kv_budget": 6 * 1024 + 9 * 3072, "staging_slots": 3, "group_chunks": 2}
"""A ring and three tails: all of three requests streams."""


class Rounds:
    """Notes every round of an engine, and has the host work ahead in each, as it does while a device computes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, pieces: int = 1000) -> None:
        self.specs: list[RoundSpec] = []
        run = engine._executor.run

        def watched(plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
            self.specs.append(spec)
            for _ in range(pieces):
                if not batch.work_ahead():
                    break
            run(plan, spec, batch)

        monkeypatch.setattr(engine._executor, "run", watched)


# Plans made ahead


@pytest.mark.parametrize("chunk_tokens", [2, 4, 16])
def test_a_request_alone_never_waits_for_a_plan(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second round on, prompt and end included."""
    options = {"gpu_kv_budget": "min", "chunk_tokens": chunk_tokens, "group_chunks": 2, "max_num_batched_tokens": 20}
    with new_engine(**options, max_model_len=320, staging_slots=3) as engine:
        rounds = Rounds(engine, monkeypatch)
        engine.submit(prompt(90), max_new_tokens=24)
        assert step_to_end(engine)[0] == best(prompt(90))
        assert len({spec.canonical() for spec in rounds.specs}) > 3
        assert engine._planner.num_planned == engine._planner.num_ahead + 1


@pytest.mark.parametrize("options", [{}, STREAMING])
def test_nor_do_several_that_leave_one_after_the_other(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine(**options) as engine:
        rounds = Rounds(engine, monkeypatch)
        wanted = {engine.submit(prompt(21, i), max_new_tokens=6 + 8 * i): i for i in range(3)}
        for number, tokens in step_to_end(engine).items():
            assert tokens == best(prompt(21, wanted[number]), 6 + 8 * wanted[number])
        assert {len(spec.seats) for spec in rounds.specs} >= {1, 2, 3}
        assert engine._planner.num_planned == engine._planner.num_ahead + 1
        check_free(engine)


def test_working_ahead_may_stop_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for pieces in (0, 1, 2, 5, 13, 40):
        with new_engine(**STREAMING) as engine, monkeypatch.context() as patch:
            Rounds(engine, patch, pieces=pieces)
            engine.submit(prompt(40), max_new_tokens=24)
            assert step_to_end(engine)[0] == best(prompt(40))
            assert not {spec for spec in engine._planner._unproven if spec == engine._latest_spec}


def test_a_plan_goes_on_where_it_was_left() -> None:
    planner = Planner(toy_model(BOTH.num_layers), CPU_PROFILE)
    assert next(planner.pieces(BOTH), "made") is None
    runner, whole = planner.runner, len(list(Planner(toy_model(BOTH.num_layers), CPU_PROFILE).pieces(BOTH)))
    assert len(list(planner.pieces(BOTH))) == whole - 1
    assert planner.runner is runner
    assert planner.plan(BOTH).spec == BOTH
    other = round_spec(LONE, slots=4)
    assert [next(planner.pieces(spec), "made") for spec in (other, BOTH)] == [None, "made"]
    assert planner.plan(other).spec == other
    assert planner.num_planned == 2


def test_a_pass_that_fails_leaves_the_plan_to_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(toy_model(BOTH.num_layers), CPU_PROFILE)
    with monkeypatch.context() as patch:
        patch.setattr(AssignLanes, "pieces", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planner.plan(BOTH)
        assert not planner.knows(BOTH)
    assert next(planner.pieces(BOTH), "made") is None, "from its first pass on"
    assert planner.plan(BOTH).spec == BOTH
    assert planner.num_planned == 1


def test_a_proof_goes_on_where_it_was_left() -> None:
    """Nor is what remains of it forgotten."""
    planner = Planner(toy_model(BOTH.num_layers), CPU_PROFILE)
    plan = planner.plan(BOTH)
    whole = len(list(planner.proof(plan)))
    assert not list(planner.proof(plan)), "it is proven"
    planner = Planner(toy_model(BOTH.num_layers), CPU_PROFILE)
    waits = [step for step in planner.plan(BOTH).steps if step.op is StepOp.WAIT and step.lane is Lane.TARGET]
    steps = tuple(step for step in planner.plan(BOTH).steps if step is not waits[-1])
    broken = planner._plans[BOTH] = replace(planner.plan(BOTH), steps=steps)
    assert next(planner.proof(broken), "proven") is None
    with pytest.raises(InvalidPlan):
        planner.prove(broken)
    assert not planner.knows(BOTH), "it is made anew"
    plan = planner.plan(BOTH)
    assert next(planner.proof(plan), "proven") is None
    assert len(list(planner.proof(plan))) == whole - 1


def test_what_is_kept_of_a_plan_that_is_proven_is_what_executors_need() -> None:
    planner = Planner(toy_model(BOTH.num_layers), CPU_PROFILE)
    plan = planner.plan(BOTH)
    planner.prove(plan)
    kept = planner.plan(BOTH)
    assert kept.steps == plan.steps
    assert not any(task.reads or task.writes or task.expects or task.leaves for task in kept.tasks)
    bare = [task._replace(reads=(), writes=(), expects=(), leaves=()) for task in plan.tasks]
    assert list(kept.tasks) == bare
    with pytest.raises(InvalidPlan, match="does not say what it reads and writes, so nothing can be proven of it"):
        kept.check()
    assert planner.bound(BOTH).tasks == plan.tasks
    planner.bound(BOTH).check()


def test_no_piece_is_about_many_tasks() -> None:
    """So a device that is done waits no longer than for a few of a plan of a thousand."""
    many = RoundSpec(36, 12, 8, 100, tuple(seat(each, streamed=8, offload=1) for each in range(8)), 0, 4).warm()
    planner = Planner(toy_model(36), CPU_PROFILE)
    making, proving = list(planner.pieces(many.canonical())), list(planner.proof(planner.plan(many.canonical())))
    tasks = len(planner.plan(many.canonical()).tasks)
    assert tasks > 900
    assert len(making) > 3 * tasks / AT_ONCE, "listed, ordered, told what to wait for"
    assert len(proving) > 2 * tasks / AT_ONCE, "in two rounds"


def test_requests_near_their_ends_make_no_more_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other comes into a chunk that it does not live to fill."""
    budget = 3 * 8 * 4096 + 4 * 3 * 12_288  # a ring and four tails
    ring = {"gpu_kv_budget": budget, "chunk_tokens": 16, "staging_slots": 3, "group_chunks": 8}
    with new_engine(**ring, max_num_seqs=4, max_model_len=96, num_speculative_tokens=1) as engine:
        rounds = Rounds(engine, monkeypatch)
        for number in range(4):
            engine.submit(prompt(50 + 3 * number, number), max_new_tokens=24)
        planned: list[int] = []
        while len(engine._scheduler.running) == 4 or not planned:
            engine.step()
            planned.append(engine._planner.num_planned)
        assert rounds.specs[-1].groups
        assert planned[-1] == planned[5]
        assert len(planned) > 10


@st.composite
def workloads(draw: st.DrawFn) -> tuple[dict[str, object], list[Request]]:
    options: dict[str, object] = {
        "chunk_tokens": draw(st.sampled_from([1, 2, 4, 8])),
        "gpu_kv_budget": draw(st.sampled_from(["min", "64KiB", "96KiB"])),
        "staging_slots": draw(st.sampled_from([1, 2, 3])),
        "group_chunks": draw(st.sampled_from([1, 2, 3])),
        "max_num_batched_tokens": draw(st.sampled_from([7, 64])),
        "num_speculative_tokens": draw(st.sampled_from([1, 3, 5])),
    }
    if options["gpu_kv_budget"] != "min":
        del options["staging_slots"], options["group_chunks"]
    requests = [
        Request(
            prompt(draw(st.integers(1, 30)), draw(st.integers(0, 2))),
            draw(st.integers(1, 24)),
            joins=draw(st.integers(0, 12)),
            leaves=draw(st.sampled_from([None, None, 1, 4])),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return options, requests


@settings(max_examples=25)
@given(workloads())
def test_whatever_is_planned_ahead_can_be_planned(workload: tuple[dict[str, object], list[Request]]) -> None:
    """And tokens stay the target's, with requests that join and leave; with `debug` every pair of rounds is proven."""
    options, requests = workload
    with pytest.MonkeyPatch.context() as patch, new_engine(**options) as engine:
        Rounds(engine, patch)
        serve(engine, requests)
        for request in requests:
            assert request.tokens == reference(tiny("qwen3"), request.prompt, 24).tokens[: len(request.tokens)]
            assert request.leaves is not None or len(request.tokens) == request.max_new_tokens


def test_nothing_of_a_round_is_committed_before_its_plan_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may run before its proof; if that fails, nobody has moved, and the plan is made anew."""
    with new_engine(debug=False) as engine:
        engine.submit(prompt(9), max_new_tokens=12)
        (sequence,) = engine._scheduler.waiting
        proof = Plan.proof

        def fail(self: Plan, following: Plan | None = None) -> None:
            raise InvalidPlan("no")

        for _ in range(2):
            monkeypatch.setattr(Plan, "proof", fail)
            with pytest.raises(InvalidPlan, match="no"):
                engine.step()
            assert sequence.kv is not None
            assert (sequence.kv.length, sequence.tokens) == (0, list(prompt(9)))
        monkeypatch.setattr(Plan, "proof", proof)
        assert step_to_end(engine)[0] == best(prompt(9), 12)
        assert engine._planner.num_planned > 2


# Requests that join and leave


def streaming_engine(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[Engine, Rounds]:
    """Requests that have streamed for some rounds, and copies that nobody may wait for."""
    budget = 4 * 16 * 1024 + 12 * 3072  # a ring and four tails
    engine = new_engine(gpu_kv_budget=budget, staging_slots=4, group_chunks=16, max_num_seqs=4)
    rounds = Rounds(engine, monkeypatch)
    for number in range(count):
        engine.submit(prompt(30, number), max_new_tokens=24)
    while len(rounds.specs) < 3 or len(rounds.specs[-1].groups) < count:
        engine.step()

    def fail() -> None:
        raise AssertionError("copies are waited for")

    monkeypatch.setattr(engine._executor, "drain", fail)
    return engine, rounds


@pytest.mark.parametrize(("leaves", "kept"), [(0, 0), (1, 1), (2, 2)])
def test_who_leaves_is_not_waited_for(leaves: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four fetches in flight, one a seat and the next layer's first, those before the leaver's are of use."""
    engine, rounds = streaming_engine(monkeypatch, 3)
    assert rounds.specs[-1].in_flight == 4
    engine.cancel(leaves)
    engine.step()
    assert rounds.specs[-1].in_flight == kept
    engine.step()
    assert rounds.specs[-1].in_flight == 4
    texts = step_to_end(engine)
    for number in {0, 1, 2} - {leaves}:
        assert texts[number] == best(prompt(30, number))[-len(texts[number]) :]
    check_free(engine)
    monkeypatch.undo()
    engine.close()


def test_who_joins_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the place of one who has just left, whose host chunks a dropped fetch may still read."""
    engine, rounds = streaming_engine(monkeypatch, 2)
    assert rounds.specs[-1].in_flight == 4
    engine.cancel(1)
    newcomers = [engine.submit(prompt(25, 7), max_new_tokens=9), engine.submit(prompt(25, 8), max_new_tokens=9)]
    engine.step()
    assert [s.seat for s in rounds.specs[-1].seats] == [0, 1, 2]
    assert rounds.specs[-1].in_flight == 1
    texts = step_to_end(engine)
    for number, seed in zip(newcomers, (7, 8), strict=True):
        assert best(prompt(25, seed), 9)[-len(texts[number]) :] == texts[number]
    check_free(engine)
    monkeypatch.undo()
    engine.close()


@pytest.mark.parametrize("drafting", ["sequential", "cohorts"])
def test_who_takes_a_seat_takes_a_place_in_rounds(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device these have been planned and captured: the same rounds go on, on other chunks."""
    budget = 4 * 16 * 1024 + 12 * 3072  # a ring and four tails
    sizes = {"gpu_kv_budget": budget, "staging_slots": 4, "group_chunks": 16, "max_num_seqs": 4, "max_model_len": 128}
    with new_engine(**sizes, num_speculative_tokens=1, drafting=drafting) as engine:
        rounds = Rounds(engine, monkeypatch)

        def decoded() -> set[tuple[RoundSpec, tuple[int, ...]]]:
            while any(not sequence.prompt_is_through for sequence in engine._unfinished()):
                engine.step()
            del rounds.specs[:]
            for _ in range(8):
                engine.step()
            return {(spec.canonical(), spec.seating) for spec in rounds.specs if len(spec.groups) == len(spec.seats)}

        requests = [engine.submit(prompt(40, number), max_new_tokens=80) for number in range(4)]
        before = decoded()
        engine.cancel(requests[1])
        engine.submit(prompt(40, 9), max_new_tokens=80)
        again = decoded()
        assert [sequence.seat for sequence in engine._scheduler.running] == [0, 2, 3, 1], "as they came"
        assert {seating for _, seating in again} == {seating for _, seating in before}
        assert again & before


# The proof, where fetches are dropped


LONE = SeatSpec(0, 0, 3, streamed=4, offload=0, open=4, span=1)
BOTH = round_spec(LONE, seat(1, streamed=4), slots=4)
"""Two groups a seat, so that each has two of the four fetches in flight."""


def left(in_flight: int) -> RoundSpec:
    """The round after BOTH when seat 1 is given to another request, which writes out its first chunk at once."""
    newcomer = SeatSpec(1, 0, 3, streamed=0, offload=1, open=0, span=2)
    return replace(BOTH, seats=(LONE, newcomer), in_flight=in_flight)


def test_a_round_may_count_on_some_of_the_fetches_in_flight() -> None:
    before = make_plan(BOTH)
    for count in range(3):
        plan = make_plan(left(count))
        assert sum(task.phase == "before" for task in plan.tasks) == count
        before.check(plan)


def test_but_not_on_others_than_were_issued() -> None:
    with pytest.raises(InvalidPlan, match="counts on fetches that the round before did not issue"):
        make_plan(BOTH).check(make_plan(left(3)))


def test_what_is_dropped_is_not_attended_to() -> None:
    """A plan that leaves out a fetch, because its slot happens to be filled with the same, is refused."""
    plan = make_plan(left(1))
    twice = plan.by_name["fetch/0/0"].link_bytes * 2  # so that the bytes are right
    tasks = (t._replace(link_bytes=twice) if t.name == "fetch/0/0" else t for t in plan.tasks if t.name != "fetch/0/1")
    steps = (step for step in plan.steps if step.name != "fetch/0/1")
    with pytest.raises(InvalidPlan, match=r"attend/0/1 reads slot 1.* may still be written by round 0: ahead/0/1"):
        make_plan(BOTH).check(replace(plan, tasks=tuple(tasks), steps=tuple(steps)))
