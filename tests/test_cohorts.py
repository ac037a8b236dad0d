"""Cohorts: half of the requests verify while the others are drafted for, by turns; the tokens stay the target's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specstream.batch import RoundBatch
from specstream.cohorts import balance, next_turn
from specstream.engine import Engine
from specstream.errors import InvalidOption, InvalidPlan
from specstream.kv import SequenceKV
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import ChunkRun, RoundSpec
from specstream.sequence import Sequence
from tests.helpers import Request, best, check_free, new_engine, prompt, serve, step_to_end
from tests.toy import make_plan, round_spec, seat

STREAMING: dict[str, Any] = {
    "drafting": "cohorts",
    "gpu_kv_budget": 4 * 16 * 1024 + 12 * 3072,  # a ring and four tails
    "staging_slots": 4,
    "group_chunks": 16,
    "max_num_seqs": 4,
}


@dataclass
class Seen:
    """The rounds of an engine, and in each of them when what was drafted."""

    specs: list[RoundSpec]
    drafted: list[list[int]]
    """Steps in the order of the calls, -1 standing for acceptance."""


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen([], [])
    run = engine._executor.run

    def watched(plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
        calls: list[int] = []

        def accept(logits: Tensor) -> None:
            calls.append(-1)
            batch.accept(logits)

        def draft(step: int) -> None:
            calls.append(step)
            batch.draft(step)

        while batch.work_ahead():
            pass
        run(plan, spec, replace(batch, accept=accept, draft=draft))
        seen.specs.append(spec)
        seen.drafted.append(calls)

    monkeypatch.setattr(engine._executor, "run", watched)
    return seen


@pytest.mark.parametrize("count", [2, 3, 4])
def test_requests_verify_by_turns_and_are_drafted_for_in_between(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine(**STREAMING) as engine:
        seen = watch(engine, monkeypatch)
        for number in range(count):
            engine.submit(prompt(30, number), max_new_tokens=24)
        texts = step_to_end(engine)
        assert texts == {number: best(prompt(30, number)) for number in range(count)}
        metrics = engine.metrics()
        planned = engine._planner.num_planned - engine._planner.num_ahead
        check_free(engine)
    turns = [(spec, drafted) for spec, drafted in zip(seen.specs, seen.drafted, strict=True) if spec.drafts_beside]
    assert len(turns) > 4
    for (spec, _), (following, _) in pairwise(turns):
        assert not {s.seat for s in spec.seats} & {s.seat for s in following.seats}
        assert abs(len(spec.seats) - len(following.seats)) <= 1
    assert {tuple(drafted) for _, drafted in turns} == {(0, 1, 2, -1)}, "steps come before the round's own acceptance"
    assert metrics.draft_acceptance_rate == 1
    assert metrics.mean_acceptance_length > 3
    steady = [b for (a, _), (b, _) in pairwise(turns) if len(a.seats) == len(b.seats)]
    assert all(spec.in_flight == len(spec.first) for spec in steady), "the link ran ahead for the other cohort"
    assert planned <= 3, "what follows is planned ahead"


def test_one_request_is_drafted_for_after_its_own_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine(**STREAMING) as engine:
        seen = watch(engine, monkeypatch)
        engine.submit(prompt(30), max_new_tokens=24)
        assert step_to_end(engine)[0] == best(prompt(30))
    assert not any(spec.drafts_beside for spec in seen.specs)
    assert set(map(tuple, seen.drafted)) == {(-1, 0, 1, 2)}


def test_who_is_left_alone_goes_on_and_who_joins_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine(**STREAMING) as engine:
        seen = watch(engine, monkeypatch)
        requests = [
            Request(prompt(30), 24),
            Request(prompt(20, 1), 24, leaves=4),
            Request(prompt(11, 2), 20, joins=5),
            Request(prompt(3, 3), 20, joins=6),
        ]
        serve(engine, requests)
        for request in requests:
            assert request.tokens == best(request.prompt, 24)[: len(request.tokens)]
    kinds = [spec.drafts_beside for spec in seen.specs]
    changes = sum(a != b for a, b in pairwise(kinds))
    assert changes >= 3, "together, by turns, together and by turns again"


def test_errors_and_failed_rounds_leave_the_others_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine(**STREAMING) as engine:
        for number in range(4):
            engine.submit(prompt(30, number), max_new_tokens=24)
        drafter: Any = engine._speculator.drafter
        extend, calls = drafter.extend, 0

        def fail_sometimes(latest: dict[int, int]) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise RuntimeError("no")
            return extend(latest)

        monkeypatch.setattr(drafter, "extend", fail_sometimes)
        texts: dict[int, list[int]] = {number: [] for number in range(4)}
        failed = 0
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    texts[output.request_id] += output.new_token_ids
            except RuntimeError:
                failed += 1
                if failed > 8:
                    monkeypatch.undo()
        assert texts == {number: best(prompt(30, number)) for number in range(4)}
        assert failed > 8
        check_free(engine)


def test_rounds_are_not_split_for_requests_that_nothing_drafts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the plan then says too."""
    with new_engine(**STREAMING) as engine:
        seen = watch(engine, monkeypatch)
        for number in range(3):
            engine.submit(prompt(30, number), max_new_tokens=9, logits_processor=[lambda ids, scores: scores])
        assert step_to_end(engine) == {number: best(prompt(30, number), 9) for number in range(3)}
    assert not any(spec.drafts_beside or spec.draft_steps for spec in seen.specs)


def test_a_request_at_a_time_has_no_cohorts() -> None:
    with pytest.raises(InvalidOption, match=r"drafting: got 'cohorts'; allowed: .* with max_num_seqs=1"):
        new_engine(**STREAMING | {"max_num_seqs": 1})


# Turns


def request(number: int, cohort: int, *, through: bool = True) -> Sequence:
    kv: Any = SequenceKV(None, 99, 0, 2, [], None, length=9 if through else 3)  # type: ignore[arg-type]
    return Sequence(number, 5, 99, frozenset(), [0] * 10, kv=kv, cohort=cohort)


def test_turns() -> None:
    both = [request(0, 0), request(1, 1)]
    assert [next_turn(both, last) for last in (0, 1)] == [1, 0]
    for alone in ([], both[:1], both[1:], [request(0, 0), request(1, 1, through=False)]):
        assert next_turn(alone, 0) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=12))
@settings(max_examples=50)
def test_balance(drawn: list[tuple[int, bool]]) -> None:
    running = [request(number, cohort, through=through) for number, (cohort, through) in enumerate(drawn)]
    before = [sequence.cohort for sequence in running]
    balance(running)
    ready = [sequence.cohort for sequence in running if sequence.prompt_is_through]
    assert abs(ready.count(0) - ready.count(1)) <= 1
    moved = sum(sequence.cohort != cohort for sequence, cohort in zip(running, before, strict=True))
    counts = [sum(b == c for b, (_, through) in zip(before, drawn, strict=True) if through) for c in (0, 1)]
    assert moved == abs(counts[0] - counts[1]) // 2, "nobody moves without need"


# Plans

FIRST = replace(round_spec(seat(0, streamed=4), slots=2), drafts_beside=True, next_runs=(ChunkRun(1, 0, 6),))
SECOND = replace(round_spec(seat(1, streamed=6), slots=2), drafts_beside=True, next_runs=(ChunkRun(0, 0, 4),))


def test_a_plan_fetches_ahead_for_the_other_cohort_and_drafts_beside_the_target() -> None:
    plan, following = make_plan(FIRST), make_plan(SECOND)
    plan.check(following)
    following.check(plan)
    assert [(task.layer, task.run) for task in plan.tasks if task.phase == "ahead"] == list(SECOND.first)
    assert not [s for s in plan.steps if s.op is StepOp.WAIT and s.lane is Lane.DRAFT]
    launches = [s.name for s in plan.steps if s.op is StepOp.LAUNCH]
    assert launches.index("draft/0") < launches.index("accept")
    apart = make_plan(replace(FIRST, drafts_beside=False))
    assert [s.name for s in apart.steps if s.op is StepOp.WAIT and s.lane is Lane.DRAFT] == ["accept"]


def test_rounds_of_other_requests_may_not_follow_as_if_they_were_these() -> None:
    with pytest.raises(InvalidPlan, match="counts on fetches that the round before did not issue"):
        make_plan(FIRST).check(make_plan(FIRST))


def test_rounds_that_differ_in_how_full_the_other_cohorts_groups_are_share_a_plan() -> None:
    def canonical(chunks: int) -> RoundSpec:
        return replace(FIRST, next_runs=(ChunkRun(1, 0, chunks),)).canonical()

    group = FIRST.chunks_per_group
    assert canonical(group + 1) == canonical(2 * group)
    assert canonical(group) != canonical(group + 1)
    assert Plan.from_json(make_plan(FIRST).to_json()) == make_plan(FIRST)
