"""Lookahead: what is drafted for likely outcomes beside the target is what would be drafted after acceptance."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from specstream.draft import Drafter
from specstream.engine import Engine
from specstream.fan_out import SECOND_MODEL, FanOut, likely_outcomes
from specstream.lookahead import Lookahead
from specstream.round_plan import Lane, StepOp
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates
from tests.architectures import build
from tests.helpers import NEW_TOKENS, Request, best, check_free, make_engine, model, prompt, serve

STREAMING: dict[str, Any] = {"max_model_len": 128, "gpu_kv_budget": "min", "chunk_tokens": 8, "debug": True}
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 1, "temperature": 0.8}


BRANCHES, SHARES = 16, SECOND_MODEL.rank_shares


@cache
def near() -> torch.nn.Module:
    """A draft that often agrees with the target."""
    drafting = copy.deepcopy(model("qwen3"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafting.parameters():
            weight.add_(0.15 * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return drafting


def engine_of(drafting: str, draft: torch.nn.Module | None = None, **options: Any) -> Engine:
    defaults = STREAMING | {"num_speculative_tokens": 4, "max_num_seqs": 2}
    if drafting == "lookahead":
        defaults["lookahead_branches"] = BRANCHES
    return make_engine(model("qwen3"), draft or near(), **defaults | options, drafting=drafting)


@pytest.mark.parametrize("options", [{}, {"draft_window": 12, "draft_sink": 2}, {"max_num_seqs": 1}], ids=str)
@pytest.mark.parametrize("method", ["greedy", "standard", "coupled"])
def test_tokens_and_candidates_are_those_of_drafting_after_acceptance(method: str, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {} if method == "greedy" else SAMPLED
    given = options if method == "greedy" else options | {"rejection_sample_method": method}
    outcomes = []
    for drafting in ("sequential", "lookahead"):
        with engine_of(drafting, **given) as engine:
            prompts = [list(prompt(30)), list(prompt(41))]
            out: Any = engine.generate(prompts, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **arguments)
            metrics = engine.metrics()
        outcomes.append(([each.token_ids for each in out.requests], metrics.num_draft_tokens, metrics.num_rounds))
    assert outcomes[0] == outcomes[1]
    assert 0 < metrics.num_foreseen_outcomes < metrics.num_outcomes
    if method == "greedy":
        assert outcomes[1][0][0] == best(prompt(30))


def test_a_draft_that_is_the_target_foresees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round nothing is drafted but beside the target."""
    late = 0
    with engine_of("lookahead", model("qwen3"), max_num_seqs=3) as engine:
        draft = engine._speculator._draft

        def watched(rows: Any, step: int) -> None:
            nonlocal late
            late += step == 0 and any(row.sequence.seat < 3 for row in rows)
            draft(rows, step)

        monkeypatch.setattr(engine._speculator, "_draft", watched)
        requests = [Request(prompt(20 + 9 * i, i), NEW_TOKENS, joins=2 * i) for i in range(4)]
        serve(engine, requests)
        metrics = engine.metrics()
        check_free(engine)
    for request in requests:
        assert request.tokens == best(request.prompt)
    assert metrics.lookahead_hit_rate == 1.0
    assert metrics.mean_acceptance_length > 4.5
    assert late == 4, "once a request"


def test_draft_steps_are_beside_the_target_and_nothing_waits_for_them() -> None:
    with engine_of("lookahead") as engine:
        engine.submit(prompt(40), max_new_tokens=9)
        engine.step()
        assert not engine.plan.spec.draft_steps, "nothing is known of what may come"
        engine.step()
        plan = engine.plan
    assert plan.spec.drafts_beside
    assert "drafted for meanwhile: likely outcomes of this round\n" in str(plan)
    assert plan.spec.draft_steps == 5, "one more than candidates: for what may follow them all"
    launches = [step.name for step in plan.steps if step.op is StepOp.LAUNCH]
    assert launches.index("draft/0") < launches.index("accept")
    waits = [step for step in plan.steps if step.op is StepOp.WAIT]
    assert not [s for s in waits if s.lane is Lane.DRAFT or s.name.startswith("draft")]
    plan.check()


def test_a_round_that_fails_leaves_no_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of("lookahead") as engine:
        drafter = engine._speculator.drafter
        assert drafter is not None
        engine.submit(prompt(40), max_new_tokens=20)
        tokens = [token for _ in range(2) for out in engine.step() for token in out.new_token_ids]
        feed, fails = Drafter._feed, [False, True]

        def failing(self: Drafter, rows: Any, *, logits: bool) -> Any:
            if fails and fails.pop(0):
                raise RuntimeError("no draft")
            return feed(self, rows, logits=logits)

        with monkeypatch.context() as patched:
            patched.setattr(Drafter, "_feed", failing)
            with pytest.raises(RuntimeError, match="no draft"):
                engine.step()
        assert not drafter._kv, "the request's own is computed anew"
        while engine.has_unfinished:
            tokens += [token for out in engine.step() for token in out.new_token_ids]
        assert not drafter._kv
    assert tokens == best(prompt(40), 20)


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_made_up_outcomes_are_foreseen_as_often_as_assumed(rate: float) -> None:
    options = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": rate, "max_model_len": 240}
    with engine_of("lookahead", build("qwen3", vocab_size=96, seed=3), max_num_seqs=1, **options) as engine:
        engine.generate([list(prompt(30))], max_new_tokens=200, eos_token_id=[])
        metrics = engine.metrics()
    # Of K candidates that are right with chance a: of outcomes with one refused so many, of those with none so many.
    all_right = rate**4
    refused = sum(SHARES)  # the candidate is one of the guesses
    expected = all_right * (rate + (1 - rate) * refused) + (1 - all_right) * refused
    assert metrics.lookahead_hit_rate == pytest.approx(expected, abs=0.12)


def test_likely_outcomes() -> None:
    candidates = Candidates([7, 8], guesses=[[7, 1, 2], [9, 8, 3], [5, 6, 4]])
    outcomes = likely_outcomes(0.9, FanOut(20, SHARES), candidates)
    assert [(o.accepted, o.token) for o in outcomes[:3]] == [(2, 5), (0, 1), (1, 9)]
    assert {(o.accepted, o.token) for o in outcomes} == {
        (0, 1), (0, 2), (1, 9), (1, 3), (2, 5), (2, 6), (2, 4),
    }  # fmt: skip
    assert likely_outcomes(0.9, FanOut(2, SHARES), candidates) == outcomes[:2]
    assert likely_outcomes(0.1, FanOut(1, SHARES), candidates)[0].accepted == 0
    assert not likely_outcomes(0.9, FanOut(5, SHARES), Candidates())


def test_branches_are_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, counts = Lookahead.begin, list[int]()

    def counted(self: Lookahead, rows: list[RequestRows]) -> list[RequestRows]:
        branches = begin(self, rows)
        counts.append(len(branches))
        return branches

    monkeypatch.setattr(Lookahead, "begin", counted)
    with engine_of("lookahead", max_num_seqs=20) as engine:
        for index in range(20):
            engine.submit(prompt(9, index), max_new_tokens=12)
        while engine.has_unfinished:
            engine.step()
            drafter = engine._speculator.drafter
            assert drafter is not None
            assert all(seat < 20 for seat in drafter._seats), "branches end with their round"
    assert max(counts) == BRANCHES
