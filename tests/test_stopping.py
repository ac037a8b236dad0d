"""Ends that are not end tokens: stop strings and criteria, inside blocks too; and processors with state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessor, StoppingCriteria

from specstream.errors import InvalidOption
from specstream.models.tiny import TARGET
from tests.helpers import make_engine, model, prompt


@pytest.mark.parametrize("depth", [1, 4, 9])
@pytest.mark.parametrize("draft", [None, 0, 1])
def test_stop_strings_end_where_transformers_ends(depth: int, draft: int | None) -> None:
    target: Any = model("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = torch.tensor([prompt(9)])
    arguments: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0}
    whole = target.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0, 9:].tolist()
    stops = {tokenizer.decode(whole[i : i + length]) for i in range(22) for length in (1, 2, 3)}
    ended = set()
    proposer = None if draft is None else model("qwen3", seed=draft)
    with make_engine(target, proposer, max_model_len=64, num_speculative_tokens=depth) as engine:
        engine.tokenizer = tokenizer
        for stop in sorted(stops):
            reference = target.generate(
                ids, attention_mask=torch.ones_like(ids), stop_strings=[stop], tokenizer=tokenizer, **arguments
            )
            ours: Any = engine.generate(ids, stop_strings=[stop], return_dict_in_generate=True, **arguments)
            assert torch.equal(ours.sequences, reference), stop
            reason = ours.requests[0].finish_reason
            assert (reason == "stop") == (reference.shape[1] < 9 + 24) or reason == "stop"
            ended.add(reference.shape[1])
    assert len(ended) > 5


def test_stop_strings_need_a_tokenizer() -> None:
    with make_engine(model("qwen3"), None, max_model_len=64) as engine:
        with pytest.raises(InvalidOption, match="stop_strings: got 'a'; allowed: None without a tokenizer"):
            engine.generate([[1, 2]], stop_strings="a")
        assert not engine.has_unfinished


class Recorder(StoppingCriteria):
    """Keeps what it is shown, and stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: object) -> Any:
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_criteria_see_committed_tokens_one_more_at_a_time() -> None:
    ids = list(prompt(9))
    with make_engine(model("qwen3"), model("qwen3", seed=1), max_model_len=64, num_speculative_tokens=5) as engine:
        recorder = Recorder(9 + 7)
        out: Any = engine.generate([ids], max_new_tokens=20, stopping_criteria=[recorder], return_dict_in_generate=True)
    assert out.requests[0].finish_reason == "stop"
    text = ids + out.requests[0].token_ids
    assert len(text) == 9 + 7
    assert recorder.seen == [text[:length] for length in range(10, 17)]


class Alternating(LogitsProcessor):
    """Has state: forbids even and odd tokens in turn, by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = -float("inf")
        return scores


def test_processors_with_state_see_committed_tokens_only() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(9)])
    reference = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, logits_processor=[Alternating()], pad_token_id=0
    )
    with make_engine(target, target, max_model_len=64) as engine:
        ours: Any = engine.generate(ids, max_new_tokens=12, logits_processor=[Alternating()])
        assert torch.equal(ours, reference)
        assert engine.metrics().num_draft_tokens == 0


class Confident(StoppingCriteria):
    """Stops after tokens that were all likely enough; transformers gives it the scores if they are kept."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: object) -> Any:
        likely = bool(scores) and all(bool((row.softmax(-1).max(-1).values > 0.02).all()) for row in scores)
        return torch.full((len(input_ids),), likely and len(scores) >= 3)


def test_criteria_see_the_scores_that_are_kept() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(9)])
    arguments: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        do_sample=False,
        stopping_criteria=[Confident()],
        **arguments,
    )
    with make_engine(target, model("qwen3", seed=1), max_model_len=64) as engine:
        ours: Any = engine.generate(ids, stopping_criteria=[Confident()], **arguments)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.sequences.shape[1] == 9 + 3
