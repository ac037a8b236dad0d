"""Streams: pieces that join to the whole, streams read in turn, left early, cancelled from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from specstream.errors import EngineClosed, InvalidOption
from specstream.sequence import FinishReason
from tests.helpers import best, check_free, make_engine, new_engine, prompt
from tests.test_speculation_cases import PROMPT_BYTES, TEXT, byte_tokenizer, recital


def test_pieces_join_to_what_generate_gives() -> None:
    ids = [list(prompt(9)), list(prompt(5)), list(prompt(17))]
    with new_engine() as engine:
        whole: Any = engine.generate(ids, max_new_tokens=11, return_dict_in_generate=True, logprobs=True)
        tokens: list[list[int]] = [[] for _ in ids]
        logprobs: list[list[float]] = [[] for _ in ids]
        ended = [False] * 3
        for piece in engine.stream(ids, max_new_tokens=11, logprobs=True):
            assert piece.token_ids
            assert piece.text is None
            assert not ended[piece.index], "a piece after the last"
            tokens[piece.index] += piece.token_ids
            logprobs[piece.index] += piece.logprobs or []
            if piece.output is not None:
                ended[piece.index] = True
                assert piece.output.token_ids == tokens[piece.index]
                assert piece.finish_reason is FinishReason.LENGTH
        assert all(ended)
        assert tokens == [request.token_ids for request in whole.requests]
        assert logprobs == [request.logprobs for request in whole.requests]
        check_free(engine)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 11, 16])
def test_multi_byte_text_joins_to_the_whole(depth: int) -> None:
    tokenizer, whole = byte_tokenizer(), list(TEXT.encode())
    ids, rest = whole[:PROMPT_BYTES], whole[PROMPT_BYTES:]
    with make_engine(recital(), recital(), max_model_len=128, num_speculative_tokens=depth) as engine:
        engine.tokenizer = tokenizer
        pieces = list(engine.stream([ids], max_new_tokens=len(rest)))
    assert [token for piece in pieces for token in piece.token_ids] == rest
    assert "".join(piece.text or "" for piece in pieces) == TEXT.encode()[PROMPT_BYTES:].decode()
    assert not any("\N{REPLACEMENT CHARACTER}" in (piece.text or "") for piece in pieces)


def test_streams_read_in_turn_run_together() -> None:
    with new_engine() as engine:
        submitted = engine.submit(prompt(12), max_new_tokens=9)
        first = engine.stream([list(prompt(9))], max_new_tokens=12)
        second = engine.stream([list(prompt(5))], max_new_tokens=12)
        tokens: dict[str, list[int]] = {"first": [], "second": []}
        streams = {"first": first, "second": second}
        while streams:
            for name, pieces in list(streams.items()):
                piece = next(pieces, None)
                if piece is None:
                    del streams[name]
                else:
                    tokens[name] += piece.token_ids
        assert tokens == {"first": best(prompt(9), 12), "second": best(prompt(5), 12)}
        rounds = engine.metrics().num_rounds
        assert rounds <= 8, "the streams did not share rounds"
        given = [token for output in engine.step() if output.request_id == submitted for token in output.new_token_ids]
        assert given == best(prompt(12), 9)
        check_free(engine)


def test_a_stream_left_early_leaves_nothing_behind() -> None:
    with new_engine() as engine:
        for piece in engine.stream([list(prompt(9)), list(prompt(5))], max_new_tokens=20):
            assert piece.token_ids
            break
        assert not engine.has_unfinished
        check_free(engine)
        unread = engine.stream([list(prompt(9))], max_new_tokens=20)
        assert not engine.has_unfinished, "nothing runs before the first piece is asked for"
        del unread
        assert engine.generate([list(prompt(9))], max_new_tokens=8).tolist() == [[*prompt(9), *best(prompt(9), 8)]]  # type: ignore[union-attr]


def test_a_stream_is_told_when_its_request_is_cancelled() -> None:
    with new_engine() as engine:
        pieces = engine.stream([list(prompt(9))], max_new_tokens=20, logprobs=True)
        first = next(pieces)
        engine.reset()
        last = list(pieces)
        assert [piece.logprobs for piece in last] == [[]]
        assert [piece.finish_reason for piece in last] == [FinishReason.CANCELLED]
        assert last[0].output is not None
        assert last[0].output.token_ids == first.token_ids
    with pytest.raises(EngineClosed):
        engine.stream([list(prompt(9))], max_new_tokens=4)


def test_wrong_arguments_are_refused_at_once() -> None:
    with new_engine() as engine:
        with pytest.raises(InvalidOption, match="tempo: got 3"):
            engine.stream([list(prompt(9))], tempo=3)
        with pytest.raises(InvalidOption, match="return_dict_in_generate: got True"):
            engine.stream([list(prompt(9))], return_dict_in_generate=True)
        with pytest.raises(InvalidOption, match="prompt: got 96"):
            engine.stream([[1, 96]])
        assert not engine.has_unfinished
