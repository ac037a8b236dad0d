"""The engine as the decoding loop of transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

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
        with pytest.raises(InvalidOption, match="logits_processor: got 'RepetitionPenaltyLogitsProcessor'"):
            target.generate(
                ids,
                custom_generate=engine.custom_generate,
                max_new_tokens=5,
                repetition_penalty=1.2,
                do_sample=False,
                logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)]),
            )
        assert not engine.has_unfinished
