"""Tiny random models of the architectures that SpecStream captures, for all tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 96
POSITIONS = 8192

_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"layers": 3, "heads": (4, 2), "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_yarn": (
        Qwen3Config,
        {
            "layers": 2,
            "heads": (6, 2),
            "head_dim": 16,
            "max_position_embeddings": POSITIONS // 4,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "qwen2": (Qwen2Config, {"layers": 2, "heads": (6, 2), "sliding_window": 4, "use_sliding_window": False}),
    "llama": (LlamaConfig, {"layers": 1, "heads": (4, 4)}),
    "llama3": (
        LlamaConfig,
        {
            "layers": 2,
            "heads": (8, 2),
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm": (LlamaConfig, {"layers": 5, "heads": (9, 3), "hidden_size": 36, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"layers": 2, "heads": (4, 1), "head_dim": 8, "sliding_window": None}),
    "phi3": (Phi3Config, {"layers": 2, "heads": (4, 2), "pad_token_id": 0}),
    "gemma": (GemmaConfig, {"layers": 2, "heads": (4, 1), "head_dim": 16}),
    "granite": (
        GraniteConfig,
        {
            "layers": 2,
            "heads": (4, 2),
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
        },
    ),
}

ARCHITECTURES = (*_CONFIGS, "plain_mask", "plain_repeat")


def config(name: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a transformers architecture, with changes by transformers' names."""
    kind, settings = _CONFIGS[name]
    settings = dict(settings)
    heads, kv_heads = settings.pop("heads")
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32 if heads != 6 else 24,
        "intermediate_size": 48,
        "num_hidden_layers": settings.pop("layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return kind(**(base | settings | changes))


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model in eval mode. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in _CONFIGS:
            model = from_config(config(name, **changes), dtype)
        else:
            model = {"plain_mask": PlainMask, "plain_repeat": PlainRepeat}[name](**changes).to(dtype)
    return model.eval()


def from_config(settings: PretrainedConfig, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A random transformers model in eval mode, its weights large enough for attention to matter."""
    model: nn.Module = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


class PlainMask(nn.Module):
    """GPT-like: learned positions, a mask (boolean or additive) in each layer, one fused projection."""

    def __init__(self, layers: int = 2, heads: int = 4, width: int = 32, additive: bool = False) -> None:
        super().__init__()
        self.additive = additive
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList(PlainBlock(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def mask(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[N, N], true where a row sees a column."""
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        return rows[:, None] >= rows[None, :]

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        mask = self.mask(input_ids, position_ids)
        if self.additive:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, float("-inf"))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class PlainBlock(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))  # type: ignore[no-any-return]


class PlainRepeat(nn.Module):
    """Llama-like without transformers: KV heads are repeated before the attention; the output is a dict."""

    def __init__(
        self, layers: int = 2, heads: int = 6, kv_heads: int = 2, width: int = 24, how: str = "expand"
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.how = heads, kv_heads, how
        self.tokens = nn.Embedding(VOCAB, width)
        self.angles = nn.Linear(1, width, bias=False)
        size = width // heads
        self.layers = nn.ModuleList(nn.Linear(width, (heads + 2 * kv_heads) * size) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx: Tensor, pos: Tensor) -> dict[str, Tensor]:
        x = self.tokens(idx) + self.angles(pos[..., None].to(self.angles.weight.dtype)).sin()
        for layer in self.layers:
            projected = layer(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
            q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            k, v = self.repeat(k), self.repeat(v)
            attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=0.4)
            x = x + attended.transpose(1, 2).flatten(2)
        return {"logits": self.head(x)}

    def repeat(self, x: Tensor) -> Tensor:
        """[1, N, kv_heads, D] -> [1, heads, N, D]"""
        group = self.heads // self.kv_heads
        if self.how == "expand":
            x = x.transpose(1, 2)
            b, h, n, d = x.shape
            return x[:, :, None].expand(b, h, group, n, d).reshape(b, h * group, n, d)
        if self.how == "interleave":
            return x.transpose(1, 2).repeat_interleave(group, dim=1)
        if self.how == "before_transpose":
            b, n, h, d = x.shape
            return x[:, :, :, None, :].expand(b, n, h, group, d).reshape(b, n, h * group, d).transpose(1, 2)
        return x.transpose(1, 2).repeat(1, group, 1, 1)  # "tile": heads in another order, so nothing to strip


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 4, "long_factor": [3.0] * 4}


def longrope() -> nn.Module:
    rope = dict(LONGROPE)
    return build("phi3", rope_parameters=rope, original_max_position_embeddings=64, num_hidden_layers=1)
