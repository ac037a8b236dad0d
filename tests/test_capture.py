"""Capturing: what is accepted is the model itself at every number of tokens, and is left as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from specstream.capture import capture, forward_of
from specstream.compiler import compile_model
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.graph import ModelGraph
from specstream.models.load import load_model
from specstream.models.rope import max_positions, rope_parameters
from specstream.models.trial import why_not_causal
from tests.architectures import (
    DYNAMIC,
    VOCAB,
    PlainMask,
    build,
    config,
    longrope,
)


def random_inputs(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (1, tokens)), torch.arange(tokens)[None]


@pytest.fixture(scope="module", params=["qwen3", "llama3", "phi3", "plain_mask"])
def captured(request: pytest.FixtureRequest) -> tuple[nn.Module, ModelGraph]:
    model = build(request.param)
    return model, capture(model, name=request.param, max_model_len=None)


def test_graph_is_the_model_at_every_length(captured: tuple[nn.Module, ModelGraph]) -> None:
    model, graph = captured
    forward = forward_of(model)
    for tokens in (1, 2, 3, 16, 47, 300):
        inputs = random_inputs(tokens)
        with torch.no_grad():
            torch.testing.assert_close(graph.gm(*inputs), forward(*inputs), rtol=1e-6, atol=1e-6)


def test_positions_are_data(captured: tuple[nn.Module, ModelGraph]) -> None:
    """The first of two requests in one row of tokens is computed as if it were alone."""
    model, graph = captured
    ids, _ = random_inputs(10)
    positions = torch.cat((torch.arange(3, 9), torch.arange(4)))[None]
    with torch.no_grad():
        alone = forward_of(model)(ids[:, :6], positions[:, :6])
        torch.testing.assert_close(graph.gm(ids, positions)[:, :6], alone, rtol=1e-6, atol=1e-6)


def test_placeholders_and_parameters(captured: tuple[nn.Module, ModelGraph]) -> None:
    model, graph = captured
    graph.validate()
    placeholders = [node.target for node in graph.gm.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["input_ids", "position_ids"]
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    read = [getattr(graph.gm, node.target) for node in graph.gm.graph.nodes if node.op == "get_attr"]
    assert read
    assert all(id(tensor) in own for tensor in read)
    assert graph.spec.vocab_size == VOCAB
    assert graph.spec.dtype == torch.float64


@pytest.mark.parametrize("name", ["llama", "plain_repeat"])
def test_thousands_of_tokens(name: str) -> None:
    model = build(name, torch.float32)
    graph = capture(model, name=name, max_model_len=None)
    inputs = random_inputs(4096)
    with torch.no_grad():
        torch.testing.assert_close(graph.gm(*inputs), forward_of(model)(*inputs), rtol=1e-3, atol=1e-3)


def test_many_models_of_a_class_in_one_process() -> None:
    """More than Dynamo's recompile limit; no configuration is changed, and nothing is kept of the models."""
    before = torch._dynamo.config.get_config_copy()
    graph_breaks = len(torch._dynamo.utils.counters["graph_break"])
    gone = []
    for seed in range(12):
        model = build("plain_mask", seed=seed, layers=1)
        graph = capture(model, name="m", max_model_len=None)
        inputs = random_inputs(5)
        torch.testing.assert_close(graph.gm(*inputs), model(*inputs))
        gone.append(weakref.ref(model.get_parameter("head.weight")))
        del model, graph
    gc.collect()
    assert [reference() for reference in gone] == [None] * 12
    assert torch._dynamo.config.get_config_copy() == before
    assert len(torch._dynamo.utils.counters["graph_break"]) == graph_breaks


def test_capture_inside_a_users_settings() -> None:
    with torch._dynamo.config.patch(suppress_errors=True, specialize_float=False, recompile_limit=1):
        for seed in range(2):
            capture(build("plain_repeat", seed=seed), name="m", max_model_len=None)
        assert torch._dynamo.config.suppress_errors


# What a model is, for comparing it before and after.


def state_of(model: nn.Module) -> dict[object, Any]:
    """Identities and values of tensors, hooks, flags, configurations and rotary attributes."""
    state: dict[object, Any] = {"registered": sorted(AttentionInterface._global_mapping)}
    for name, module in model.named_modules():
        state[name, "hooks"] = (list(module._forward_hooks), list(module._forward_pre_hooks))
        state[name, "training"] = module.training
        state[name, "rope"] = copy.deepcopy(getattr(module, "rope_type", None))
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            state[name, "config"] = (id(module.config), module.config.to_dict())
            state[name, "attention"] = module.config._attn_implementation
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name, "tensor"] = (id(tensor), tensor.requires_grad, tensor.detach().clone().tolist())
    return state


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    inputs = random_inputs(7)
    with torch.no_grad():
        logits = forward_of(model)(*inputs)
    before, random_state = state_of(model), torch.random.get_rng_state()
    yield
    assert state_of(model) == before
    assert torch.equal(torch.random.get_rng_state(), random_state)
    with torch.no_grad():
        assert torch.equal(forward_of(model)(*inputs), logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_model_is_left_as_it_was(attention: str) -> None:
    model = build("llama", attn_implementation=attention)
    with left_as_it_was(model):
        compile_model(model, "m", None)


def test_model_is_left_as_it_was_when_refused() -> None:
    model = build("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with left_as_it_was(model), pytest.raises(UnsupportedModel):
        compile_model(model, "m", None)


@pytest.mark.parametrize(
    ("make", "covered"),
    [
        (lambda: build("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=64), 64),
        (longrope, 64),
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_changes_with_length_is_exact_in_short_texts(make: Callable[[], nn.Module], covered: int) -> None:
    model = make()
    with left_as_it_was(model):
        graph = capture(model, name="m", max_model_len=covered)
    assert graph.spec.max_positions == covered
    inputs = random_inputs(covered)
    with torch.no_grad():
        expected = forward_of(model)(*inputs)
        forward_of(model)(*random_inputs(covered + 30))  # frequencies of a longer text must not reach the graph
        torch.testing.assert_close(graph.gm(*inputs), expected, rtol=1e-6, atol=1e-6)
        again = capture(model, name="m", max_model_len=covered)
        torch.testing.assert_close(again.gm(*inputs), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
    ],
)
def test_max_positions(changes: dict[str, Any], expected: int) -> None:
    rope = {"rope_theta": 1e4} | changes
    model = build("llama", max_position_embeddings=1024, rope_parameters=rope)
    assert max_positions(model) == expected
    assert (rope_parameters(model) or {})["rope_type"] == changes.get("rope_type", "default")
    assert max_positions(build("plain_mask")) is None


# Windows that hide nothing are no windows.


def test_window_that_hides_nothing() -> None:
    model = build("mistral", sliding_window=40, num_hidden_layers=1)
    graph = capture(model, name="m", max_model_len=40)
    inputs = random_inputs(40)
    with torch.no_grad():
        torch.testing.assert_close(graph.gm(*inputs), forward_of(model)(*inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 2, 3, 64, 1000, 1 << 20])
def test_rules_of_masks_are_asked_up_to_the_limit(limit: int) -> None:
    def causal(batch: Tensor, head: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        return kv <= query

    def windowed(batch: Tensor, head: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        return (kv <= query) & (kv > query - max(limit, 3) + 1)

    def chunked(batch: Tensor, head: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        return (kv <= query) & (query // 2 == kv // 2)

    def prefixed(batch: Tensor, head: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        return (kv <= query) | (kv < 2)

    assert why_not_causal(causal, limit) is None
    assert why_not_causal(windowed, limit) == f"position {max(limit, 3) - 1} does not see position 0"
    assert "does not see position" in str(why_not_causal(chunked, limit))
    assert why_not_causal(prefixed, limit) == "position 0 sees position 1"


# Refusals


class Counting(PlainMask):
    """Counts its calls in a buffer, in place or in a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(layers=1)
        self.in_place = in_place
        self.calls: Tensor = nn.Buffer(torch.zeros(()))
        self.eval().double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return super().forward(input_ids, position_ids)


@pytest.mark.parametrize(
    ("in_place", "text"), [(True, "its forward writes to calls"), (False, "its forward keeps a value for later")]
)
def test_a_model_with_state_is_refused_and_its_state_restored(in_place: bool, text: str) -> None:
    model = Counting(in_place)
    calls = model.calls
    with pytest.raises(UnsupportedModel, match=text):
        capture(model, name="m", max_model_len=None)
    assert model.calls is calls
    assert model.calls.item() == 0


def test_load_model_from_a_directory(tmp_path: Any) -> None:
    model = build("qwen3", torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path / "tiny")
    loaded, _, name = load_model(tmp_path / "tiny", torch.float64, "cpu")
    assert (name, loaded.training) == ("tiny", False)
    inputs = random_inputs(5)
    with torch.no_grad():
        torch.testing.assert_close(forward_of(loaded)(*inputs).float(), forward_of(model)(*inputs))
    assert next(load_model(str(tmp_path / "tiny"), device="cpu")[0].parameters()).dtype == torch.float32


def test_load_model_passes_modules_through() -> None:
    model = build("plain_mask")
    assert load_model(model) == (model, None, "PlainMask")
    named = build("llama", name_or_path="somewhere/Tiny-Llama")
    assert load_model(named)[2] == "Tiny-Llama"


@pytest.mark.parametrize("exists", [True, False])
def test_load_model_says_what_was_tried(tmp_path: Any, exists: bool) -> None:
    path = tmp_path if exists else tmp_path / "nobody" / "nothing"
    with pytest.raises(InvalidOption, match=r"model: got .*directory") as refused:
        load_model(str(path), device="cpu")
    assert "\n" not in str(refused.value)
    assert ("There is no directory" in str(refused.value)) is not exists


def test_config_changes_reach_the_tests() -> None:
    assert config("qwen3", num_hidden_layers=1).num_hidden_layers == 1
