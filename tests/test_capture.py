"""Capturing: what is accepted is the model itself at every number of tokens; what is refused says why."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from specstream.capture import capture, forward_of
from specstream.compiler import compile_model
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.graph import ModelGraph
from specstream.models.load import load_model
from specstream.models.normalize import max_positions, rope_parameters
from specstream.models.trial import why_not_causal
from tests.architectures import VOCAB, PlainBlock, PlainMask, build, config, from_config


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


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 4, "long_factor": [3.0] * 4}


def longrope() -> nn.Module:
    rope = dict(LONGROPE)
    return build("phi3", rope_parameters=rope, original_max_position_embeddings=64, num_hidden_layers=1)


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


class Masked(PlainMask):
    """PlainMask with another mask."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.rule = rule
        self.eval().double()

    def mask(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.rule(input_ids, position_ids)


class Block(PlainBlock):
    """PlainBlock with another attention."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(4, 32)
        self.attend = attend

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attending(attend: Callable[..., Tensor]) -> nn.Module:
    model = PlainMask(layers=1)
    model.blocks.append(Block(attend))
    return model.eval().double()


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3)
    rows = torch.arange(scores.shape[-1])
    return scores.masked_fill(rows[:, None] < rows[None], float("-inf")).softmax(-1) @ v


def rows_before(ids: Tensor) -> Tensor:
    rows = torch.arange(ids.shape[1])
    return rows[:, None] - rows[None, :]


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, VOCAB)
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.tokens(input_ids)  # type: ignore[no-any-return]


class WithoutPositions(NoAttention):
    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, input_ids)


class Branching(PlainMask):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if input_ids.sum() > 3:
            position_ids = position_ids + 1
        return super().forward(input_ids, position_ids)


class TwoGeometries(PlainMask):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.blocks.append(PlainBlock(8, 32))
        self.eval().double()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return PlainMask().eval()


def hooked() -> nn.Module:
    model = build("llama")
    setattr(model.get_submodule("model.layers.0"), "_hf_hook", object())  # noqa: B010
    return model


def split_over_devices() -> nn.Module:
    model = build("plain_mask")
    model.head = nn.Linear(32, VOCAB, device="meta")
    return model.eval()


SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}


def other(kind: type[PretrainedConfig], **settings: Any) -> nn.Module:
    return from_config(kind(**(SHARED | settings)), torch.float32)


def mla() -> nn.Module:
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return other(DeepseekV3Config, **heads, num_key_value_heads=4, first_k_dense_replace=2)


def moe() -> nn.Module:
    """With the eager experts, which loop over those that were hit."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return other(Qwen3MoeConfig, **experts, experts_implementation="eager")


def llama4() -> nn.Module:
    """Its layers without RoPE scale queries by torch.arange, which shows only beyond 8192 tokens."""
    return other(Llama4TextConfig, head_dim=8, num_local_experts=2, no_rope_layers=[1, 0])


def bert() -> nn.Module:
    model: nn.Module = BertForMaskedLM(BertConfig(**SHARED))
    return model.eval()


def t5() -> nn.Module:
    model: nn.Module = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=2))
    return model.eval()


REFUSALS: dict[str, tuple[Callable[[], nn.Module], int | None, str]] = {
    "window": (
        lambda: build("mistral", sliding_window=64),
        65,
        "model.layers.0.self_attn: it attends to a sliding window of 64 tokens. "
        "Set max_model_len <= 64 (now 65), where the window hides nothing",
    ),
    "window_in_some_layers": (
        lambda: build("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        None,
        "model.layers.1.self_attn: it attends to a sliding window of 64 tokens",
    ),
    "chunks": (
        lambda: other(Llama4TextConfig, head_dim=8, num_local_experts=2, attention_chunk_size=64),
        None,
        "model.layers.0.self_attn: its mask is not causal: position 4096 does not see position 0",
    ),
    "softcap": (
        lambda: other(Gemma2Config, head_dim=8),
        64,
        "model.layers.0.self_attn: it caps attention scores (softcap 50.0)",
    ),
    "sinks": (
        lambda: other(GptOssConfig, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        64,
        "model.layers.0.self_attn: its softmax has sinks (s_aux)",
    ),
    "bidirectional": (bert, None, "attention.self: its mask is not causal: position 0 sees position 1"),
    "encoder_decoder": (t5, None, "the model: it is an encoder-decoder. Use a decoder-only language model."),
    "own_attention": (
        lambda: other(MambaConfig),
        None,
        "the model: MambaForCausalLM does not attend through transformers' AttentionInterface",
    ),
    "own_masks": (lambda: other(FalconConfig, alibi=True), None, "FalconForCausalLM does not run without a mask"),
    "mla": (mla, None, "self_attn: its keys and values differ in head_dim (12 and 8, as in MLA)"),
    "experts_in_a_loop": (moe, None, "the model: TorchDynamo cannot capture it as one graph: UserError"),
    "positions_by_arange": (
        llama4,
        None,
        "model.layers.1.self_attn: it calculates with torch.arange over the tokens, as if that were their positions",
    ),
    "dynamic": (
        lambda: build("llama", rope_parameters=dict(DYNAMIC)),
        20000,
        "model.rotary_emb: dynamic RoPE changes with the length of the text beyond 8192 positions. "
        "Set max_model_len <= 8192, or rope_type 'yarn' with factor 3",
    ),
    "longrope": (longrope, 65, "model.rotary_emb: longrope RoPE changes with the length of the text beyond 64"),
    "training": (lambda: build("llama").train(), None, "the model: it is in training mode. Call model.eval()"),
    "training_in_part": (
        lambda: _train(build("plain_mask"), "blocks.1.dropout"),
        None,
        "blocks.1.dropout: it is in training mode. Call model.eval() first.",
    ),
    "meta": (on_meta, None, "tokens.weight: it is on the meta device and has no values. Load the model's weights."),
    "split": (split_over_devices, None, "head.weight: it is on the meta device"),
    "offloaded": (hooked, None, "model.layers.0: accelerate moves its weights or inputs by a hook"),
    "no_positions": (WithoutPositions, None, "WithoutPositions.forward takes no position_ids. Give it the signature"),
    "no_attention": (NoAttention, None, "the model: it calls no F.scaled_dot_product_attention. Call"),
    "branching": (
        lambda: Branching().eval(),
        None,
        "the model: TorchDynamo cannot capture it as one graph: Unsupported: Data-dependent branching",
    ),
    "geometries": (
        TwoGeometries,
        None,
        "blocks.1: its KV has 8 heads of 4, that of blocks.0 4 of 8. Use a model whose attentions all have KV",
    ),
    "by_hand": (
        lambda: attending(by_hand),
        None,
        "blocks.1: it has a hand-written attention (a softmax over tokens). Call F.scaled_dot_product_attention",
    ),
    "not_causal": (
        lambda: attending(F.scaled_dot_product_attention),
        None,
        "blocks.1: its attention is not causal (is_causal=False, no mask). Call",
    ),
    "dropout": (
        lambda: attending(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)),
        None,
        "blocks.1: its attention drops out (dropout_p=0.1)",
    ),
    "cross": (
        lambda: attending(
            lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, -2:], v[:, :, -2:], is_causal=True)
        ),
        None,
        "queries over 2 keys, not of tokens over themselves",
    ),
    "layout": (
        lambda: attending(lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)[None]),
        None,
        "blocks.1: its attention has an operand of shape [4, ",
    ),
    "mask_window": (
        lambda: Masked(lambda ids, positions: (rows_before(ids) >= 0) & (rows_before(ids) < 512)),
        None,
        "blocks.0: its mask is not causal: of 1000 tokens, token 512 does not see token 0",
    ),
    "mask_sees_all": (
        lambda: Masked(lambda ids, positions: rows_before(ids) > -8192),
        None,
        "blocks.0: its mask is not causal: of 2 tokens, token 0 sees token 1",
    ),
    "mask_of_positions": (
        lambda: Masked(lambda i, p: (p[0, :, None] >= p[0]) & (p[0, :, None] - p[0] < 30000)),
        32768,
        "blocks.0: its mask is not causal",
    ),
    "mask_of_values": (
        lambda: Masked(lambda ids, positions: (rows_before(ids) >= 0) & (ids[0] != 3)),
        None,
        "blocks.0: its mask is not causal",
    ),
    "mask_adds": (
        lambda: Masked(lambda ids, p: (-rows_before(ids)).double().masked_fill(rows_before(ids) < 0, float("-inf"))),
        None,
        "blocks.0: its mask adds numbers to the scores (a bias, such as ALiBi)",
    ),
    "mask_written_in_place": (
        lambda: Masked(lambda ids, p: (rows_before(ids) >= 0).fill_(True)),
        None,
        "blocks.0: its mask is not causal: of 2 tokens, token 0 sees token 1",
    ),
    "mask_too_small": (
        lambda: Masked(lambda ids, p: torch.ones(64, 64, dtype=torch.bool).tril()[: ids.shape[1], : ids.shape[1]]),
        None,
        "it computes the same way only for some numbers of tokens (2 <= L['input_ids'].size()[1] and "
        "L['input_ids'].size()[1] <= 64). Set max_model_len if it is for texts of less than",
    ),
}


def _train(model: nn.Module, name: str) -> nn.Module:
    model.get_submodule(name).train()
    return model


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str) -> None:
    make, limit, text = REFUSALS[case]
    with pytest.raises(UnsupportedModel) as refused:
        compile_model(make(), case, limit)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_masks_that_are_only_causal() -> None:
    """The refusals' twins: masks by positions, written in place, and too small for more than the limit."""

    def in_place(ids: Tensor, positions: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        mask.tril_()
        return mask[None, None]

    cases: list[tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = [
        (lambda ids, p: p[0, :, None] >= p[0], 32768),
        (in_place, None),
        (lambda ids, p: torch.ones(64, 64, dtype=torch.bool).tril()[: ids.shape[1], : ids.shape[1]], 64),
    ]
    for rule, limit in cases:
        counts = compile_model(Masked(rule), "m", limit).op_counts()
        assert [counts[op] for op in ("ones", "tril", "tril_", "ge")] == [0, 0, 0, 0]


# Loading


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
