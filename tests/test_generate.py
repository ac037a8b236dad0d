"""`generate`: transformers' arguments, shapes and padding; what it refuses; its output and its streamer."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from specstream.errors import InvalidOption
from specstream.generate import GenerateOutput
from specstream.sequence import FinishReason
from tests.helpers import (
    best,
    model,
    new_engine,
    prompt,
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"beams": 2}, "beams: got 2; allowed: an argument of specstream's generate. Leave it out."),
        ({"num_beams": 2}, "num_beams: got 2; allowed: None: it is not supported. Set num_beams to None."),
        ({"streamer": object()}, "streamer: got 'a batch of 2'; allowed: a batch of one."),
        ({"max_length": 3}, "max_length: got 3; allowed: more than the 3 tokens of the prompt."),
        (
            {"attention_mask": torch.ones(2, 2)},
            "attention_mask: got 'shape (2, 2)'; allowed: the shape of input_ids, (2, 3).",
        ),
        (
            {"input_ids": torch.ones(3)},
            "input_ids: got 'shape (3,)'; allowed: shape [batch, length], neither of them 0.",
        ),
        ({"input_ids": torch.ones(2, 3)}, "input_ids: got torch.float32; allowed: int64 or int32 token ids."),
    ],
)
def test_arguments_that_generate_refuses(arguments: dict[str, Any], text: str) -> None:
    with new_engine() as engine:
        with pytest.raises(InvalidOption) as error:
            engine.generate(**dict[str, Any](input_ids=torch.ones(2, 3, dtype=torch.int64)) | arguments)
        assert str(error.value) == text
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("name", "value"),
    [("guidance_scale", 1.3), ("penalty_alpha", 0.5), ("max_time", 0.0), ("num_beams", 3)],
)
def test_what_the_models_own_generation_config_asks_for_is_not_ignored(name: str, value: Any) -> None:
    with new_engine() as engine:
        engine.generation_config = GenerationConfig(max_new_tokens=5, **{name: value})
        with pytest.raises(InvalidOption) as error:
            engine.generate([[1, 2]])
        assert str(error.value) == (
            f"generation_config.{name}: got {value!r}; allowed: None: it is not supported. "
            f"Set generation_config.{name} to None."
        )
        engine.generation_config = GenerationConfig(max_new_tokens=5, repetition_penalty=1.0, min_length=0, num_beams=1)
        assert isinstance(engine.generate([[1, 2]]), Tensor)


def transformers_batch(target: Any, ids: Tensor, mask: Tensor, **arguments: Any) -> Tensor:
    out = target.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    assert isinstance(out, Tensor)
    return out


def test_a_left_padded_batch_equals_transformers() -> None:
    target, pad = model("qwen3"), 7
    prompts = [prompt(3), prompt(11), prompt(8, 1)]
    ids = torch.tensor([[pad] * (11 - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (11 - len(p)) + [1] * len(p) for p in prompts])
    end = best(prompts[0], 6)[5]
    with new_engine() as engine:
        for arguments in (
            {"max_new_tokens": 12},
            {"max_new_tokens": 12, "eos_token_id": end, "pad_token_id": pad},
            {"max_new_tokens": 12, "eos_token_id": [end, best(prompts[1], 3)[2]], "pad_token_id": pad},
            {"max_length": 20},
            {},
        ):
            theirs = transformers_batch(target, ids, mask, **arguments)
            ours = engine.generate(ids, attention_mask=mask, **arguments)
            assert isinstance(ours, Tensor)
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist()


def test_a_right_padded_batch_has_transformers_shape_and_each_rows_own_text() -> None:
    target, pad = model("qwen3"), 7
    prompts = [prompt(3), prompt(11), prompt(8, 1)]
    ids = torch.tensor([list(p) + [pad] * (11 - len(p)) for p in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (11 - len(p)) for p in prompts])
    with new_engine() as engine:
        ours = engine.generate(ids, attention_mask=mask, max_new_tokens=9)
        assert isinstance(ours, Tensor)
        assert ours.shape == transformers_batch(target, ids, mask, max_new_tokens=9).shape
        assert ours[:, :11].tolist() == ids.tolist()
        for row, ids_of_row in zip(ours, prompts, strict=True):
            assert row[11:].tolist() == best(ids_of_row, 9)


def test_rows_that_end_early_are_padded() -> None:
    short, long = prompt(9), prompt(5)
    end = next(t for i, t in enumerate(best(short)) if i > 2 and t not in best(short)[:i] and t not in best(long, 12))
    index = best(short).index(end)
    with new_engine() as engine:
        for pad, fill in ((None, end), (5, 5)):
            out = engine.generate([list(short), list(long)], max_new_tokens=12, eos_token_id=end, pad_token_id=pad)
            assert isinstance(out, Tensor)
            assert out.shape == (2, 9 + 12)
            assert out[0, 9:].tolist() == best(short, index + 1) + [fill] * (11 - index)
            assert out[1, 9:].tolist() == best(long, 12)


def test_generate_output_and_streamer() -> None:
    given: list[Tensor] = []
    ended = []

    class Keep:
        def put(self, value: Tensor) -> None:
            given.append(value)

        def end(self) -> None:
            ended.append(len(given))

    with new_engine() as engine:
        out = engine.generate(
            torch.tensor([prompt(9)], dtype=torch.int32),
            max_new_tokens=10,
            streamer=Keep(),
            return_dict_in_generate=True,
        )
        assert isinstance(out, GenerateOutput)
        assert out.sequences.dtype == torch.int32
        assert out.sequences.tolist() == [[*prompt(9), *best(prompt(9), 10)]]
        (request,) = out.requests
        assert request.prompt_token_ids == list(prompt(9))
        assert request.token_ids == best(prompt(9), 10)
        assert request.finish_reason is FinishReason.LENGTH
        # One token comes with the prompt, four with each block of three candidates, and one is left.
        assert (request.metrics.num_verify_rounds, request.metrics.num_accepted_tokens) == (3, 6)
        assert request.metrics.mean_acceptance_length == 3.0
    assert [value.tolist() for value in given] == [[list(prompt(9))], *([token] for token in best(prompt(9), 10))]
    assert ended == [len(given)]


def random_arguments(chooser: random.Random, width: int) -> dict[str, Any]:
    """A valid combination of what transformers' greedy `generate` takes."""
    arguments: dict[str, Any] = {"pad_token_id": chooser.choice([0, 95])}
    if chooser.random() < 0.5:
        arguments["max_new_tokens"] = chooser.randrange(1, 14)
    else:
        arguments["max_length"] = width + chooser.randrange(1, 14)
    several = sorted(chooser.sample(range(96), 30))
    options: dict[str, Any] = {
        "eos_token_id": chooser.choice([several[0], several]),
        "repetition_penalty": chooser.choice([0.8, 1.3]),
        "no_repeat_ngram_size": chooser.choice([1, 2, 3]),
        "min_new_tokens": chooser.randrange(1, 6),
        "bad_words_ids": [[chooser.randrange(96)], chooser.sample(range(96), 2)],
        "suppress_tokens": chooser.sample(range(96), 20),
        "begin_suppress_tokens": chooser.sample(range(96), 50),
        "use_cache": True,
        "min_length": width + chooser.randrange(1, 6),
    }
    return arguments | {name: options[name] for name in chooser.sample(sorted(options), chooser.randrange(4))}


DEPTHS = [(1, "min"), (4, "64KiB"), (7, "auto")]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_random_greedy_calls_give_what_transformers_gives() -> None:
    """200 calls: same shapes, same padding, same stopping, same tokens."""
    chooser = random.Random(0)
    target: Any = model("qwen3")
    engines = [
        new_engine(num_speculative_tokens=depth, gpu_kv_budget=budget, max_model_len=96) for depth, budget in DEPTHS
    ]
    for case in range(200):
        lengths = [chooser.randrange(1, 30) for _ in range(chooser.randrange(1, 4))]
        width = max(lengths)
        arguments = random_arguments(chooser, width)
        pad = arguments["pad_token_id"]
        rows = [[pad] * (width - length) + list(prompt(length, case + i)) for i, length in enumerate(lengths)]
        mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
        ids = torch.tensor(rows)
        expected = transformers_batch(target, ids, mask, **arguments)
        ours = engines[case % len(engines)].generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(cast(Tensor, ours), expected), (case, arguments)
    for engine in engines:
        engine.close()


def test_padding_inside_a_row_is_refused() -> None:
    with new_engine() as engine:
        ids = torch.tensor([[0, 0, 3, 4], [5, 0, 6, 7]])
        text = "attention_mask: got 'padding inside row 1'; allowed: padding at the left or at the right of a row."
        for arguments in ({"pad_token_id": 0}, {"attention_mask": (ids != 0).long()}):
            with pytest.raises(InvalidOption) as error:
                engine.generate(ids, max_new_tokens=2, **arguments)
            assert text in str(error.value)
        out: Any = engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0)
        assert out.shape == (2, 6)


def test_a_generation_config_as_the_second_argument() -> None:
    with new_engine() as engine:
        out: Any = engine.generate([list(prompt(9))], GenerationConfig(max_new_tokens=3))
        assert out[0, 9:].tolist() == best(prompt(9), 3)
