"""What capture refuses, with the module's name, the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from specstream.compiler import compile_model
from specstream.errors import UnsupportedModel
from tests.architectures import (
    DYNAMIC,
    VOCAB,
    PlainBlock,
    PlainMask,
    build,
    from_config,
    longrope,
)


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


def quantized() -> nn.Module:
    model: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
        build("llama", torch.float32), {nn.Linear}
    )
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
    "quantized": (
        quantized,
        None,
        "TorchDynamo cannot capture it as one graph",
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


@pytest.mark.filterwarnings("ignore:.*deprecated")
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


class Int8Linear(nn.Module):
    """Weight-only quantisation in plain operations."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_buffer("weight").to(x.dtype) * self.get_buffer("scale"))


def test_quantized_weights_in_plain_operations_are_accepted() -> None:
    model = build("llama", torch.float32)
    for parent in list(model.get_submodule("model").modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
    partitioned = compile_model(model.eval(), "int8", None)
    assert partitioned.weight_bytes < sum(p.nbytes for p in build("llama", torch.float32).parameters()) * 0.6
