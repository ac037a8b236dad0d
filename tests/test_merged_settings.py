"""Settings of the call, its generation_config and the model's, merged as transformers merges them; and masks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from specstream.engine import Engine
from specstream.errors import InvalidOption
from specstream.sequence import FinishReason
from specstream.settings import merge_settings
from tests.helpers import best, make_engine, model, new_engine, prompt

PROMPT = prompt(9)
END = best(PROMPT)[5]
IDS = torch.tensor([PROMPT])
PAIR = torch.tensor([PROMPT, prompt(9, 1)])


@contextmanager
def engine_with(defaults: dict[str, Any]) -> Iterator[tuple[Any, Engine]]:
    """The target and its engine, both with these settings as the model's own."""
    target: Any = copy.copy(model("qwen3"))
    target.generation_config = GenerationConfig(**defaults)
    with new_engine() as engine:
        engine.generation_config = target.generation_config
        yield target, engine


def check_alike(target: Any, engine: Engine, ids: Tensor, **arguments: Any) -> Tensor:
    """The engine gives what transformers gives, by itself and as transformers' decoding loop."""
    theirs = target.generate(ids, **copy.deepcopy(arguments))
    ours: Any = engine.generate(ids, **copy.deepcopy(arguments))
    looped = target.generate(ids, custom_generate=engine.custom_generate, **copy.deepcopy(arguments))
    assert ours.tolist() == theirs.tolist()
    assert looped.tolist() == theirs.tolist()
    assert isinstance(theirs, Tensor)
    return theirs


DEFAULTS: list[dict[str, Any]] = [
    {"eos_token_id": END, "pad_token_id": 7},
    {"eos_token_id": [END, 3]},
    {"repetition_penalty": 1.5, "max_new_tokens": 6},
    {"max_length": 15},
    {"max_new_tokens": 4, "max_length": 30},
    {"eos_token_id": END, "min_new_tokens": 8, "max_new_tokens": 12},
    {"eos_token_id": END, "min_length": 18, "pad_token_id": 5},
    {"no_repeat_ngram_size": 1, "suppress_tokens": [END]},
]
CALLS: list[dict[str, Any]] = [
    {},
    {"generation_config": {}},
    {"generation_config": {"max_new_tokens": 10}},
    {"generation_config": {"max_length": 19}},
    {"generation_config": {"max_new_tokens": 10, "repetition_penalty": 1.2, "eos_token_id": 1}},
    {"generation_config": {"min_length": 12}, "max_new_tokens": 9},
    {"generation_config": {"repetition_penalty": 1.0, "min_new_tokens": 0}, "max_length": 21},
    {"max_length": 17},
    {"eos_token_id": None, "max_new_tokens": 9},
    {"generation_config": {"eos_token_id": 2}, "eos_token_id": None},
    {"min_length": 20, "max_new_tokens": 14},
    {"min_new_tokens": 2, "min_length": 20, "max_new_tokens": 14},
]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("defaults", DEFAULTS, ids=str)
def test_what_the_call_leaves_open_is_the_models(defaults: dict[str, Any]) -> None:
    texts = set()
    with engine_with(defaults) as (target, engine):
        for call in CALLS:
            arguments = dict(call)
            if "generation_config" in arguments:
                arguments["generation_config"] = GenerationConfig(**arguments["generation_config"])
            for ids in (IDS, PAIR):
                texts.add(str(check_alike(target, engine, ids, **arguments).tolist()))
    assert len(texts) > 4


def test_a_generation_config_that_was_given_is_not_changed() -> None:
    given = GenerationConfig(max_new_tokens=3)
    before = given.to_dict()
    with engine_with({"eos_token_id": END, "repetition_penalty": 1.3}) as (_, engine):
        engine.generate(IDS, generation_config=given, min_new_tokens=1)
    assert given.to_dict() == before


def test_what_the_models_own_config_asks_for_beside_another_is_not_ignored() -> None:
    with engine_with({"num_beams": 3}) as (_, engine):
        with pytest.raises(InvalidOption, match=r"generation_config\.num_beams: got 3"):
            engine.generate(IDS, generation_config=GenerationConfig(max_new_tokens=3))
        engine.generate(IDS, generation_config=GenerationConfig(max_new_tokens=3, num_beams=1))


def test_top_k_is_fifty_unless_the_call_says_none() -> None:
    assert merge_settings(None, do_sample=True).top_k == 50
    assert merge_settings(GenerationConfig(top_k=7), GenerationConfig(do_sample=True)).top_k == 7
    off = merge_settings(GenerationConfig(top_k=7), do_sample=True, top_k=None)
    assert off.top_k is None
    assert merge_settings(GenerationConfig(top_k=7), off).top_k is None, "merged settings are filled again"


NEUTRAL: list[dict[str, Any]] = [
    {"guidance_scale": 1},
    {"guidance_scale": 1.0},
    {"disable_compile": True},
    {"temperature": 1.0},
    {"temperature": 1, "top_p": 1.0, "typical_p": 1.0, "top_k": 50},
    {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
    {"renormalize_logits": True},
    {"renormalize_logits": False, "token_healing": False, "output_attentions": False},
    {"use_cache": False},
    {"penalty_alpha": 0.0},
    {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "num_beams": 1},
    {"assistant_model": None, "streamer": None, "synced_gpus": None, "prefix_allowed_tokens_fn": None},
    {"synced_gpus": False},
    {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 1, "pad_token_id": 0},
]


@pytest.mark.parametrize("settings", NEUTRAL, ids=str)
def test_what_changes_nothing_is_taken(settings: dict[str, Any]) -> None:
    with engine_with({}) as (target, engine):
        check_alike(target, engine, IDS, max_new_tokens=7, **settings)


def test_renormalized_scores_are_transformers() -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 4, "renormalize_logits": True, "output_scores": True}
    with engine_with({}) as (target, engine):
        theirs = target.generate(IDS, return_dict_in_generate=True, **arguments)
        ours: Any = engine.generate(IDS, return_dict_in_generate=True, **arguments)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-5, rtol=0)
    assert torch.stack(ours.scores).exp().sum(-1).sub(1).abs().max() < 1e-4


SHORT = prompt(4)
PADDED = [[0, 0, 0, 0, 0, *(token or 1 for token in SHORT)], [token or 1 for token in PROMPT]]
MASKS: list[dict[str, Any]] = [
    {"pad_token_id": 0},
    {"pad_token_id": 0, "eos_token_id": END},
    {"pad_token_id": 0, "eos_token_id": 0},
    {"pad_token_id": 0, "eos_token_id": [END, 0]},
    {"pad_token_id": 95},
    {"eos_token_id": 0},
    {"eos_token_id": END},
    {"generation_config": GenerationConfig(pad_token_id=0)},
    {"pad_token_id": 0, "attention_mask": torch.ones(2, 9, dtype=torch.int64)},
    {"pad_token_id": 0, "attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * 9])},
]


@pytest.mark.parametrize("arguments", MASKS, ids=str)
@pytest.mark.parametrize("defaults", [{}, {"pad_token_id": 0}, {"eos_token_id": 0}], ids=str)
def test_padding_is_known_when_transformers_knows_it(defaults: dict[str, Any], arguments: dict[str, Any]) -> None:
    with engine_with(defaults) as (target, engine):
        check_alike(target, engine, torch.tensor(PADDED), max_new_tokens=6, **arguments)
        check_alike(target, engine, torch.tensor(PADDED[1:]), max_new_tokens=6, **_first_row(arguments))


def _first_row(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value[1:] if isinstance(value, Tensor) else value for name, value in arguments.items()}


def test_prompts_in_every_form() -> None:
    rows = [list(PROMPT), list(prompt(9, 1))]
    with engine_with({}) as (target, engine):
        expected = target.generate(torch.tensor(rows), max_new_tokens=5).tolist()
        forms: list[Any] = [
            rows,
            torch.tensor(rows),
            np.array(rows),
            np.array(rows, np.int32),
            np.array(rows, np.uint8),
            [torch.tensor(row) for row in rows],
            [np.array(row) for row in rows],
            tuple(map(tuple, rows)),
        ]
        for form in forms:
            ours: Any = engine.generate(form, max_new_tokens=5)
            assert ours.tolist() == expected
            ours = engine.generate(inputs=form, max_new_tokens=5)
            assert ours.tolist() == expected
            assert {piece.index for piece in engine.stream(inputs=form, max_new_tokens=5)} == {0, 1}
        mask = np.array([[0] * 5 + [1] * 4, [1] * 9])
        padded: Any = engine.generate(np.array(PADDED), attention_mask=mask, max_new_tokens=5)
        theirs = target.generate(torch.tensor(PADDED), attention_mask=torch.tensor(mask), max_new_tokens=5)
        assert padded.tolist() == theirs.tolist()


def test_submit_ends_at_no_token_unless_told() -> None:
    with engine_with({"eos_token_id": END, "repetition_penalty": 1.5}) as (_, engine):
        engine.submit(PROMPT, max_new_tokens=12)
        (output,) = [step.output for _ in range(20) for step in engine.step() if step.output]
        assert output.token_ids == best(PROMPT, 12)
        assert output.finish_reason is FinishReason.LENGTH


def test_a_row_that_a_criterion_stops_is_padded_without_an_end_token_too() -> None:
    """transformers goes on in such a row until all have stopped; here it is done."""

    def stops(input_ids: Tensor, scores: Any) -> Any:
        return input_ids[:, -1] == best(PROMPT, 3)[2]

    with make_engine(model("qwen3"), None, max_model_len=64) as engine:
        out: Any = engine.generate(PAIR, max_new_tokens=8, stopping_criteria=[stops], pad_token_id=5)
    stopped = best(PROMPT, 3).index(best(PROMPT, 3)[2]) + 1
    assert out[0, 9:].tolist() == best(PROMPT, stopped) + [5] * (8 - stopped)
