"""The shapes of public models, to measure with random weights what needs no weights: rounds, memory, bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from specstream.closest import did_you_mean
from specstream.errors import InvalidOption


@dataclass(frozen=True)
class Preset:
    """A model's published configuration, as far as it decides shapes and positions."""

    kind: Any
    """The class of the configuration."""
    shape: dict[str, Any]
    rope: dict[str, Any]
    """Its rotary settings within its own range."""
    yarn_original: int
    """Positions that YaRN starts from beyond that range."""


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> Preset:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    return Preset(Qwen3Config, shape, _default_rope(1e6), yarn_original=32_768)


def _internlm2_5(layers: int, hidden: int, heads: int, intermediate: int) -> Preset:
    """As the Llama it is. Its dynamic scaling changes nothing within 32,768 positions."""
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 92_544,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return Preset(LlamaConfig, shape, _default_rope(1e6), yarn_original=32_768)


_LLAMA_3_1_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SMOLLM2_135M = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

PRESETS = {
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288, tied=False),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "internlm2.5-7b": _internlm2_5(32, 4096, 32, 14_336),
    "internlm2.5-1.8b": _internlm2_5(24, 2048, 16, 8192),
    "llama-3.1-8b": Preset(LlamaConfig, _LLAMA_3_1_8B, _LLAMA_3_1_ROPE, yarn_original=131_072),
    "smollm2-135m": Preset(LlamaConfig, _SMOLLM2_135M, _default_rope(1e5), yarn_original=8192),
    "tiny": Preset(Qwen3Config, _TINY, _default_rope(1e4), yarn_original=512),
}


def preset_config(name: str, max_model_len: int) -> tuple[PretrainedConfig, str]:
    """A preset's configuration for texts of up to `max_model_len` tokens.

    Returns:
        The configuration, and what was done to its rotary embedding to reach that far ("" for nothing).

    Raises:
        InvalidOption: no preset of that name.
    """
    if name not in PRESETS:
        raise InvalidOption("preset", name, " or ".join(PRESETS), did_you_mean(name, PRESETS))
    preset = PRESETS[name]
    native, shape, rope, note = preset.shape["max_position_embeddings"], preset.shape, preset.rope, ""
    if max_model_len > native:
        factor = -(-max_model_len // preset.yarn_original)
        note = (
            f"YaRN with factor {factor} over {preset.yarn_original} positions, "
            f"since {max_model_len} tokens exceed the {native} of {name}"
        )
        rope = {
            "rope_type": "yarn",
            "rope_theta": rope["rope_theta"],
            "factor": float(factor),
            "original_max_position_embeddings": preset.yarn_original,
        }
        shape = shape | {"max_position_embeddings": preset.yarn_original * factor}
    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config: PretrainedConfig = preset.kind(**shape, **settings, rope_parameters=dict(rope))
    return config, note


def dummy_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> nn.Module:
    """A model of random weights, made on its device: normal with the configuration's std (0.02), norms 1.

    The global random state is left as it was.
    """
    place = torch.device(device)
    with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
