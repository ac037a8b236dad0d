"""Recall over streamed history fails when history on the host is damaged: a right answer means that it was read."""

from __future__ import annotations

import pytest

import specstream
from specstream.demo_context import load_model, load_tokenizer, make_questions
from specstream.engine import Engine
from specstream.models.tiny import TARGET
from specstream.models.tiny.facts import parse_answer

CHUNK = 64
VALUES = 1
"""The damaged half of a chunk's block in each layer: [K|V]."""


def answer(engine: Engine, prompt_ids: list[int], damaged_chunk: int | None) -> list[int]:
    """The first tokens after a prompt, with a chunk damaged in host memory once the prompt is computed."""
    request = engine.submit(prompt_ids, max_new_tokens=12)
    (sequence,) = engine._scheduler.waiting
    produced: list[int] = []
    while engine.has_unfinished:
        for output in engine.step():
            produced += output.new_token_ids
        if damaged_chunk is not None and produced and engine.has_unfinished:
            assert sequence.kv is not None
            assert sequence.kv.resident <= damaged_chunk < sequence.kv.resident + sequence.kv.streamed
            for layer in range(engine.memory.layout.num_layers):
                sequence.kv.host_view(layer, damaged_chunk, damaged_chunk + 1)[0, VALUES] = 0
            damaged_chunk = None
    assert request == sequence.request_id
    return produced


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = load_model(TARGET)
    return specstream.compile(target, None, max_model_len=2304, max_num_seqs=1, chunk_tokens=CHUNK, gpu_kv_budget="min")


def test_damaged_history_on_the_host_is_noticed(engine: Engine) -> None:
    tokenizer = load_tokenizer()
    questions = make_questions(tokenizer, 2048, 3, seed=0)
    for question in questions:
        fact = len(question.prompt_ids) - question.tokens_back
        clean = answer(engine, question.prompt_ids, None)
        assert parse_answer(tokenizer.decode(clean)) == question.value
        far_from_it = answer(engine, question.prompt_ids, 1)
        assert parse_answer(tokenizer.decode(far_from_it)) == question.value
        damaged = answer(engine, question.prompt_ids, (fact - 4) // CHUNK)
        assert parse_answer(tokenizer.decode(damaged)) != question.value
