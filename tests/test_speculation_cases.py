"""Public fault reports of speculative decoding, as behaviour to get right. Greedy."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, TextStreamer

from specstream.errors import InvalidOption
from specstream.scheduler import RequestRows
from specstream.speculate import accept_greedy
from tests.architectures import build
from tests.helpers import Request, make_engine, model, prompt, reference, serve

NEW_TOKENS = 24
SMALL: dict[str, Any] = {"chunk_tokens": 4, "max_model_len": 96, "gpu_kv_budget": "min", "debug": True}


def best(target: nn.Module, ids: tuple[int, ...], count: int = NEW_TOKENS) -> list[int]:
    return reference(target, ids, NEW_TOKENS).tokens[:count]


class Streamer:
    """Keeps what transformers' streamers would be given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


# vllm 41758, transformers 39421: turning speculation on changes greedy text.


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_speculation_does_not_change_the_text(depth: int, dtype: torch.dtype) -> None:
    target, near_ties = model("qwen3", dtype), 0
    for draft, window in ((target, None), (target, 5), (model("llama", dtype, 1), None)):
        with make_engine(target, draft, num_speculative_tokens=depth, draft_window=window, **SMALL) as engine:
            for length in (3, 18):
                request = Request(prompt(length), NEW_TOKENS)
                serve(engine, [request])
                alone = reference(target, request.prompt, NEW_TOKENS)
                if request.tokens == alone.tokens:
                    continue
                first = next(i for i in range(NEW_TOKENS) if request.tokens[i] != alone.tokens[i])
                assert dtype is torch.float32
                assert alone.gaps[first] < 1e-5
                near_ties += 1
    assert near_ties <= 1


# transformers 47912: an end token accepted in the middle of a block does not stop generation.


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_end_token_at_every_block_offset(depth: int) -> None:
    target, left = model("qwen3"), set(range(-1, depth + 1))
    with make_engine(target, target, num_speculative_tokens=depth, **SMALL) as engine:
        for seed in range(40):
            ids = prompt(9, seed)
            tokens = best(target, ids)
            for index, token in enumerate(tokens[:-1]):
                offset = -1 if index == 0 else (index - 1) % (depth + 1)  # -1: what the prompt's round produces
                if token in tokens[:index] or offset not in left:
                    continue
                left.discard(offset)
                streamer = Streamer()
                out: Any = engine.generate(
                    [list(ids)],
                    max_new_tokens=NEW_TOKENS,
                    eos_token_id=token,
                    streamer=streamer,
                    return_dict_in_generate=True,
                )
                assert out.requests[0].token_ids == tokens[: index + 1]
                assert out.requests[0].finish_reason == "stop"
                assert streamer.given == [list(ids), *([token] for token in tokens[: index + 1])]
                assert streamer.ended
            if not left:
                break
    assert not left


# sglang 31599: a length cap checked before a stop.


def test_stop_before_the_cap_and_cap_before_the_stop() -> None:
    target = model("qwen3")
    ids = next(ids for seed in range(99) if len(set(best(target, ids := prompt(9, seed), 7))) == 7)
    tokens = best(target, ids, 7)
    with make_engine(target, target, num_speculative_tokens=6, **SMALL) as engine:
        for stop, cap, count, reason in ((3, 5, 3, "stop"), (6, 5, 5, "length"), (5, 5, 5, "stop"), (1, 1, 1, "stop")):
            request = Request(ids, cap, ends=(tokens[stop - 1],))
            serve(engine, [request])
            assert request.output is not None
            assert (request.tokens, request.output.finish_reason) == (tokens[:count], reason)


# vllm PR 2658: the acceptance mask [1, 0, 1, 1] counted as 3.


@pytest.mark.parametrize(
    ("mask", "accepted"), [((1, 0, 1, 1), 1), ((0, 1, 1, 1), 0), ((1, 1, 1, 1), 4), ((1, 1, 1, 0), 3), ((), 0)]
)
def test_what_follows_a_rejection_does_not_count(mask: tuple[int, ...], accepted: int) -> None:
    choices = [3, 1, 4, 1, 5][: len(mask) + 1]
    logits = F.one_hot(torch.tensor(choices), 9).double()
    candidates = [choice if right else 8 for choice, right in zip(choices, mask, strict=False)]
    assert accept_greedy(logits, candidates) == (accepted, choices[: accepted + 1])


def test_a_draft_that_lies_at_its_second_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("qwen3")
    with make_engine(target, target, num_speculative_tokens=4, **SMALL) as engine:
        ids, tokens = prompt(11), best(target, prompt(11))

        def draft(rows: list[RequestRows], step: int) -> None:
            for row in rows:
                at = len(row.sequence.new_tokens) + len(row.produced) + step
                if row.finish_reason is None and at < NEW_TOKENS - 1:
                    row.next_candidates.tokens.append((tokens[at] + (step == 1)) % 96)

        monkeypatch.setattr(engine._speculator, "_draft", draft)
        request = Request(ids, NEW_TOKENS)
        serve(engine, [request])
        assert request.tokens == tokens
        per_position = engine.metrics().accepted_per_position
        assert per_position[0] >= 8
        assert set(per_position[1:]) == {0}


# vllm 57941: the draft's positions are fewer than the target's.


def test_draft_with_fewer_positions() -> None:
    target = model("qwen3")
    draft = build("llama", max_position_embeddings=512, eos_token_id=None)
    options: dict[str, Any] = {"chunk_tokens": 32, "max_model_len": 700, "gpu_kv_budget": "min", "debug": True}
    with pytest.warns(UserWarning, match="covers 512 positions and max_model_len is 700"):
        engine = make_engine(target, draft, num_speculative_tokens=4, **options)
    with engine:
        beyond, across = Request(prompt(600), 6), Request(prompt(500), NEW_TOKENS)
        serve(engine, [beyond])
        assert engine.metrics().num_draft_tokens == 0
        serve(engine, [across])
        assert 0 < engine.metrics().num_draft_tokens <= 4 * 12
        mixed = [Request(prompt(600), 6), Request(prompt(30), 10)]
        serve(engine, mixed)
    for request in (beyond, across, *mixed):
        assert request.tokens == best(target, request.prompt, request.max_new_tokens)


# vllm 7632: an empty prompt takes the engine down.


def test_empty_prompt_is_refused_and_the_engine_goes_on() -> None:
    target = model("qwen3")
    with make_engine(target, target, **SMALL) as engine:
        for call in (
            lambda: engine.submit([], max_new_tokens=4),
            lambda: engine.generate([[]], max_new_tokens=4),
            lambda: engine.generate([[5], []], max_new_tokens=4),
            lambda: engine.generate(torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=4),
            lambda: engine.generate(
                torch.ones(2, 3, dtype=torch.int64), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]])
            ),
        ):
            with pytest.raises(InvalidOption, match=r"at least one token|neither of them 0|at least one 1 in each row"):
                call()
            assert not engine.has_unfinished
        request = Request(prompt(6), 8)
        serve(engine, [request])
        assert request.tokens == best(target, request.prompt, 8)


# transformers 32165: a batch above one is refused.


@pytest.mark.parametrize("draft", ["none", "other", "itself"])
def test_each_row_of_a_batch_equals_its_own_run(draft: str) -> None:
    target, chunk = model("qwen2"), 6
    drafter = {"none": None, "other": model("llama", seed=1)}.get(draft, target)
    requests = [Request(prompt(length), 16) for length in (1, 17, chunk, chunk + 1, 3 * chunk - 1)]
    options = SMALL | {"chunk_tokens": chunk, "gpu_kv_budget": "256KiB"}
    with make_engine(target, drafter, **options) as engine:
        serve(engine, requests)
    for request in requests:
        assert request.tokens == best(target, request.prompt, 16)


# vllm 49548: a starved draft does not keep its KV up and drafts garbage afterwards.


@pytest.mark.parametrize("window", [None, 64])
def test_acceptance_recovers_after_the_draft_starved(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, generator = model("qwen3"), random.Random(0)
    with make_engine(target, target, num_speculative_tokens=4, draft_window=window, **SMALL) as engine:
        draft, fed, starved = engine._speculator._draft, 4, 0

        def starving(rows: list[RequestRows], step: int) -> None:
            nonlocal fed, starved
            if step == 0:
                fed = generator.choice([0, 0, 1, 2, 4])  # steps of this round that are done
                starved += fed < 4
            if step < fed:
                draft(rows, step)

        monkeypatch.setattr(engine._speculator, "_draft", starving)
        requests = [Request(prompt(length), NEW_TOKENS, joins=joins) for length, joins in ((9, 0), (14, 3))]
        serve(engine, requests)
        metrics = engine.metrics()
        assert starved > 5
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 10
    for request in requests:
        assert request.tokens == best(target, request.prompt)


def test_acceptance_recovers_after_candidates_were_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's KV of what the target did not commit must be forgotten."""
    target, generator = model("qwen3"), random.Random(1)
    with make_engine(target, target, num_speculative_tokens=4, **SMALL) as engine:
        draft, lie_at, lies = engine._speculator._draft, -1, 0

        def lying(rows: list[RequestRows], step: int) -> None:
            nonlocal lie_at, lies
            if step == 0:
                lie_at = generator.choice([-2, -1, 0, 1])  # -2: no draft in this round
            if lie_at == -2:
                return
            draft(rows, step)
            for row in rows:
                if step == lie_at and len(row.next_candidates.tokens) == step + 1:
                    row.next_candidates.tokens[step] = (
                        row.next_candidates.tokens[step] + 1
                    ) % 96  # the next step feeds on it
                    lies += len(row.next_candidates.tokens) > 0

        monkeypatch.setattr(engine._speculator, "_draft", lying)
        request = Request(prompt(9), NEW_TOKENS)
        engine.submit(request.prompt, max_new_tokens=NEW_TOKENS)
        truthful = 0
        while engine.has_unfinished:
            expected_lie, before = lie_at, engine.metrics()
            for step in engine.step():
                request.tokens += step.new_token_ids
            after = engine.metrics()
            proposed = after.num_draft_tokens - before.num_draft_tokens
            accepted = after.num_accepted_tokens - before.num_accepted_tokens
            assert accepted == (min(expected_lie, proposed) if expected_lie >= 0 else proposed)
            truthful += expected_lie < 0 and proposed > 0
        assert request.tokens == best(target, request.prompt)
        assert lies > 2
        assert truthful > 0


# vllm PR 26027: streaming keeps only the last token of a multi-token step.

TEXT = "spec 投機的デコード 🚀🚀 ok — naïve 速い 👩‍💻 fin."
PROMPT_BYTES = 8


class Recital(nn.Module):
    """Recites TEXT by position, one byte a token; its attention is there but adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        script = torch.tensor([*TEXT.encode(), *bytes(1024)], dtype=torch.int64)
        self.script = nn.Parameter(F.one_hot(script[1:], 256).double(), requires_grad=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)[:, None]
        attended = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.embedding(position_ids, self.script) + 0 * attended.sum(-1).transpose(1, 2)


@cache
def recital() -> Recital:
    return Recital().double().eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, whose id is the byte."""
    letters = _letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _letters() -> list[str]:
    """The letter that byte-level tokenizers write each byte as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + rest.index(byte)) for byte in range(256)]


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 16])
def test_joined_deltas_are_the_whole_text(depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = list(TEXT.encode())
    ids, rest = whole[:PROMPT_BYTES], whole[PROMPT_BYTES:]
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(rest) == TEXT.encode()[PROMPT_BYTES:].decode()
    for draft in (recital(), None):
        with make_engine(recital(), draft, num_speculative_tokens=depth, **SMALL) as engine:
            request = Request(tuple(ids), len(rest))
            serve(engine, [request])  # it joins the deltas of steps and compares them with the output
            assert request.tokens == rest
            capsys.readouterr()
            engine.generate([ids], max_new_tokens=len(rest), streamer=TextStreamer(tokenizer, skip_prompt=True))
            assert capsys.readouterr().out == TEXT.encode()[PROMPT_BYTES:].decode() + "\n"
