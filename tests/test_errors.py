"""The exact text of what each wrong input to generate, submit and stream is told; the engine then goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GenerationConfig, TopKLogitsWarper

from specstream.engine import Engine
from specstream.errors import InvalidOption, shortened
from tests.helpers import best, named, new_engine, prompt

Arguments = dict[str, Any]

NAN, INFINITY = float("nan"), float("inf")
THREE = torch.tensor([[1, 2, 3]])


def fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(shape, dtype=torch.int64)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


def check_refused(engine: Engine, call: Callable[..., Any], arguments: Arguments, text: str) -> None:
    """It is refused with just this text, nothing is queued, and the next call works."""
    with pytest.raises(InvalidOption) as refused:
        call(**arguments)
    assert str(refused.value) == text
    assert not engine.has_unfinished
    out: Any = engine.generate([list(prompt(9))], max_new_tokens=3)
    assert out[0, 9:].tolist() == best(prompt(9), 3)


IDS = "allowed: token ids from 0 to 95."
EMPTY = "prompt: got []; allowed: at least one token. Start from the model's first special token."
LONG = (
    "prompt: got '64 tokens'; allowed: at most 63 tokens, since max_model_len is 64 and output needs room. "
    "Shorten the prompt or compile with a larger max_model_len."
)
META = "got 'a tensor on the meta device'; allowed: a tensor that has values. Make it on the CPU."
FAKE = "got 'a fake tensor'; allowed: a tensor that has values. Make it outside of FakeTensorMode."
SPARSE = "got 'a tensor of layout torch.sparse_coo'; allowed: a dense tensor. Call .to_dense() first."

ROWS = "allowed: a tensor or array [batch, length], or a list of lists of token ids"
BATCHES: list[tuple[Any, str]] = [
    ([], "input_ids: got []; allowed: at least one prompt of at least one token."),
    ([[]], "input_ids: got [[]]; allowed: at least one prompt of at least one token."),
    ([[1], []], EMPTY),
    ([[1, -1]], f"prompt: got -1; {IDS}"),
    ([[96]], f"prompt: got 96; {IDS}"),
    ([[2**70]], f"prompt: got {2**70}; {IDS}"),
    ([[True, 2]], f"prompt: got True; {IDS}"),
    ([[1, 2.0]], f"prompt: got 2.0; {IDS}"),
    ([["a"]], f"prompt: got 'a'; {IDS}"),
    (torch.tensor([[1, -1]]), f"prompt: got -1; {IDS}"),
    (torch.tensor([[96]]), f"prompt: got 96; {IDS}"),
    ("hi", f"input_ids: got 'hi'; {ROWS}."),
    ([1, 2], f"input_ids: got [1, 2]; {ROWS}."),
    (
        {"input_ids": [[1]]},
        f"input_ids: got {{'input_ids': [[1]]}}; {ROWS}. Pass what a tokenizer returns as **inputs.",
    ),
    (
        np.array([["a"]]),
        f"input_ids: got array([['a']], dtype='<U1'); {ROWS}.",
    ),
    (np.array([[1.0, 2.0]]), "input_ids: got torch.float64; allowed: int64 or int32 token ids."),
    (np.array([1, 2]), "input_ids: got 'shape (2,)'; allowed: shape [batch, length], neither of them 0."),
    ([torch.tensor([1.0])], f"prompt: got 1.0; {IDS}"),
    ([torch.tensor([[1]])], f"prompt: got [1]; {IDS}"),
    ([THREE[0].to("meta")], f"input_ids: {META}"),
    (None, f"input_ids: got None; {ROWS}."),
    (torch.ones(1, 3), "input_ids: got torch.float32; allowed: int64 or int32 token ids."),
    (torch.ones(1, 3, dtype=torch.bool), "input_ids: got torch.bool; allowed: int64 or int32 token ids."),
    (torch.tensor([1, 2]), "input_ids: got 'shape (2,)'; allowed: shape [batch, length], neither of them 0."),
    (THREE[None], "input_ids: got 'shape (1, 1, 3)'; allowed: shape [batch, length], neither of them 0."),
    (THREE[:, :0], "input_ids: got 'shape (1, 0)'; allowed: shape [batch, length], neither of them 0."),
    (THREE.to("meta"), f"input_ids: {META}"),
    (fake(1, 3), f"input_ids: {FAKE}"),
    (THREE.to_sparse(), f"input_ids: {SPARSE}"),
    ([[1] * 64], LONG),
]

PROMPTS: list[tuple[Any, str]] = [
    ([], EMPTY),
    ([1, -1], f"prompt: got -1; {IDS}"),
    ([96], f"prompt: got 96; {IDS}"),
    ([True], f"prompt: got True; {IDS}"),
    ([1.5], f"prompt: got 1.5; {IDS}"),
    (["a"], f"prompt: got 'a'; {IDS}"),
    ("hi", "prompt: got 'hi'; allowed: a sequence of token ids. Encode it with the model's tokenizer first."),
    (b"hi", "prompt: got b'hi'; allowed: a sequence of token ids. Encode it with the model's tokenizer first."),
    (None, "prompt: got None; allowed: a sequence of token ids."),
    ({1, 2}, "prompt: got {1, 2}; allowed: a sequence of token ids."),
    ([[1, 2]], "prompt: got [[1, 2]]; allowed: one prompt, a flat sequence of token ids. Submit rows one by one."),
    (
        THREE,
        "prompt: got tensor([[1, 2, 3]]); allowed: one prompt, a flat sequence of token ids. Submit rows one by one.",
    ),
    (torch.tensor(1), "prompt: got tensor(1); allowed: a sequence of token ids."),
    (torch.ones(3), "prompt: got torch.float32; allowed: token ids, which are integers. Convert it with .long()."),
    (THREE[0].to("meta"), f"prompt: {META}"),
    (fake(3), f"prompt: {FAKE}"),
    ([1] * 64, LONG),
]


@pytest.mark.parametrize(("input_ids", "text"), BATCHES, ids=named)
def test_batches(engine: Engine, input_ids: Any, text: str) -> None:
    for call in (engine.generate, engine.stream):
        check_refused(engine, call, {"input_ids": input_ids, "max_new_tokens": 2}, text)


@pytest.mark.parametrize(("given", "text"), PROMPTS, ids=named)
def test_prompts(engine: Engine, given: Any, text: str) -> None:
    check_refused(engine, engine.submit, {"prompt": given, "max_new_tokens": 2}, text)


MASK = "allowed: a tensor of 0 and 1, of the shape of input_ids."
MASK_WAY_OUT = "Give 1 where there is a token and 0 where there is padding."


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.ones(1, 2), "got 'shape (1, 2)'; allowed: the shape of input_ids, (1, 3)."),
        (torch.ones(3), "got 'shape (3,)'; allowed: the shape of input_ids, (1, 3)."),
        (torch.ones(1, 1, 3, 3), "got 'shape (1, 1, 3, 3)'; allowed: the shape of input_ids, (1, 3)."),
        (torch.tensor([[1, 2, 1]]), f"got 2; {MASK} {MASK_WAY_OUT}"),
        (torch.tensor([[-1, 1, 1]]), f"got -1; {MASK} {MASK_WAY_OUT}"),
        (torch.tensor([[0.5, 1, 1]]), f"got 0.5; {MASK} {MASK_WAY_OUT}"),
        (torch.tensor([[NAN, 1, 1]]), f"got nan; {MASK} {MASK_WAY_OUT}"),
        (torch.ones(1, 3, dtype=torch.complex64), f"got torch.complex64; {MASK}"),
        (
            torch.zeros(1, 3),
            "got 'row 0 all 0'; allowed: at least one 1 in each row. "
            "Take the row out, or start it from the model's first special token.",
        ),
        ([[1, 1, 1]], f"got [[1, 1, 1]]; {MASK} Make it one with torch.tensor."),
        (torch.ones(1, 3, device="meta"), META),
    ],
    ids=named,
)
def test_attention_masks(engine: Engine, mask: Any, text: str) -> None:
    arguments = {"input_ids": THREE, "attention_mask": mask, "max_new_tokens": 2}
    check_refused(engine, engine.generate, arguments, f"attention_mask: {text}")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.float64])
def test_masks_of_any_dtype_work(engine: Engine, dtype: torch.dtype) -> None:
    """The refusals' twin."""
    ids, mask = torch.tensor([[7, *prompt(9)]]), torch.tensor([[0] + [1] * 9]).to(dtype)
    out: Any = engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert out[0, 10:].tolist() == best(prompt(9), 3)


def processor(input_ids: Any, scores: Any) -> Any:
    return scores


NUMBERS = "allowed: a finite number."
BIAS = "allowed: a finite number. To forbid tokens use suppress_tokens or bad_words_ids."
COUNT = "allowed: an integer from 1."
ENDS = "allowed: token ids from 0 to 95, or None."
PROCESSORS = "allowed: a list of callables (input_ids, scores) that return scores."
CRITERIA = "allowed: a list of callables (input_ids, scores) that return true to stop."

BOTH: list[tuple[str, Any, str]] = [
    ("max_new_tokens", 0, f"got 0; {COUNT}"),
    ("max_new_tokens", -1, f"got -1; {COUNT}"),
    ("max_new_tokens", True, f"got True; {COUNT}"),
    ("max_new_tokens", "3", f"got '3'; {COUNT}"),
    ("max_new_tokens", 2.0, f"got 2.0; {COUNT}"),
    ("eos_token_id", 96, f"got 96; {ENDS}"),
    ("eos_token_id", [1, -1], f"got -1; {ENDS}"),
    ("eos_token_id", True, f"got True; {ENDS}"),
    ("eos_token_id", 1.5, f"got 1.5; {ENDS}"),
    ("eos_token_id", "a", f"got 'a'; {ENDS}"),
    ("logit_bias", [1], "got [1]; allowed: a dict from token ids to numbers, or None."),
    ("logit_bias", {"1": 2.0}, "got '1'; allowed: token ids from 0 to 95 as keys."),
    ("logit_bias", {96: 2.0}, "got 96; allowed: token ids from 0 to 95 as keys."),
    ("logit_bias", {1: NAN}, f"[1]: got nan; {BIAS}"),
    ("logit_bias", {1: -INFINITY}, f"[1]: got -inf; {BIAS}"),
    ("logit_bias", {1: "2"}, f"[1]: got '2'; {BIAS}"),
    ("logit_bias", {1: True}, f"[1]: got True; {BIAS}"),
    ("presence_penalty", NAN, f"got nan; {NUMBERS}"),
    ("presence_penalty", "1", f"got '1'; {NUMBERS}"),
    ("presence_penalty", None, f"got None; {NUMBERS}"),
    ("frequency_penalty", INFINITY, f"got inf; {NUMBERS}"),
    ("frequency_penalty", True, f"got True; {NUMBERS}"),
    ("logprobs", 5, "got 5; allowed: True or False."),
    ("logits_processor", [3], f"got 3; {PROCESSORS}"),
    ("logits_processor", 3, f"got 3; {PROCESSORS}"),
    (
        "logits_processor",
        processor,
        f"got <function processor>; {PROCESSORS} Put it into a list: logits_processor=[...].",
    ),
    (
        "logits_processor",
        [TopKLogitsWarper],
        f"got <class 'transformers.generation.logits_process.TopKLogitsWarper'>; {PROCESSORS} Make an instance of it.",
    ),
    ("stopping_criteria", [None], f"got None; {CRITERIA}"),
    (
        "stopping_criteria",
        processor,
        f"got <function processor>; {CRITERIA} Put it into a list: stopping_criteria=[...].",
    ),
    (
        "generation_config",
        {"top_k": 3},
        "got {'top_k': 3}; allowed: transformers' GenerationConfig, or None. "
        "Make one: GenerationConfig(max_new_tokens=...).",
    ),
    ("seed", "a", ""),
    ("seed", True, ""),
    ("seed", 1.5, ""),
    ("seed", [1, 2], ""),
    ("temprature", 1.0, ""),
]


@pytest.mark.parametrize(("name", "value", "text"), BOTH, ids=named)
def test_arguments_of_every_call(engine: Engine, name: str, value: Any, text: str) -> None:
    separator = "" if text.startswith("[") else ": "
    calls: list[tuple[Callable[..., Any], str, Any, str]] = [
        (engine.generate, "input_ids", THREE, "generate"),
        (engine.stream, "input_ids", THREE, "stream"),
        (engine.submit, "prompt", [1, 2, 3], "submit"),
    ]
    for call, of_prompt, ids, where in calls:
        expected = f"{name}{separator}{text}"
        if name == "seed":
            allowed = "an int, or one for each of the 1 sequences" if where != "submit" else "an integer"
            given = "'2 seeds'" if isinstance(value, list) and where != "submit" else repr(value)
            expected = f"seed: got {given}; allowed: {allowed}."
        if name == "temprature":
            place = " Give it in generation_config=GenerationConfig(temperature=...)." if where == "submit" else ""
            way_out = f"Did you mean temperature?{place}"
            expected = f"temprature: got 1.0; allowed: an argument of specstream's {where}. {way_out}"
        check_refused(engine, call, {of_prompt: ids, "max_new_tokens": 2, name: value}, expected)


GENERATE: list[tuple[Arguments, str]] = [
    ({"max_length": 3}, "max_length: got 3; allowed: more than the 3 tokens of the prompt."),
    ({"max_length": 0}, f"max_length: got 0; {COUNT}"),
    ({"max_length": "9"}, f"max_length: got '9'; {COUNT}"),
    ({"seed": ["a"]}, "seed: got 'a'; allowed: an integer."),
    ({"seed": [True]}, "seed: got True; allowed: an integer."),
    ({"num_return_sequences": 0}, f"num_return_sequences: got 0; {COUNT}"),
    ({"num_return_sequences": "2"}, f"num_return_sequences: got '2'; {COUNT}"),
    ({"do_sample": "yes"}, "do_sample: got 'yes'; allowed: True or False."),
    ({"do_sample": True, "temperature": 0}, "temperature: got 0; allowed: a number above 0."),
    ({"do_sample": True, "temperature": NAN}, "temperature: got nan; allowed: a number above 0."),
    ({"do_sample": True, "top_k": -1}, "top_k: got -1; allowed: an integer from 0."),
    ({"do_sample": True, "top_p": 1.5}, "top_p: got 1.5; allowed: a number from 0 to 1."),
    ({"do_sample": True, "typical_p": 0}, "typical_p: got 0; allowed: a number above 0 and at most 1."),
    ({"do_sample": True, "eta_cutoff": 1}, "eta_cutoff: got 1; allowed: a number from 0 and below 1."),
    ({"temperature": 0.5}, "temperature: got 0.5; allowed: None without do_sample=True. Pass do_sample=True."),
    ({"repetition_penalty": "a"}, "repetition_penalty: got 'a'; allowed: a number above 0."),
    ({"min_new_tokens": "a"}, "min_new_tokens: got 'a'; allowed: an integer from 0."),
    ({"pad_token_id": 2.5}, "pad_token_id: got 2.5; allowed: an integer."),
    ({"suppress_tokens": 3}, "suppress_tokens: got 3; allowed: token ids."),
    ({"bad_words_ids": [[96]]}, f"bad_words_ids: got 96; {IDS}"),
    ({"sequence_bias": {(1, 96): 1.0}}, f"sequence_bias: got 96; {IDS}"),
    ({"sequence_bias": [[[96], 1.0]]}, f"sequence_bias: got 96; {IDS}"),
    ({"forced_eos_token_id": 96}, f"forced_eos_token_id: got 96; {IDS}"),
    (
        {"bad_words_ids": 3},
        "bad_words_ids: got 3; allowed: what transformers' logits processors allow. "
        "`bad_words_ids` has to be a non-empty list, but is 3.",
    ),
    ({"stop_strings": ""}, "stop_strings: got ''; allowed: a text or a list of texts, none of them empty."),
    (
        {"generation_config": GenerationConfig(eos_token_id="a")},
        "generation_config.eos_token_id: got 'a'; allowed: a token id, or a list of them.",
    ),
    (
        {"streamer": object()},
        "streamer: got <object object>; allowed: an object with the methods put and end, as transformers' have.",
    ),
    ({"streamer": 3}, "streamer: got 3; allowed: an object with the methods put and end, as transformers' have."),
]

SUBMIT: list[tuple[Arguments, str]] = [
    ({"max_new_tokens": None}, f"max_new_tokens: got None; {COUNT}"),
    (
        {"max_length": 9},
        "max_length: got 9; allowed: an argument of specstream's submit. Give max_new_tokens.",
    ),
    (
        {"temperature": 0.5},
        "temperature: got 0.5; allowed: an argument of specstream's submit. "
        "Give it in generation_config=GenerationConfig(temperature=...).",
    ),
    (
        {"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True)},
        "generation_config.num_return_sequences: got 2; allowed: 1 for submit. "
        "Submit the prompt as often as it is asked for.",
    ),
    (
        {"generation_config": GenerationConfig(do_sample=True, temperature=-1.0)},
        "generation_config.temperature: got -1.0; allowed: a number above 0.",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), GENERATE, ids=named)
def test_arguments_of_generate(engine: Engine, arguments: Arguments, text: str) -> None:
    most = {} if "max_length" in arguments else {"max_new_tokens": 2}
    check_refused(engine, engine.generate, {"input_ids": THREE, **most, **arguments}, text)


@pytest.mark.parametrize(("arguments", "text"), SUBMIT, ids=named)
def test_arguments_of_submit(engine: Engine, arguments: Arguments, text: str) -> None:
    check_refused(engine, engine.submit, {"prompt": [1, 2, 3], "max_new_tokens": 2, **arguments}, text)


def test_numbers_of_other_libraries_are_numbers(engine: Engine) -> None:
    """The refusals' twin: what only looks odd works."""
    arguments: Arguments = {"max_new_tokens": np.int64(3), "seed": np.int64(1), "presence_penalty": np.float32(0)}
    arguments |= {"eos_token_id": torch.tensor([95]), "logit_bias": {np.int64(1): np.float64(0)}}
    arguments |= {"do_sample": False, "logits_processor": None, "stopping_criteria": (), "repetition_penalty": 1}
    out: Any = engine.generate([list(np.array(prompt(9)))], **arguments)
    assert out[0, 9:].tolist() == best(prompt(9), 3)
    hot: Any = engine.generate([list(prompt(9))], max_new_tokens=3, do_sample=True, temperature=2, seed=1)
    same: Any = engine.generate([list(prompt(9))], max_new_tokens=3, do_sample=True, temperature=2.0, seed=1)
    assert torch.equal(hot, same)


class OwnError(Exception):
    """Of the caller's."""


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_an_error_of_the_callers_says_for_which_request(where: str) -> None:
    def fail(input_ids: Any, scores: Any, **_: object) -> Any:
        raise error

    error = OwnError("odd")
    with new_engine() as engine:
        engine.submit(prompt(9), max_new_tokens=3)
        engine.submit(prompt(5), max_new_tokens=3, **{where: [fail]})
        with pytest.raises(OwnError) as raised:
            engine.step()
        assert raised.value is error
        assert str(error) == "odd"
        assert getattr(error, "__notes__") == ["raised while the tokens of request 1 were chosen"]  # noqa: B009
        assert engine.cancel(1) is None
        ends = {out.request_id: out.output for _ in range(3) for out in engine.step() if out.output}
    assert (ends[1].token_ids, ends[1].finish_reason) == ([], "cancelled")
    assert ends[0].token_ids == best(prompt(9), 3)
    assert "request 1" in "".join(traceback.format_exception(error)) or not hasattr(error, "add_note")


def test_long_values_are_shortened() -> None:
    error = InvalidOption("prompt", [0] * 10_000, "less")
    assert str(error) == f"prompt: got {('[' + '0, ' * 100)[:160]} ...; allowed: less."
    assert error.given == [0] * 10_000
    assert shortened("a\n  b <x at 0x7f00>") == "a b <x>"
