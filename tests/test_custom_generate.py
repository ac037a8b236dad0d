"""The engine as the decoding loop of transformers' own `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import specstream
from specstream.errors import InvalidOption
from specstream.generate import GenerateOutput
from tests.helpers import make_engine, model, prompt
from tests.test_stopping import Alternating, Recorder


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 9},
        {"max_length": 20, "repetition_penalty": 1.3},
        {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": list(range(0, 96, 3))},
        {"max_new_tokens": 7, "suppress_tokens": [1, 2, 3], "num_return_sequences": 1, "eos_token_id": 5},
    ],
)
def test_transformers_generate_with_the_engine_gives_what_it_gives_without(settings: dict[str, Any]) -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(9)])
    with make_engine(target, model("qwen3", seed=1), max_model_len=64, chunk_tokens=4, gpu_kv_budget="min") as engine:
        plain = target.generate(ids, do_sample=False, pad_token_id=0, **settings)
        ours = target.generate(ids, do_sample=False, pad_token_id=0, custom_generate=engine.custom_generate, **settings)
        assert engine.metrics().generated_tokens > 0
    assert ours.tolist() == plain.tolist()


@pytest.mark.filterwarnings("error:.*takes the place")
def test_a_left_padded_batch_and_scores() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([[0, 0, 0, *prompt(6)], prompt(9)])
    mask = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with make_engine(target, None, max_model_len=64) as engine:
        plain = target.generate(ids, **arguments)
        ours = target.generate(ids, custom_generate=engine.custom_generate, **arguments)
    assert isinstance(ours, GenerateOutput)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.scores is not None
    torch.testing.assert_close(torch.stack(tuple(ours.scores)), torch.stack(plain.scores), atol=1e-5, rtol=0)


def test_sampling_with_a_seed_of_ones_own() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(9)])
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 8, "seed": 3}
    with make_engine(target, None, max_model_len=64) as engine:
        ours = target.generate(ids, custom_generate=engine.custom_generate, num_return_sequences=2, **settings)
        direct: Any = engine.generate(ids, num_return_sequences=2, **settings)
    assert ours.tolist() == direct.tolist()


def test_the_callers_own_processors_and_criteria() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(9)])
    with make_engine(target, None, max_model_len=64) as engine:
        processor, criterion = Alternating(), Recorder(60)
        ours = target.generate(
            ids,
            custom_generate=engine.custom_generate,
            max_new_tokens=5,
            repetition_penalty=1.2,
            do_sample=False,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        assert processor.calls == 5
        assert len(criterion.seen) == 5
        assert ours.shape == (1, 14)
        assert not engine.has_unfinished


IDS = torch.tensor([prompt(9)])


def prepared(**changes: Any) -> dict[str, Any]:
    """What transformers prepares for one prompt."""
    return {
        "generation_config": GenerationConfig(max_new_tokens=3, max_length=12),
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList(),
        **changes,
    }


def held() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    return cache


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids"),
        ({"past_key_values": held()}, "cache"),
        ({"past_key_values": DynamicCache()}, "cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q"),
        ({"inputs_embeds": torch.zeros(1, 9, 32, dtype=torch.float64)}, "inputs_embeds"),
    ],
)
def test_what_is_meant_for_the_models_forward_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    target: Any = model("qwen3")
    with make_engine(target, None, max_model_len=64) as engine:
        with pytest.raises(InvalidOption, match=f"^{name}: got"):
            target.generate(IDS, custom_generate=engine.custom_generate, max_new_tokens=3, **arguments)
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.arange(9)[None] + 1),
        ("position_ids", torch.arange(8)[None]),
        ("position_ids", [list(range(9))]),
        ("past_key_values", ((),)),
        ("token_type_ids", torch.zeros(1, 9)),
        ("assistant_model", object()),
        ("streamer", object()),
        ("synced_gpus", True),
        ("past_key_values", held()),
        ("cache", held()),
    ],
)
def test_what_transformers_does_not_pass_on_is_refused_too(name: str, value: Any) -> None:
    target: Any = model("qwen3")
    with make_engine(target, None, max_model_len=64) as engine, pytest.raises(InvalidOption, match=f"^{name}: got"):
        engine.custom_generate(target, IDS, **prepared(**{name: value}))


def test_what_transformers_itself_prepares_is_taken() -> None:
    target: Any = model("qwen3")
    padded = torch.tensor([[0, 0, *prompt(7)]])
    mask = torch.tensor([[0, 0] + [1] * 7])
    with make_engine(target, None, max_model_len=64) as engine:
        expected: Any = engine.generate(padded, attention_mask=mask, max_new_tokens=3)
        for positions in (torch.tensor([[0, 0, *range(7)]]), None):
            arguments = prepared(attention_mask=mask, position_ids=positions, cache=DynamicCache(), use_cache=True)
            ours: Any = engine.custom_generate(target, padded, **arguments, logits_to_keep=1, synced_gpus=False)
            assert ours.tolist() == expected.tolist()
        given = target.generate(
            padded,
            attention_mask=mask,
            position_ids=torch.tensor([[0, 0, *range(7)]]),
            custom_generate=engine.custom_generate,
            max_new_tokens=3,
            logits_to_keep=1,
        )
        assert given.tolist() == expected.tolist()


def test_an_all_ones_mask_is_not_inferred_again() -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([[0, 0, *prompt(7)]])
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 4}
    with make_engine(target, None, max_model_len=64) as engine:
        theirs = target.generate(ids, **arguments)
        assert target.generate(ids, custom_generate=engine.custom_generate, **arguments).tolist() == theirs.tolist()
        assert engine.generate(ids, **arguments).tolist() == theirs.tolist()  # type: ignore[union-attr]


def test_another_model_than_the_target_is_refused() -> None:
    target: Any = copy.deepcopy(model("qwen3"))
    other: Any = model("qwen3", seed=1)
    with specstream.compile(target, None, max_model_len=64) as engine:
        assert target.generate(IDS, custom_generate=engine.custom_generate, max_new_tokens=3).shape == (1, 12)
        with pytest.raises(
            InvalidOption, match=r"model: got '.*'; allowed: the target that the engine was compiled from"
        ):
            other.generate(IDS, custom_generate=engine.custom_generate, max_new_tokens=3)
        assert not engine.has_unfinished


def test_transformers_keeps_its_tokenizer_and_its_streamer() -> None:
    """Should this fail, they can be supported, and the README says otherwise."""
    target: Any = model("qwen3")
    given: list[Any] = []

    class Keep:
        def put(self, value: Any) -> None:
            given.append(value)

        def end(self) -> None:
            given.append("end")

    with make_engine(target, None, max_model_len=64) as engine:
        target.generate(IDS, custom_generate=engine.custom_generate, max_new_tokens=3, streamer=Keep())
        assert len(given) == 1, "more than the prompt"
        with pytest.raises(ValueError, match="could not locate a tokenizer"):
            target.generate(
                IDS, custom_generate=engine.custom_generate, max_new_tokens=3, stop_strings="a", tokenizer=object()
            )
