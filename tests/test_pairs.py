"""Pairs that do not fit each other perfectly: the text is the target's all the same."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstream.api import check_tokenizers
from specstream.draft import Drafter
from specstream.errors import InvalidOption
from specstream.speculator import MOST_USELESS_ROUNDS
from tests.architectures import build
from tests.helpers import make_engine, model, prompt, reference


@pytest.mark.parametrize(("target_size", "draft_size"), [(128, 120), (120, 128)])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rejection", ["standard", "coupled"])
def test_vocabularies_padded_to_different_sizes(
    target_size: int, draft_size: int, do_sample: bool, rejection: str
) -> None:
    """transformers 45307. The prompt holds ids that the smaller draft has no embedding for."""
    target, draft = build("qwen3", vocab_size=target_size), build("qwen3", vocab_size=draft_size)
    ids = [*range(target_size - 10, target_size), 3, 5]
    options: dict[str, Any] = {"max_model_len": 64, "rejection_sample_method": rejection}
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": do_sample, "seed": 1}
    with make_engine(target, draft, **options) as engine:
        ours: Any = engine.generate([ids], **arguments)
        assert engine.metrics().num_draft_tokens > 0
    assert int(ours.max()) < target_size
    if not do_sample or rejection == "coupled":
        with make_engine(target, None, **options) as engine:
            alone: Any = engine.generate([ids], **arguments)
        assert torch.equal(ours, alone)


def tokenizer(vocab: dict[str, int]) -> Any:
    return SimpleNamespace(get_vocab=lambda: vocab)


def test_tokenizers_that_differ_are_refused_with_the_first_id() -> None:
    ours = tokenizer({"a": 0, "b": 1, "c": 2})
    check_tokenizers(ours, tokenizer({"a": 0, "b": 1, "c": 2, "padding": 3}))
    check_tokenizers(ours, None)
    with pytest.raises(InvalidOption) as error:
        check_tokenizers(ours, tokenizer({"a": 0, "x": 1, "y": 2}))
    assert str(error.value) == (
        "draft: got \"a tokenizer whose id 1 is 'x'\"; allowed: the target's tokenizer, whose id 1 is 'b'. "
        "Use a draft of the same family, or draft=None."
    )


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_that_yields_nan(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-vlm 1931: the target's text, a warning, and no drafting after some useless rounds."""
    target = model("qwen3")
    feed = Drafter._feed
    calls = 0

    def broken(self: Drafter, rows: dict[int, list[int]], *, logits: bool) -> dict[int, torch.Tensor]:
        nonlocal calls
        calls += 1
        return {seat: torch.full_like(row, float("nan")) for seat, row in feed(self, rows, logits=logits).items()}

    monkeypatch.setattr(Drafter, "_feed", broken)
    count = MOST_USELESS_ROUNDS + 20
    options: dict[str, Any] = {"max_model_len": 256, "rejection_sample_method": "coupled"}
    arguments: dict[str, Any] = {"max_new_tokens": count, "do_sample": do_sample, "seed": 3}
    with make_engine(target, None, **options) as engine:
        alone: Any = engine.generate([list(prompt(9))], **arguments)
    with (
        make_engine(target, model("qwen3", seed=1), **options) as engine,
        pytest.warns(UserWarning, match="speculation is off for request 0, whose text is not affected"),
    ):
        ours: Any = engine.generate([list(prompt(9))], **arguments)
    assert torch.equal(ours, alone)
    assert calls <= MOST_USELESS_ROUNDS + 1


def test_a_useless_draft_is_turned_off_and_a_useful_one_is_not() -> None:
    target = model("qwen3")
    count = MOST_USELESS_ROUNDS + 30
    expected = reference(target, prompt(9), count).tokens
    arguments: dict[str, Any] = {"max_new_tokens": count, "return_dict_in_generate": True}
    with make_engine(target, target, max_model_len=256) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        useful: Any = engine.generate([list(prompt(9))], **arguments)
    assert useful.requests[0].token_ids == expected
    never = build("llama", vocab_size=96, seed=5)
    with torch.no_grad():
        head: Any = never.get_submodule("lm_head")
        head.weight.zero_()[95] = 0.0
    with make_engine(target, never, max_model_len=256) as engine:
        useless: Any = engine.generate([list(prompt(9))], **arguments)
        proposed = engine.metrics().num_draft_tokens
    assert useless.requests[0].token_ids == expected
    assert proposed < 4 * count
