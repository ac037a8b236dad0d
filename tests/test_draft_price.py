"""Candidates that are not worth their time: speculation is turned off, and the text stays the target's."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.kv import ChunkLayout, SequenceKV
from specstream.options import Options
from specstream.planner import Planner
from specstream.profiles import H200
from specstream.round_spec import RoundSpec, SeatSpec
from specstream.scheduler import RequestRows
from specstream.sequence import Sequence
from specstream.speculate import Candidates, Speculation
from specstream.speculator import JUDGED_ROUNDS, Speculator
from tests.helpers import make_engine, model, prompt, reference
from tests.test_profiles import KV_BYTES, LAYERS, QWEN3_06B, qwen3_8b


def judged(accepted: int, price: float, rounds: int = JUDGED_ROUNDS) -> tuple[Sequence, list[str]]:
    """A request after so many rounds of four candidates, and what is said of it."""
    speculator = Speculator(Speculation.of(Options()), None, 4)
    layout = ChunkLayout(1, 1, 1, 16, qwen3_8b().spec.dtype)
    sequence = Sequence(7, 1, 1000, frozenset(), [1])
    kv = SequenceKV(layout, 1000, 1, 1, [0], None)
    for _ in range(rounds):
        row = RequestRows(sequence, kv, [1, 2, 3, 4, 5], False, Candidates([2, 3, 4, 5]), 5, accepted=accepted)
        speculator.judge(row, lambda _: price)
    return sequence, [text for _, text in speculator.pending_warnings]


@pytest.mark.parametrize(
    ("accepted", "price", "drafts"), [(1, 2.0, True), (1, 2.6, False), (4, 6.0, True), (4, 6.5, False)]
)
def test_a_round_has_to_give_as_many_tokens_as_it_takes_longer(accepted: int, price: float, drafts: bool) -> None:
    """But for a fifth, since its time is a prediction."""
    sequence, texts = judged(accepted, price)
    assert sequence.drafts is drafts
    if drafts:
        assert not texts
    else:
        assert texts == [
            f"the draft gave {1 + accepted:.2f} tokens in each of {JUDGED_ROUNDS} rounds; each takes {price:.2f} x as "
            "long with it: speculation is off for request 7, whose text is not affected"
        ]


def test_few_rounds_prove_nothing() -> None:
    assert judged(1, 100.0, JUDGED_ROUNDS - 1)[0].drafts


def test_the_price_is_what_a_round_is_predicted_to_take_longer() -> None:
    planner = Planner(qwen3_8b(), H200, QWEN3_06B, 5)
    resident = RoundSpec(LAYERS, 4, 1, 64 * KV_BYTES, (SeatSpec(0, 16, 1, 0, 0, 15, 1),), 0, 4)
    assert planner.draft_price(resident) == pytest.approx(2, abs=0.05)  # 4 x 1.24 ms
    streamed = SeatSpec(0, 0, 3, 63, 0, 63, 2)
    hidden = replace(resident, chunks_per_group=32, staging_slots=9, bytes_per_chunk=512 * KV_BYTES, seats=(streamed,))
    assert planner.draft_price(hidden.warm()) == pytest.approx(1, abs=1e-3)
    assert planner.draft_price(replace(resident, draft_steps=0)) == 1


def test_the_price_is_that_of_groups_as_full_as_they_are() -> None:
    """Rounds that share a plan may stream a chunk or a whole group: with a chunk there is no bubble to draft in."""
    planner = Planner(qwen3_8b(), H200, QWEN3_06B, 5)
    almost = SeatSpec(0, 60, 3, 1, 0, 61, 2)
    spec = RoundSpec(LAYERS, 9, 32, 512 * KV_BYTES, (almost,), 0, 4).warm()
    assert planner.draft_price(spec) > 1.5


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 24), st.booleans(), st.integers(1, 9))
def test_what_it_is_at_most_will_do_where_that_is_little_enough(
    streamed: list[int], steps: int, beside: bool, slots: int
) -> None:
    """It is known without simulating the round, for which there is no time between two rounds."""
    seats = tuple(SeatSpec(each, 2, 3, chunks, 0, 2 + chunks, 1) for each, chunks in enumerate(streamed))
    spec = RoundSpec(LAYERS, slots, 16, 128 * KV_BYTES, seats, 0, steps, drafts_beside=beside).warm()
    planner = Planner(qwen3_8b(), H200, QWEN3_06B, 5)
    most = planner.draft_price(spec, 1000.0)
    assert not planner._prices, "nothing is simulated"
    price = planner.draft_price(spec, most - 0.001)
    assert 1 <= price <= most + 1e-9
    assert price == planner.draft_price(spec) == planner._prices[spec.canonical()]
    assert most < 1 + steps


def test_the_text_of_a_request_whose_draft_does_not_pay_is_the_targets() -> None:
    """The target itself with a window that is too small: steps cost as much as verifications, and few are right."""
    target, count = model("qwen3"), 5 * JUDGED_ROUNDS
    options: dict[str, Any] = {"max_model_len": 256, "draft_window": 24, "draft_sink": 2}
    with make_engine(target, target, **options) as engine:
        with pytest.warns(UserWarning, match=r"tokens in each of 32 rounds; each takes [\d.]+ x as long with it"):
            ours: Any = engine.generate([list(prompt(40))], max_new_tokens=count)
        proposed = engine.metrics().num_draft_tokens
        engine.generate([list(prompt(40))], max_new_tokens=8)
        assert engine.metrics().num_draft_tokens > proposed, "another request is drafted for"
    assert ours[0, 40:].tolist() == reference(target, prompt(40), count).tokens
    with make_engine(target, target, max_model_len=256) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([list(prompt(40))], max_new_tokens=count)
