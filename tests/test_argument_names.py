"""Arguments under other names than ours, those of other libraries among them, and settings that are not supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specstream.engine import Engine
from tests.helpers import named, new_engine
from tests.test_errors import THREE, Arguments, check_refused


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


OF_GENERATE = "allowed: an argument of specstream's generate."
ZEROS: list[tuple[str, Any]] = [
    ("max_time", 0),
    ("max_time", 0.0),
    ("guidance_scale", 0),
    ("guidance_scale", 0.0),
    ("forced_bos_token_id", 0),
    ("top_h", 0),
    ("prompt_lookup_num_tokens", 0),
    ("prefill_chunk_size", 0),
    ("assistant_early_exit", 0),
    ("dola_layers", 0),
    ("num_beams", 0),
    ("force_words_ids", []),
]

GENERATE: list[tuple[Arguments, str]] = [
    ({"max_tokens": 3}, f"max_tokens: got 3; {OF_GENERATE} It is called max_new_tokens here."),
    ({"stop": "a"}, f"stop: got 'a'; {OF_GENERATE} It is called stop_strings here."),
    ({"n": 2}, f"n: got 2; {OF_GENERATE} It is called num_return_sequences here."),
    ({"ignore_eos": True}, f"ignore_eos: got True; {OF_GENERATE} Pass eos_token_id=None."),
    (
        {"top_logprobs": 3},
        f"top_logprobs: got 3; {OF_GENERATE} "
        "Pass logprobs=True, for the log-probabilities of the tokens that are produced.",
    ),
    ({"attention_masks": 3}, f"attention_masks: got 3; {OF_GENERATE} Did you mean attention_mask?"),
    ({"update": 3}, f"update: got 3; {OF_GENERATE} Leave it out."),
    ({"engine": 3}, f"engine: got 3; {OF_GENERATE} Leave it out."),
    ({"model": 3}, f"model: got 3; {OF_GENERATE} Leave it out."),
    ({"caller": 3}, f"caller: got 3; {OF_GENERATE} Leave it out."),
    (
        {"num_speculative_tokens": 3},
        f"num_speculative_tokens: got 3; {OF_GENERATE} It is an option of specstream.compile, for all calls of an "
        "engine.",
    ),
    ({"inbox": []}, f"inbox: got []; {OF_GENERATE} Leave it out."),
    ({"synced_gpus": True}, f"synced_gpus: got True; {OF_GENERATE} Leave it out: the engine runs on one device."),
    (
        {"inputs": [[1]]},
        "inputs: got [[1]]; allowed: None beside input_ids, which it is another name of. Give one of them.",
    ),
    (
        {"exponential_decay_length_penalty": (1,), "eos_token_id": 1},
        "exponential_decay_length_penalty: got (1,); allowed: what transformers' logits processors allow. "
        "tuple index out of range",
    ),
    (
        {"exponential_decay_length_penalty": (1, 1.1)},
        "exponential_decay_length_penalty: got (1, 1.1); allowed: what transformers' logits processors allow. "
        "It needs an end token: give eos_token_id.",
    ),
    (
        {"early_stopping": "a"},
        "early_stopping: got 'a'; allowed: what transformers allows. "
        "`early_stopping` must be a boolean or 'never', but is a.",
    ),
    (
        {"prefix_allowed_tokens_fn": 3},
        "prefix_allowed_tokens_fn: got 3; allowed: a callable (batch_id, input_ids) that returns token ids.",
    ),
    *(
        ({name: value}, f"{name}: got {value!r}; allowed: None: it is not supported. Set {name} to None.")
        for name, value in ZEROS
    ),
]

STREAM: list[tuple[Arguments, str]] = [
    (
        {"streamer": object()},
        "streamer: got <object object>; allowed: an argument of specstream's stream. "
        "Read the pieces, or pass it to generate.",
    ),
    (
        {"max_tokens": 3},
        "max_tokens: got 3; allowed: an argument of specstream's stream. It is called max_new_tokens here.",
    ),
]

OF_SUBMIT = "allowed: an argument of specstream's submit."
SUBMIT: list[tuple[Arguments, str]] = [
    ({"request_id": 7}, f"request_id: got 7; {OF_SUBMIT} Leave it out."),
    (
        {"num_speculative_tokens": 3},
        f"num_speculative_tokens: got 3; {OF_SUBMIT} It is an option of specstream.compile, for all calls of an "
        "engine.",
    ),
    ({"inbox": []}, f"inbox: got []; {OF_SUBMIT} Leave it out."),
    ({"tokenizer": 3}, f"tokenizer: got 3; {OF_SUBMIT} Set engine.tokenizer."),
    ({"max_tokens": 3}, f"max_tokens: got 3; {OF_SUBMIT} It is called max_new_tokens here."),
    (
        {"stop": "a"},
        f"stop: got 'a'; {OF_SUBMIT} It is called stop_strings here. "
        "Give it in generation_config=GenerationConfig(stop_strings=...).",
    ),
    ({"n": 2}, f"n: got 2; {OF_SUBMIT} Submit the prompt as often as it is asked for."),
    (
        {"ignore_eos": True},
        f"ignore_eos: got True; {OF_SUBMIT} "
        "Leave it out: submit ends at no token unless eos_token_id or generation_config says so.",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), GENERATE, ids=named)
def test_arguments_of_generate(engine: Engine, arguments: Arguments, text: str) -> None:
    check_refused(engine, engine.generate, {"input_ids": THREE, "max_new_tokens": 2, **arguments}, text)


@pytest.mark.parametrize(("arguments", "text"), STREAM, ids=named)
def test_arguments_of_stream(engine: Engine, arguments: Arguments, text: str) -> None:
    check_refused(engine, engine.stream, {"input_ids": THREE, "max_new_tokens": 2, **arguments}, text)


@pytest.mark.parametrize(("arguments", "text"), SUBMIT, ids=named)
def test_arguments_of_submit(engine: Engine, arguments: Arguments, text: str) -> None:
    check_refused(engine, engine.submit, {"prompt": [1, 2, 3], "max_new_tokens": 2, **arguments}, text)
