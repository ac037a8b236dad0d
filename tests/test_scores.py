"""Log-probabilities, scores and logits of what was produced agree with the target alone, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specstream.errors import InvalidOption
from tests.helpers import make_engine, model, new_engine, prompt

OPTIONS: dict[str, Any] = {"max_model_len": 64, "chunk_tokens": 4, "gpu_kv_budget": "min"}


def logits_alone(target: Any, text: list[int], new: int) -> Tensor:
    """The target's own logits float64 [new, vocab] for the last `new` tokens of a text, from one plain forward."""
    with torch.no_grad():
        logits: Tensor = target(torch.tensor([text]), use_cache=False).logits[0].double()
    return logits[-new - 1 : -1]


@pytest.mark.parametrize(("depth", "dtype"), [(1, torch.float64), (4, torch.float32), (8, torch.float32)])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.6, "top_k": 7, "seed": 5}])
def test_log_probabilities_are_the_targets_at_every_position(
    depth: int, sampling: dict[str, Any], dtype: torch.dtype
) -> None:
    target, draft = model("qwen3", dtype), model("qwen3", dtype, seed=1)
    for second in (target, draft):
        with make_engine(target, second, num_speculative_tokens=depth, **OPTIONS) as engine:
            ids = [list(prompt(9)), list(prompt(22))]
            out: Any = engine.generate(
                ids, max_new_tokens=14, logprobs=True, return_dict_in_generate=True, output_logits=True, **sampling
            )
        for row, own in enumerate(out.requests):
            expected = logits_alone(target, ids[row] + own.token_ids, 14)
            chosen = torch.log_softmax(expected, -1).gather(1, torch.tensor(own.token_ids)[:, None])[:, 0]
            assert len(own.logprobs) == len(own.token_ids) == 14
            assert (torch.tensor(own.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
            assert own.logprobs != [0.0] * 14
            torch.testing.assert_close(own.logits.double(), expected, atol=1e-4, rtol=0)


def test_scores_are_what_transformers_gives() -> None:
    target: Any = model("qwen3")
    arguments: dict[str, Any] = {
        "max_new_tokens": 10,
        "repetition_penalty": 1.3,
        "min_new_tokens": 3,
        "eos_token_id": list(range(0, 96, 7)),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    ids = torch.tensor([prompt(9)])
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)
    with make_engine(target, model("qwen3", seed=1), **OPTIONS) as engine:
        ours: Any = engine.generate(ids, **arguments)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        own, theirs = ours[name], plain[name]
        assert isinstance(own, tuple)
        assert [each.shape for each in own] == [each.shape for each in theirs]
        torch.testing.assert_close(torch.stack(own), torch.stack(theirs), atol=1e-5, rtol=0)


def test_rows_that_ended_have_zeros() -> None:
    with new_engine() as engine:
        ids = [list(prompt(9)), list(prompt(5))]
        plain: Any = engine.generate(ids, max_new_tokens=8)
        end = plain[0, 9 + 2].item()
        out: Any = engine.generate(
            ids, max_new_tokens=8, eos_token_id=end, return_dict_in_generate=True, output_scores=True
        )
    lengths = [len(request.token_ids) for request in out.requests]
    assert min(lengths) < max(lengths) == len(out.scores)
    for row, length in enumerate(lengths):
        assert [bool(step[row].any()) for step in out.scores] == [t < length for t in range(max(lengths))]


def test_a_step_gives_the_log_probabilities_of_its_tokens() -> None:
    with new_engine() as engine:
        asked = engine.submit(prompt(9), max_new_tokens=9, logprobs=True)
        engine.submit(prompt(7), max_new_tokens=9)
        pieces: list[float] = []
        while engine.has_unfinished:
            for step in engine.step():
                if step.request_id != asked:
                    assert step.logprobs is None
                    continue
                assert step.logprobs is not None
                assert len(step.logprobs) == len(step.new_token_ids)
                pieces += step.logprobs
                if step.output:
                    assert step.output.logprobs == pieces
                    assert step.output.scores is None


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_scores_need_a_place_in_the_result(name: str) -> None:
    with new_engine() as engine:
        with pytest.raises(InvalidOption) as error:
            engine.generate([list(prompt(5))], max_new_tokens=2, **{name: True})
        assert str(error.value) == (
            f"{name}: got True; allowed: False without return_dict_in_generate=True. Pass return_dict_in_generate=True."
        )
