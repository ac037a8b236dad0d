"""Requests that are drafted for as far as their own acceptance pays: fewer candidates, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specstream
from specstream.depth import Depths
from specstream.engine import Engine
from specstream.scheduler import RequestRows
from specstream.speculator import ADAPTED_ROUNDS, Speculator
from tests.helpers import NEW_TOKENS, best, make_engine, model, prompt, reference
from tests.test_lookahead import near

DEARER = Depths({1: 1.0, 2: 1.5, 4: 2.6})
"""One candidate pays at any acceptance, four from 0.9 on."""
TOKENS = 40
"""Too few for candidates to be turned off."""


def engine_of(draft: torch.nn.Module, depths: Depths | None = DEARER, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_model_len": 128, "num_speculative_tokens": 4, "drafting": "sequential"}
    engine = make_engine(model("qwen3"), draft, **defaults | options)
    engine._speculator.depths = depths
    return engine


def proposed(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """By request, how many candidates each verification had."""
    seen: dict[int, list[int]] = {}
    judge = Speculator.judge

    def noted(self: Speculator, row: RequestRows, price: Any) -> None:
        seen.setdefault(row.sequence.request_id, []).append(len(row.candidates.tokens))
        judge(self, row, price)

    monkeypatch.setattr(Speculator, "judge", noted)
    return seen


def test_few_candidates_for_who_accepts_few_and_many_for_who_accepts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = proposed(monkeypatch)
    with engine_of(near()) as engine:
        out: Any = engine.generate([list(prompt(20))], max_new_tokens=TOKENS, return_dict_in_generate=True)
    assert out.requests[0].token_ids == reference(model("qwen3"), prompt(20), TOKENS).tokens
    (counts,) = seen.values()
    assert set(counts[:ADAPTED_ROUNDS]) == {4}
    assert max(counts[ADAPTED_ROUNDS + 1 :]) < 4, "that round's own were drafted before it was asked"
    seen.clear()
    with engine_of(model("qwen3")) as engine:
        engine.generate([list(prompt(20))], max_new_tokens=TOKENS)
    (counts,) = seen.values()
    assert set(counts[:-2]) == {4}


def test_each_request_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round drafts for as many steps as one of them wants; what the other gets does not depend on it."""
    seen = proposed(monkeypatch)
    alone: Any = {}
    for prompts in ([list(prompt(20))], [list(prompt(33))], [list(prompt(20)), list(prompt(33))]):
        with engine_of(near(), max_num_seqs=2) as engine:
            for sampled in ({}, {"do_sample": True, "seed": [5] * len(prompts), "temperature": 0.7}):
                seen.clear()
                out: Any = engine.generate(prompts, max_new_tokens=TOKENS, return_dict_in_generate=True, **sampled)
                requests = sorted(seen)
                for number, (ids, request) in enumerate(zip(prompts, out.requests, strict=True)):
                    key = len(ids), bool(sampled)
                    assert alone.setdefault(key, (request.token_ids, seen[requests[number]])) == (
                        request.token_ids,
                        seen[requests[number]],
                    )


@pytest.mark.parametrize(("tokens", "adapts"), [("auto", True), (3, False)])
def test_only_automatic_numbers_adapt(tokens: int | str, adapts: bool) -> None:
    given: Any = {"num_speculative_tokens": tokens, "drafting": "sequential", "max_model_len": 128}
    with specstream.compile(model("qwen3"), near(), **given) as engine:
        assert (engine._speculator.depths is not None) is adapts
        out: Any = engine.generate([list(prompt(20))], max_new_tokens=NEW_TOKENS)
    assert out[0, 20:].tolist() == best(prompt(20))
