"""Pairs that do not fit each other perfectly: the text is the target's all the same."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import specstream
from specstream.api import check_tokenizers
from specstream.draft import Drafter
from specstream.errors import InvalidOption
from specstream.speculator import MOST_USELESS_ROUNDS
from tests.architectures import build
from tests.helpers import check_free, make_engine, model, prompt, reference


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
        pytest.warns(UserWarning, match=r"NaN, for example\): speculation is off for request 0, whose text is not"),
    ):
        ours: Any = engine.generate([list(prompt(9))], **arguments)
    assert torch.equal(ours, alone)
    assert calls <= MOST_USELESS_ROUNDS + 1


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rejection", ["standard", "coupled"])
@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": list(range(50))},
        {"suppress_tokens": list(range(50)), "eta_cutoff": 1e-3},  # transformers refuses to compute its entropy
        {},
    ],
    ids=["all suppressed", "all suppressed, eta", "overflow"],
)
def test_a_draft_without_a_distribution_is_no_draft(
    do_sample: bool, rejection: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the draft's scores is all -inf or has +inf: every token is the target's own, and a warning."""
    target, draft = model("qwen3"), build("qwen3", vocab_size=50, seed=1)
    if not settings:
        sized, at = Drafter.sized, torch.tensor([7])
        monkeypatch.setattr(Drafter, "sized", lambda self, logits: sized(self, logits).index_fill(1, at, float("inf")))
    count = MOST_USELESS_ROUNDS + 6
    options: dict[str, Any] = {"max_model_len": 96, "rejection_sample_method": rejection}
    arguments: dict[str, Any] = {"max_new_tokens": count, "do_sample": do_sample, "seed": 3, **settings}
    if do_sample:
        arguments["top_k"] = 5
    else:
        arguments.pop("eta_cutoff", None)
    with make_engine(target, None, **options) as engine:
        alone: Any = engine.generate([list(prompt(9))], **arguments)
    with make_engine(target, draft, **options) as engine:
        with pytest.warns(UserWarning, match="speculation is off for request 0, whose text is not affected"):
            ours: Any = engine.generate([list(prompt(9))], **arguments)
        assert engine.metrics().num_draft_tokens == 0
    assert torch.equal(ours, alone)  # without candidates, standard takes the same numbers as the target alone


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


def test_a_warning_that_is_an_error_comes_when_everything_is_noted() -> None:
    """python -W error: each is raised, and nobody loses a token."""
    target, draft = model("qwen3"), build("qwen3", vocab_size=50, seed=1)
    count = MOST_USELESS_ROUNDS + 10
    suppressed = GenerationConfig(suppress_tokens=list(range(50)))
    prompts = [list(prompt(9, seed)) for seed in range(2)]
    with make_engine(target, None, max_model_len=96) as engine:
        alone: Any = engine.generate(prompts, max_new_tokens=count, suppress_tokens=list(range(50)))
    with make_engine(target, draft, max_model_len=96) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = [engine.submit(ids, max_new_tokens=count, generation_config=suppressed) for ids in prompts]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        raised = []
        while engine.has_unfinished:
            try:
                outputs = engine.step()
            except UserWarning as warning:
                raised.append(str(warning))
                continue
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
        assert engine.metrics().generated_tokens == 2 * count
        check_free(engine)
    assert [tokens[number] for number in numbers] == alone[:, 9:].tolist()
    assert [f"request {number}," in text for number, text in zip(numbers, raised, strict=True)] == [True, True]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("stated", [64, 256])
def test_a_draft_inherits_the_targets_rotary_scaling(stated: int) -> None:
    """The draft is the target but for its scaling: with the target's, every candidate is accepted."""
    target = build("qwen3", eos_token_id=None, rope_parameters=dict(YARN), max_position_embeddings=stated)
    draft = build("qwen3", eos_token_id=None, rope_parameters=dict(PLAIN), max_position_embeddings=64)
    draft.load_state_dict(target.state_dict())
    before = [(name, buffer.clone()) for name, buffer in draft.named_buffers()]
    modules, config = list(draft.modules()), draft.config.to_dict()  # type: ignore[operator,union-attr]
    with pytest.warns(UserWarning, match="covers 64 positions: it is given the target's rotary scaling, yarn"):
        engine = specstream.compile(target, draft, max_model_len=256, gpu_kv_budget="min", chunk_tokens=8)
    with engine:
        out: Any = engine.generate([list(prompt(100))], max_new_tokens=40)
        assert engine.metrics().draft_acceptance_rate == 1.0
        assert engine.metrics().num_draft_tokens > 20
    assert out[0, 100:].tolist() == reference(target, prompt(100), 40).tokens
    assert list(draft.modules()) == modules
    assert draft.config.to_dict() == config  # type: ignore[operator,union-attr]
    for (name, buffer), (_, old) in zip(draft.named_buffers(), before, strict=True):
        assert torch.equal(buffer, old), name


@pytest.mark.parametrize(
    "draft_changes",
    [
        {"rope_parameters": dict(PLAIN, rope_theta=1e5), "max_position_embeddings": 64},
        {"rope_parameters": dict(PLAIN), "max_position_embeddings": 80},
        {"rope_parameters": dict(YARN, factor=1.5, original_max_position_embeddings=32), "max_position_embeddings": 32},
    ],
)
def test_a_draft_of_another_kind_keeps_its_own_positions(draft_changes: dict[str, Any]) -> None:
    target = build("qwen3", eos_token_id=None, rope_parameters=dict(YARN), max_position_embeddings=64)
    draft = build("qwen3", eos_token_id=None, **draft_changes)
    with pytest.warns(UserWarning, match="positions and max_model_len is 256: beyond"):
        engine = specstream.compile(target, draft, max_model_len=256, gpu_kv_budget="min", chunk_tokens=8)
    with engine:
        out: Any = engine.generate([list(prompt(40))], max_new_tokens=60)
    assert out[0, 40:].tolist() == reference(target, prompt(40), 60).tokens
