"""The caller's processors and criteria replace those of settings, as in transformers, and see one row at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    EosTokenCriteria,
    LogitNormalization,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from specstream.engine import Engine
from specstream.errors import InvalidOption
from specstream.models.tiny import TARGET
from specstream.sequence import FinishReason
from tests.helpers import best, make_engine, model, named, prompt

PROMPT = prompt(9)
IDS = torch.tensor([PROMPT])
TEXT = best(PROMPT, 20)
ROWS = torch.tensor([[0, 0, 0, *prompt(6)], PROMPT])
MASK = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine(model("qwen3"), model("qwen3", seed=1), max_model_len=96) as engine:
        yield engine


def check_alike(engine: Engine, ids: Tensor, **arguments: Any) -> list[list[int]]:
    """The engine gives what transformers gives, by itself and as transformers' decoding loop."""
    target: Any = model("qwen3")
    arguments = {"pad_token_id": 0, **arguments}
    theirs: list[list[int]] = target.generate(ids, **copy.deepcopy(arguments)).tolist()
    ours: Any = engine.generate(ids, **copy.deepcopy(arguments))
    assert ours.tolist() == theirs
    if not {"stop_strings", "tokenizer"} & arguments.keys():
        looped = target.generate(ids, custom_generate=engine.custom_generate, **copy.deepcopy(arguments))
        assert looped.tolist() == theirs
    return theirs


CRITERIA: list[dict[str, Any]] = [
    {"max_new_tokens": 4, "stopping_criteria": [MaxLengthCriteria(20)]},
    {"max_new_tokens": 12, "stopping_criteria": [MaxLengthCriteria(15)]},
    {"max_length": 20, "stopping_criteria": [MaxLengthCriteria(30), MaxLengthCriteria(20)]},
    {"max_length": 20, "stopping_criteria": [MaxLengthCriteria(20), MaxLengthCriteria(13)]},
    {"stopping_criteria": [MaxLengthCriteria(3)]},
    {"max_new_tokens": 12, "eos_token_id": TEXT[3], "stopping_criteria": [EosTokenCriteria(TEXT[7])]},
    {"max_new_tokens": 12, "stopping_criteria": [EosTokenCriteria([TEXT[5], 1])]},
    {"max_new_tokens": 12, "eos_token_id": TEXT[3], "stopping_criteria": [EosTokenCriteria(TEXT[3])]},
    {"max_new_tokens": 12, "stopping_criteria": [EosTokenCriteria(TEXT[6]), EosTokenCriteria(TEXT[4])]},
    {
        "max_new_tokens": 12,
        "eos_token_id": TEXT[2],
        "min_new_tokens": 5,
        "stopping_criteria": [EosTokenCriteria(TEXT[8])],
    },
]


@pytest.mark.filterwarnings("ignore:stopping_criteria")
@pytest.mark.parametrize("arguments", CRITERIA, ids=named)
def test_criteria_are_kept_and_replace_those_of_settings(engine: Engine, arguments: dict[str, Any]) -> None:
    check_alike(engine, IDS, **arguments)
    if any(isinstance(criterion, MaxLengthCriteria) for criterion in arguments["stopping_criteria"]):
        check_alike(engine, ROWS, attention_mask=MASK, **arguments)


def test_a_replaced_setting_is_warned_about_and_counts_as_a_length(engine: Engine) -> None:
    with pytest.warns(UserWarning, match="stopping_criteria: the given MaxLengthCriteria takes the place"):
        out: Any = engine.generate(
            IDS, max_new_tokens=3, stopping_criteria=[MaxLengthCriteria(16)], return_dict_in_generate=True
        )
    assert out.requests[0].token_ids == best(PROMPT, 7)
    assert out.requests[0].finish_reason is FinishReason.LENGTH
    assert engine.metrics().num_draft_tokens > 0, "criteria turn drafting off"


PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.9)]},
    {"repetition_penalty": 1.2, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2)]},
    {"repetition_penalty": 1.2, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2)] * 2},
    {
        "repetition_penalty": 1.2,
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2), RepetitionPenaltyLogitsProcessor(1.2)],
    },
    {"repetition_penalty": 1.2, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=9)]},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.7)]},
    {"suppress_tokens": TEXT[:3], "logits_processor": [SuppressTokensLogitsProcessor(TEXT[2:6])]},
    {"bad_words_ids": [[TEXT[0]]], "logits_processor": [NoBadWordsLogitsProcessor([[TEXT[1]]], None)]},
    {
        "sequence_bias": {(TEXT[0],): -5.0},
        "logits_processor": [SequenceBiasLogitsProcessor([[[TEXT[0]], -5.0], [[TEXT[1]], -9.0]])],
    },
    {"no_repeat_ngram_size": 2, "logits_processor": [NoRepeatNGramLogitsProcessor(1)]},
    {"eos_token_id": TEXT[2], "min_new_tokens": 5, "logits_processor": [MinLengthLogitsProcessor(17, [TEXT[2]])]},
    {"renormalize_logits": True, "logits_processor": [LogitNormalization()]},
    {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + batch) % 96, (int(ids[-1]) + 1) % 96]},
    {
        "prefix_allowed_tokens_fn": lambda batch, ids: [batch + 3, (int(ids[-1]) + 1) % 96],
        "repetition_penalty": 1.5,
        "forced_eos_token_id": 7,
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.9)],
    },
    {"logits_processor": [PrefixConstrainedLogitsProcessor(lambda batch, ids: [(int(ids[-1]) * 7 + batch) % 96], 1)]},
]


@pytest.mark.filterwarnings("ignore:logits_processor")
@pytest.mark.parametrize("arguments", PROCESSORS, ids=lambda arguments: " ".join(arguments))
def test_processors_replace_those_of_settings(engine: Engine, arguments: dict[str, Any]) -> None:
    check_alike(engine, IDS, max_new_tokens=9, **arguments)


SAME: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "sequence_bias": {(1, 2): 3.0, (4,): -1.0}, "bad_words_ids": [[1], [2, 3]]},
    {"suppress_tokens": [1, 2], "begin_suppress_tokens": [3], "forced_eos_token_id": [4, 5], "no_repeat_ngram_size": 2},
    {"eos_token_id": [90, 91], "min_new_tokens": 4, "exponential_decay_length_penalty": (2, 1.1)},
    {"eos_token_id": 90, "min_length": 12, "remove_invalid_values": True, "renormalize_logits": True},
    {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "seed": 1},
    {"do_sample": True, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "renormalize_logits": True, "seed": 1},
]


@pytest.mark.parametrize("settings", SAME, ids=named)
@pytest.mark.parametrize("padded", [False, True])
def test_what_transformers_made_of_the_settings_is_not_taken_for_the_callers(
    engine: Engine, settings: dict[str, Any], padded: bool
) -> None:
    target: Any = model("qwen3")
    ids, mask = (ROWS, MASK) if padded else (IDS, None)
    engine.reset()
    arguments = {"max_new_tokens": 6, "pad_token_id": 0, "attention_mask": mask, **settings}
    looped = target.generate(ids, custom_generate=engine.custom_generate, **arguments)
    assert engine.metrics().num_draft_tokens > 0, "taken for the caller's, which turn drafting off"
    direct: Any = engine.generate(ids, **arguments)
    assert looped.tolist() == direct.tolist()


def test_a_callers_warper_comes_before_the_settings_own(engine: Engine) -> None:
    target: Any = model("qwen3")
    arguments: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 6, "seed": 3}
    arguments |= {"logits_processor": [TemperatureLogitsWarper(0.7)]}
    looped = target.generate(IDS, custom_generate=engine.custom_generate, **arguments)
    direct: Any = engine.generate(IDS, **arguments)
    squared: Any = engine.generate(IDS, **arguments | {"temperature": 0.7 * 0.7, "logits_processor": [Nothing()]})
    assert looped.tolist() == direct.tolist() == squared.tolist()


class Nothing(LogitsProcessor):
    """Changes nothing, and keeps what it is shown."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shapes.append(tuple(input_ids.shape))
        return scores


def test_rows_come_one_at_a_time_without_padding(engine: Engine) -> None:
    seen = Nothing()
    engine.generate(ROWS, attention_mask=MASK, max_new_tokens=2, logits_processor=[seen])
    assert sorted(seen.shapes) == [(1, 6), (1, 7), (1, 9), (1, 10)]


def test_what_asks_for_the_row_of_a_batch_is_refused(engine: Engine) -> None:
    def allowed(batch: int, ids: Tensor) -> list[int]:
        return [batch]

    target: Any = model("qwen3")
    pair = torch.tensor([PROMPT, prompt(9, 1)])
    constrained = PrefixConstrainedLogitsProcessor(allowed, 1)
    for call in (engine.generate, engine.stream, lambda ids, **rest: _looped(engine, ids, **rest)):
        for arguments in ({"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [constrained]}):
            with pytest.raises(InvalidOption, match=r"one prompt, not 2 rows.* Call once for each prompt"):
                call(pair, max_new_tokens=2, **arguments)
    # One prompt several times is one batch row to transformers, and works.
    several = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 3}
    expected = target.generate(IDS, prefix_allowed_tokens_fn=allowed, **several).tolist()
    for arguments in (
        {"prefix_allowed_tokens_fn": allowed},
        {"logits_processor": [PrefixConstrainedLogitsProcessor(allowed, 2)]},
    ):
        ours: Any = engine.generate(IDS, **several, **arguments)
        assert ours.tolist() == _looped(engine, IDS, **several, **arguments).tolist() == expected


def _looped(engine: Engine, ids: Tensor, **arguments: Any) -> Any:
    target: Any = model("qwen3")
    return target.generate(ids, custom_generate=engine.custom_generate, **arguments)


def test_submit_takes_a_prefix_function(engine: Engine) -> None:
    engine.submit(PROMPT, max_new_tokens=4, prefix_allowed_tokens_fn=lambda batch, ids: [batch + len(ids)])
    (output,) = [step.output for _ in range(9) for step in engine.step() if step.output]
    assert output.token_ids == [9, 10, 11, 12]


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda ids, scores: scores.repeat(2, 1), r"a tensor \[2, 96\] from <lambda>"),
        (lambda ids, scores: scores[0], r"a tensor \[96\] from <lambda>"),
        (lambda ids, scores: None, "None from <lambda>"),
    ],
)
def test_a_processor_that_returns_another_shape_is_refused(engine: Engine, processor: Any, text: str) -> None:
    with pytest.raises(InvalidOption, match=f"logits_processor: got ['\"]{text}['\"]; allowed: scores of the shape"):
        engine.generate(IDS, max_new_tokens=3, logits_processor=[processor])
    assert not engine.has_unfinished
    assert engine.generate(IDS, max_new_tokens=3)[0, 9:].tolist() == best(PROMPT, 3)


def test_the_calls_own_tokenizer(engine: Engine) -> None:
    assert engine.tokenizer is None
    for index in range(3, 9):
        stop = TOKENIZER.decode(TEXT[index : index + 2])
        check_alike(engine, IDS, max_new_tokens=12, stop_strings=[stop], tokenizer=TOKENIZER)
    pieces = list(engine.stream(IDS, max_new_tokens=5, tokenizer=TOKENIZER))
    assert "".join(piece.text or "" for piece in pieces) == TOKENIZER.decode(TEXT[:5])
    criterion = StopStringCriteria(TOKENIZER, TOKENIZER.decode(TEXT[4:6]))
    with pytest.warns(UserWarning, match="the given StopStringCriteria takes the place"):
        check_alike(
            engine,
            IDS,
            max_new_tokens=12,
            stop_strings=TOKENIZER.decode(TEXT[1:3]),
            tokenizer=TOKENIZER,
            stopping_criteria=[criterion],
        )
