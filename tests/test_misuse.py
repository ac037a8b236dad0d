"""Wrong uses of an engine are refused in a line, and the engine goes on; unusual ones that are right work."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria

import specstream
from specstream.errors import EngineBusy, InvalidOption, SpecStreamError, UnsupportedModel
from tests.architectures import build
from tests.helpers import best, make_engine, model, new_engine, prompt


def test_two_threads_are_never_in_one_engine() -> None:
    """Whoever comes second is refused; what runs is not disturbed."""
    with new_engine(gpu_kv_budget="min") as engine:
        results: list[list[int]] = []
        refused = 0

        def work(number: int) -> None:
            nonlocal refused
            for _ in range(15):
                try:
                    out: Any = engine.generate([list(prompt(9, number))], max_new_tokens=12)
                except EngineBusy:
                    refused += 1
                else:
                    results.append([number, *out[0, 9:].tolist()])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results
        assert all(tokens == best(prompt(9, number), 12) for number, *tokens in results)
        again: Any = engine.generate([list(prompt(9))], max_new_tokens=12)
        assert again[0, 9:].tolist() == best(prompt(9), 12)


class Meddling:
    """A streamer that calls the engine it is called by."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.refused = engine, 0

    def put(self, _: object) -> None:
        with pytest.raises(EngineBusy, match="the engine is in use, by another thread or by a call of it further up"):
            self.engine.generate([[1, 2]], max_new_tokens=3)
        self.refused += 1

    def end(self) -> None: ...


def test_generate_inside_generate_is_refused() -> None:
    with new_engine() as engine:
        streamer = Meddling(engine)
        out: Any = engine.generate([list(prompt(9))], max_new_tokens=6, streamer=streamer)
        assert streamer.refused == 7
        assert out[0, 9:].tolist() == best(prompt(9), 6)


class Cancelling(StoppingCriteria):
    """Calls the engine from inside a round."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.refused = engine, 0

    def __call__(self, input_ids: Any, scores: Any, **_: object) -> Any:
        for call in (lambda: self.engine.cancel(0), self.engine.reset, self.engine.step, self.engine.close):
            with pytest.raises(EngineBusy):
                call()
            self.refused += 1
        return torch.tensor([False])


def test_no_call_reaches_into_a_round() -> None:
    with new_engine(gpu_kv_budget="min") as engine:
        criterion = Cancelling(engine)
        out: Any = engine.generate([list(prompt(9))], max_new_tokens=6, stopping_criteria=[criterion])
        assert criterion.refused == 4 * 6
        assert out[0, 9:].tolist() == best(prompt(9), 6)


def test_no_call_from_a_streamer() -> None:
    with new_engine() as engine:
        refused = []

        class Calling:
            def put(self, value: Any) -> None:
                calls = (lambda: engine.cancel(0), engine.reset, engine.step, engine.close)
                for call in (*calls, lambda: engine.submit(prompt(3), max_new_tokens=1)):
                    with pytest.raises(EngineBusy):
                        call()
                    refused.append(1)

            def end(self) -> None:
                self.put(None)

        out: Any = engine.generate([list(prompt(9))], max_new_tokens=6, streamer=Calling())
        assert len(refused) == 5 * 8
        assert out[0, 9:].tolist() == best(prompt(9), 6)
        assert engine.submit(prompt(3), max_new_tokens=1) == 1


@pytest.mark.parametrize("compiled_inside", [True, False])
@pytest.mark.parametrize("used_inside", [True, False])
def test_inference_mode(compiled_inside: bool, used_inside: bool) -> None:
    target = model("qwen3")
    with torch.inference_mode(compiled_inside):
        engine = specstream.compile(target, target, max_model_len=64, gpu_kv_budget="min", chunk_tokens=4)
    with engine, torch.inference_mode(used_inside):
        out: Any = engine.generate([list(prompt(30))], max_new_tokens=8)
    assert out[0, 30:].tolist() == best(prompt(30), 8)


@pytest.mark.parametrize(
    "given", [torch.tensor(prompt(9)), np.array(prompt(9)), tuple(prompt(9)), list(np.array(prompt(9)))]
)
def test_prompts_of_other_kinds(given: Any) -> None:
    with new_engine() as engine:
        engine.submit(given, max_new_tokens=5)
        tokens = [token for _ in range(5) for out in engine.step() for token in out.new_token_ids]
    assert tokens == best(prompt(9), 5)


@pytest.mark.parametrize("given", [None, 7, "hello", [1, 2, 3], [["a"]], [[1.5]], []])
def test_inputs_that_are_none(given: Any) -> None:
    with new_engine() as engine:
        with pytest.raises(SpecStreamError):
            engine.generate(given, max_new_tokens=2)
        wrong: Any = "hello" if given == [1, 2, 3] else given
        with pytest.raises(InvalidOption):
            engine.submit(wrong, max_new_tokens=2)
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"target": None}, "target: got None; allowed: an nn.Module, the name of a model, or a directory."),
        ({"draft": 5}, "draft: got 5; allowed: an nn.Module, the name of a model, or a directory."),
        ({"dtype": torch.float32}, "dtype: got torch.float32; allowed: None for a target that is a module. Convert"),
        ({"device": "cpu"}, "device: got 'cpu'; allowed: None for a target that is a module. Convert it with .to(dev"),
        ({"device": "tpu"}, "device: got 'tpu'; allowed: None or 'cpu' or 'cuda', with or without an index."),
        ({"max_model_len": 2}, "max_model_len: got 2; allowed: at least 3"),
    ],
)
def test_what_compile_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOption) as error:
        specstream.compile(**{"target": model("qwen3"), "draft": None, **arguments})
    assert text in str(error.value)


def test_a_refusal_says_which_model_is_meant() -> None:
    windowed = build("mistral", sliding_window=8)
    with pytest.raises(UnsupportedModel, match=r"draft model.layers.0.self_attn: it attends to a sliding window"):
        specstream.compile(model("qwen3"), windowed, max_model_len=64)
    with pytest.raises(UnsupportedModel, match=r"target model.layers.0.self_attn: it attends to a sliding window"):
        specstream.compile(windowed, None, max_model_len=64)


def test_what_torch_compile_returns_is_the_model_it_was_made_from() -> None:
    compiled: Any = torch.compile(model("qwen3"))
    with specstream.compile(compiled, compiled, max_model_len=64, gpu_kv_budget="min") as engine:
        assert engine.generation_config is compiled._orig_mod.generation_config
        out: Any = engine.generate([list(prompt(30))], max_new_tokens=8)
    assert out[0, 30:].tolist() == best(prompt(30), 8)


@pytest.mark.parametrize(("how", "name"), [("method", ""), ("forward", ""), ("child", " model")])
def test_a_model_compiled_in_place_or_in_part_is_refused(how: str, name: str) -> None:
    target: Any = build("llama")
    if how == "method":
        target.compile()
    elif how == "forward":
        target.forward = torch.compile(target.forward)
    else:
        target.model = torch.compile(target.model)
    with pytest.raises(UnsupportedModel) as refused:
        specstream.compile(target, None, max_model_len=64)
    assert str(refused.value) == (
        f"target{name}: it is compiled by torch.compile already. "
        "Give the model as it was before: SpecStream captures it itself."
    )


def test_a_model_with_nan_is_told_so() -> None:
    broken = build("llama")
    broken.get_parameter("lm_head.weight").data[3] = float("nan")
    with pytest.raises(UnsupportedModel, match=r"its own logits are not finite in torch.float64"):
        specstream.compile(broken, None, max_model_len=64)


def test_the_plan_shown_is_of_the_round_that_ran() -> None:
    with new_engine(gpu_kv_budget="min") as engine:
        before = engine.plan
        engine.generate([list(prompt(30))], max_new_tokens=8)
        assert engine.plan is not before
        assert engine.plan.spec.streamed_bytes > 0


def test_sizes_larger_than_the_longest_request_waste_nothing() -> None:
    with make_engine(model("qwen3"), None, max_model_len=64, chunk_tokens=10**6) as engine:
        assert engine.memory.layout.chunk_tokens == 64
