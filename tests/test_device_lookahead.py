"""Lookahead, and requests of different depths, with the kernels' rounds in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from specstream import lookahead, speculator
from specstream.depth import Depths
from specstream.device_rounds import DeviceRounds
from specstream.fan_out import Outcome, likely_outcomes
from specstream.lookahead import Lookahead
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates
from tests.test_device_rounds import PROMPTS, SAMPLED, check_same, engine_of, near, small, texts, tiny

pytestmark = pytest.mark.interpreter
Outcomes = list[Outcome]
__all__ = ["small"]  # a fixture: what a round is cut into


@pytest.mark.parametrize("method", ["greedy", "standard", "coupled"])
def test_lookahead(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verification may come to is drafted for by the kernels, and again if it came to something else."""
    foreseen, drafted_now = list[bool](), list[bool]()
    resolve, draft_now = Lookahead.resolve, DeviceRounds.draft_now

    def resolved(self: Lookahead, row: RequestRows, read: Any) -> Candidates | None:
        found = resolve(self, row, read)
        foreseen.append(found is not None)
        return found

    def drafting(self: DeviceRounds, drafted: list[RequestRows]) -> bool:
        done = draft_now(self, drafted)
        drafted_now.append(done or not drafted)
        return done

    monkeypatch.setattr(Lookahead, "resolve", resolved)
    monkeypatch.setattr(DeviceRounds, "draft_now", drafting)
    options: dict[str, Any] = {"num_speculative_tokens": 3, "drafting": "lookahead", "lookahead_branches": 4}
    arguments: dict[str, Any] = {} if method == "greedy" else SAMPLED | {"temperature": 0.3}
    options |= {} if method == "greedy" else {"rejection_sample_method": method}
    _, _, (proposed, accepted, _) = check_same(tiny(), near(), PROMPTS[:1], options, max_new_tokens=14, **arguments)
    assert 0 < accepted < proposed
    assert set(foreseen) == {True, False}
    assert drafted_now
    assert all(drafted_now)


@pytest.mark.parametrize("method", ["greedy", "coupled"])
def test_guesses_are_those_of_the_host(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise of the target's own choice: without it few outcomes of coupled samples are foreseen."""
    options: dict[str, Any] = {"num_speculative_tokens": 3, "drafting": "lookahead", "lookahead_branches": 6}
    arguments: dict[str, Any] = {} if method == "greedy" else SAMPLED | {"temperature": 1.5}
    options |= {} if method == "greedy" else {"rejection_sample_method": method}
    seen: list[list[Outcomes]] = []

    def noted(*given: Any) -> Outcomes:
        found = likely_outcomes(*given)
        seen[-1].append(found)
        return found

    monkeypatch.setattr(lookahead, "likely_outcomes", noted)
    for kernels in (False, True):
        seen.append([])
        texts(engine_of(tiny(), near(), kernels, **options), PROMPTS[:1], max_new_tokens=10, **arguments)
    assert len(seen[0]) > 2
    assert seen[1] == seen[0]


@pytest.mark.parametrize("window", [None, 8])
def test_branches_share_blocks(window: int | None) -> None:
    """Texts that cross blocks of 8 tokens: what is drafted ahead is what would be drafted after acceptance."""
    options: dict[str, Any] = {"num_speculative_tokens": 9, "draft_window": window, "max_num_seqs": 1}
    ahead, after = (
        texts(engine_of(tiny(), near(), kernels=True, **options | policy), PROMPTS[:1], max_new_tokens=9)
        for policy in ({"drafting": "lookahead", "lookahead_branches": 4}, {"drafting": "sequential"})
    )
    assert ahead == after


@pytest.mark.parametrize("method", ["greedy", "standard", "coupled"])
def test_requests_of_different_depths(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that one request needs are of no effect on another that needs fewer."""
    monkeypatch.setattr(speculator, "ADAPTED_ROUNDS", 1)
    depths = Depths({1: 1.0, 2: 1.5, 4: 2.6})
    results = []
    for kernels in (False, True):
        options = {"rejection_sample_method": method} if method != "greedy" else {}
        engine = engine_of(tiny(), near(), kernels, num_speculative_tokens=4, **options)
        engine._speculator.depths = depths
        arguments: dict[str, Any] = {} if method == "greedy" else SAMPLED
        results.append(texts(engine, PROMPTS, max_new_tokens=14, **arguments))
    assert results[0] == results[1]
    proposed_at_each = results[0][2]
    assert 0 < proposed_at_each[1] < proposed_at_each[0]


def test_a_request_that_the_host_decides_for_has_no_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty, for every branch at every step, would take the host longer than drafting afterwards."""
    begun = list[int]()
    begin = Lookahead.begin

    def counted(self: Lookahead, rows: list[RequestRows]) -> list[RequestRows]:
        found = begin(self, rows)
        begun.append(len(found))
        return found

    monkeypatch.setattr(Lookahead, "begin", counted)
    options: dict[str, Any] = {"num_speculative_tokens": 2, "drafting": "lookahead", "lookahead_branches": 4}
    arguments: dict[str, Any] = {"max_new_tokens": 8, "repetition_penalty": 1.2}
    host = texts(engine_of(tiny(), near(), False, **options), PROMPTS[:1], **arguments)
    assert any(begun), "where the host does everything"
    begun.clear()
    device = texts(engine_of(tiny(), near(), True, **options), PROMPTS[:1], **arguments)
    assert not any(begun)
    assert device == host
    assert device[2][0] > 0, "candidates all the same"
