"""A target that leaves nothing to choose a token from: one clear error, as transformers has one, and no wrong token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specstream
from specstream.errors import InvalidDistribution
from specstream.sampling import Purpose, Sampling, has_distribution
from specstream.speculate import Candidates, Speculation
from tests.helpers import best, check_free, model, new_engine, prompt

INF, NAN = float("inf"), float("nan")
VOCAB = 96
PROMPT = 9


class Spoil:
    """A processor that gives all scores one value once the text has some length."""

    def __init__(self, value: float, length: int = 0) -> None:
        self.value, self.length = value, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, self.value)


NOTHING_TO_CHOOSE_FROM: list[tuple[dict[str, Any], str]] = [
    ({"do_sample": True, "temperature": 1e-40}, "the processed scores hold +inf. Raise the temperature"),
    ({"do_sample": True, "suppress_tokens": list(range(VOCAB))}, "the processed scores are all -inf. Forbid fewer"),
    ({"do_sample": True, "logits_processor": [Spoil(NAN)]}, "the processed scores hold NaN. Look at the processors"),
    ({"do_sample": True, "logits_processor": [Spoil(INF)], "top_k": 0}, "the processed scores hold +inf."),
    ({"do_sample": True, "logits_processor": [Spoil(-INF)]}, "the processed scores are all -inf."),
]


@pytest.mark.parametrize("rejection", ["standard", "coupled"])
@pytest.mark.parametrize(
    ("arguments", "text"), NOTHING_TO_CHOOSE_FROM, ids=[text for _, text in NOTHING_TO_CHOOSE_FROM]
)
def test_sampling_from_nothing_is_an_error(arguments: dict[str, Any], text: str, rejection: str) -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(PROMPT)])
    with pytest.raises(RuntimeError, match="probability tensor"):  # transformers' own
        target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **arguments)
    with new_engine(rejection_sample_method=rejection) as engine:
        with pytest.raises(specstream.InvalidDistribution) as raised:
            engine.generate(ids, max_new_tokens=3, seed=0, **arguments)
        where = "request 0: no token can be chosen at position 9 (the prompt's first token is at 0): "
        assert str(raised.value).startswith(where + text)
        assert (raised.value.request_id, raised.value.position) == (0, PROMPT)
        check_free(engine)
        out: Any = engine.generate(ids, max_new_tokens=3)
        assert out[0, PROMPT:].tolist() == best(prompt(PROMPT), 3)


def test_greedy_takes_what_transformers_takes_but_never_nan() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(PROMPT)])
    with new_engine() as engine:
        for arguments in (
            {"suppress_tokens": list(range(VOCAB))},
            {"logits_processor": [Spoil(INF)]},
            {"logits_processor": [Spoil(-INF)]},
        ):
            same: dict[str, Any] = {"max_new_tokens": 3, **arguments}
            reference = target.generate(ids, attention_mask=torch.ones_like(ids), **same)
            ours: Any = engine.generate(ids, **same)
            assert torch.equal(ours, reference)
            assert reference[0, PROMPT:].tolist() == [0, 0, 0]
        with pytest.raises(InvalidDistribution, match=r"request 3: no token .* at position 11 .* hold NaN"):
            engine.generate(ids, max_new_tokens=6, logits_processor=[Spoil(NAN, PROMPT + 2)])
        check_free(engine)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_value_or_all(value: float) -> None:
    scores = torch.zeros(3, 4)
    scores[1, 2] = value
    assert has_distribution(scores).tolist() == [True, value == -INF, True]
    scores[1] = value
    assert has_distribution(scores).tolist() == [True, False, True]


@pytest.mark.parametrize("rejection", ["standard", "coupled"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_that_only_follow_a_candidate_do_not_change_the_distribution(rejection: Any, value: float) -> None:
    """After some tokens the target has none. That a candidate is one of them must not decide whether it counts."""
    target = torch.tensor([1.0, 0.5, -0.5, 0.2, 0.0]).double()
    draft = torch.tensor([0.2, 1.5, 0.5, -1.0, 0.3]).double()
    unusable = {1, 4}
    rule, counts, draws = Speculation(rejection, "probabilistic"), torch.zeros(5), 2_000
    for seed in range(draws):
        own, candidates = Sampling(True, seed), Candidates()
        assert rule.propose(own, draft, [2], candidates)
        after = torch.full_like(target, value) if candidates.tokens[0] in unusable else target
        accepted, produced = rule.accept(own, torch.stack([target, after]), 1, candidates)
        if produced[0] in unusable:
            assert (accepted, len(produced)) == (0, 1)
        counts[produced[0]] += 1
        if rejection == "coupled":
            assert produced[0] == int((target + own.noise.gumbel(1, 5)).argmax())
    wanted = torch.softmax(target, 0) * draws
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 23.5  # four degrees of freedom; once in 10,000


def test_drawing_again_for_a_candidate_without_a_future_is_noticed() -> None:
    """The negative twin: such a candidate is dropped, and a token drawn in its place."""
    target, draft = torch.softmax(torch.tensor([1.0, 0.5, -0.5]).double(), 0), torch.tensor([0.2, 0.6, 0.2]).double()
    counts = torch.zeros(3)
    for seed in range(2_000):
        noise = Sampling(True, seed).noise
        candidate = noise.draw(draft, 1, Purpose.DRAFT)
        rows = torch.log(torch.stack([target, target]))
        own = Speculation("standard", "probabilistic")
        given = Candidates([candidate], [draft]) if candidate != 1 else Candidates()
        counts[own.accept(Sampling(True, seed), rows[: len(given.tokens) + 1], 1, given)[1][0]] += 1
    wanted = target * 2_000
    assert float(((counts - wanted) ** 2 / wanted).sum()) > 18.4


def spoil_from(position: int, patch: pytest.MonkeyPatch) -> None:
    """Makes the target's scores NaN from a position of the text on, whatever was proposed."""
    accept = Speculation.accept

    def spoiled(self: Speculation, sampling: Sampling, scores: Tensor, at: int, candidates: Candidates) -> Any:
        scores = scores.clone()
        scores[max(0, position - at) :] = NAN
        return accept(self, sampling, scores, at, candidates)

    patch.setattr(Speculation, "accept", spoiled)


def read_to_end(engine: specstream.Engine, tokens: list[int]) -> None:
    """Adds what steps produce."""
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.new_token_ids]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_what_comes_before_is_delivered_at_every_depth(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine(num_speculative_tokens=depth) as engine:
        for count in range(8):
            with monkeypatch.context() as patch:
                spoil_from(PROMPT + count, patch)
                tokens: list[int] = []
                request = engine.submit(prompt(PROMPT), max_new_tokens=20)
                with pytest.raises(InvalidDistribution, match=f"request {request}: .* position {PROMPT + count} "):
                    read_to_end(engine, tokens)
                assert tokens == best(prompt(PROMPT), count)
                engine.reset()
                if count:  # the text ends before
                    out: Any = engine.generate([list(prompt(PROMPT))], max_new_tokens=count)
                    assert out[0, PROMPT:].tolist() == tokens
    check_free(engine)
