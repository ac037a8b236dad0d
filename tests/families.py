"""Tiny configurations of transformers' model families, and what `specstream.compile` says to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PretrainedConfig

from tests.architectures import VOCAB

POSITIONS = 512


@dataclass(frozen=True)
class Family:
    """A family as a table has it."""

    config: str
    """Name of the class in transformers."""
    settings: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """What the refusal says; "" for a family that is supported."""

    def make(self) -> PretrainedConfig:
        common: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        kind: type[PretrainedConfig] = getattr(transformers, self.config)
        return kind(**(common | self.settings))


WINDOW = "it attends to a sliding window of 64 tokens"
OWN_ATTENTION = "does not attend through transformers' AttentionInterface"
NEEDS_MASK = "does not run without a mask"
MLA_REFUSED = "its keys and values differ in head_dim (12 and 8, as in MLA)"

HEAD: dict[str, Any] = {"head_dim": 8}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
BATCHED: dict[str, Any] = {"experts_implementation": "batched_mm"}
EXPERTS: dict[str, Any] = BATCHED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = BATCHED | {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = BATCHED | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 4,
    "long_factor": [2.0] * 4,
}

FAMILIES: dict[str, Family] = {
    "Qwen3": Family("Qwen3Config", HEAD),
    "Qwen2, Qwen2.5": Family("Qwen2Config"),
    "Llama 2, 3, SmolLM2": Family("LlamaConfig"),
    "Llama 3.1, 3.2": Family("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "Mistral without window": Family("MistralConfig", {"sliding_window": None}),
    "Ministral 3": Family("Ministral3Config", HEAD | {"rope_parameters": MINISTRAL3_ROPE}),
    "Phi-1, Phi-2": Family("PhiConfig"),
    "Phi-3, up to the original length": Family(
        "Phi3Config", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}
    ),
    "Gemma": Family("GemmaConfig", HEAD),
    "SmolLM3": Family("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "Granite": Family("GraniteConfig"),
    "OLMo": Family("OlmoConfig"),
    "OLMo 2": Family("Olmo2Config"),
    "StableLM": Family("StableLmConfig"),
    "StarCoder2 without window": Family("Starcoder2Config", {"sliding_window": None}),
    "Cohere Command R": Family("CohereConfig"),
    "GLM-4": Family("Glm4Config", HEAD),
    "EXAONE 4 without window": Family(
        "Exaone4Config",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 2},
    ),
    "Nemotron": Family("NemotronConfig"),
    "Seed-OSS": Family("SeedOssConfig", HEAD),
    "ERNIE 4.5": Family("Ernie4_5Config", HEAD),
    "GPT-NeoX, Pythia": Family("GPTNeoXConfig"),
    "GPT-J": Family("GPTJConfig", GPT | {"rotary_dim": 4}),
    "GPT-2": Family("GPT2Config", GPT),
    "OPT": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Mixtral": Family("MixtralConfig", LOCAL_EXPERTS | {"sliding_window": None}),
    "Qwen3-MoE": Family("Qwen3MoeConfig", EXPERTS | HEAD),
    "Qwen2-MoE": Family("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "OLMoE": Family("OlmoeConfig", EXPERTS),
    "Granite MoE": Family("GraniteMoeConfig", LOCAL_EXPERTS),
    "GLM-4 MoE": Family("Glm4MoeConfig", ROUTED_EXPERTS | HEAD),
    "Mistral with window": Family("MistralConfig", {"sliding_window": 64}, WINDOW),
    "Phi-3, beyond the original length": Family(
        "Phi3Config",
        {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "longrope RoPE changes with the length of the text beyond 64 positions",
    ),
    "Gemma 2": Family("Gemma2Config", HEAD, "it caps attention scores (softcap 50.0)"),
    "Gemma 3": Family("Gemma3TextConfig", HEAD | {"sliding_window": 64}, WINDOW),
    "OLMo 3": Family("Olmo3Config", {"sliding_window": 64}, WINDOW),
    "Cohere Command R7B, A": Family("Cohere2Config", {"sliding_window": 64}, WINDOW),
    "EXAONE 4 with window": Family("Exaone4Config", {"sliding_window": 64}, WINDOW),
    "GPT-OSS": Family("GptOssConfig", LOCAL_EXPERTS | HEAD, "its softmax has sinks (s_aux)"),
    "Llama 4": Family(
        "Llama4TextConfig",
        HEAD | {"num_local_experts": 2, "no_rope_layers": [1, 0]},
        "it calculates with torch.arange over the tokens",
    ),
    "DeepSeek-V2": Family("DeepseekV2Config", MLA, MLA_REFUSED),
    "DeepSeek-V3, R1, Kimi K2": Family("DeepseekV3Config", MLA, MLA_REFUSED),
    "MiniCPM3": Family("MiniCPM3Config", MLA, MLA_REFUSED),
    "Falcon": Family("FalconConfig", {"alibi": False, "bias": False}, NEEDS_MASK),
    "MPT": Family("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, NEEDS_MASK),
    "BLOOM": Family("BloomConfig", {"n_layer": 2, "n_head": 4}, OWN_ATTENTION),
    "GPT-Neo": Family(
        "GPTNeoConfig",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
        OWN_ATTENTION,
    ),
    "Mamba": Family("MambaConfig", {}, OWN_ATTENTION),
    "Mamba 2": Family("Mamba2Config", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8}, OWN_ATTENTION),
    "RWKV": Family("RwkvConfig", {}, OWN_ATTENTION),
    "RecurrentGemma": Family("RecurrentGemmaConfig", {}, OWN_ATTENTION),
    "Jamba": Family("JambaConfig", BATCHED | {"num_experts": 4}, OWN_ATTENTION),
    "Qwen3-Next": Family("Qwen3NextConfig", EXPERTS | HEAD, OWN_ATTENTION),
    "LFM2": Family(
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"]},
        "It knows the past by more than its attention (token shift, convolution,",
    ),
}
