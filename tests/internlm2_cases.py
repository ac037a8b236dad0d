"""InternLM2 checkpoints, written here by hand, and InternLM2's arithmetic, written here once more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specstream.capture import forward_of
from specstream.models.load import load_model

Settings = dict[str, Any]
Weights = dict[str, Tensor]

SETTINGS: Settings = {
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "model_type": "internlm2",
    "bias": False,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
PROMPT = torch.randint(96, (20,), generator=torch.Generator().manual_seed(5)).tolist()


def make_weights(settings: Settings, seed: int = 0) -> Weights:
    """Random, in float64, under the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    vocab, hidden, inner = settings["vocab_size"], settings["hidden_size"], settings["intermediate_size"]
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    rows = (heads + 2 * kv_heads) * (hidden // heads)
    weights = {"model.tok_embeddings.weight": random(vocab, hidden) / 2}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.attention.wqkv.weight"] = random(rows, hidden) / 3
        weights[f"{prefix}.attention.wo.weight"] = random(hidden, hidden) / 3
        if settings["bias"]:
            weights[f"{prefix}.attention.wqkv.bias"] = random(rows)
            weights[f"{prefix}.attention.wo.bias"] = random(hidden)
        weights[f"{prefix}.feed_forward.w1.weight"] = random(inner, hidden) / 3
        weights[f"{prefix}.feed_forward.w3.weight"] = random(inner, hidden) / 3
        weights[f"{prefix}.feed_forward.w2.weight"] = random(hidden, inner) / 3
        weights[f"{prefix}.attention_norm.weight"] = 1 + random(hidden) / 5
        weights[f"{prefix}.ffn_norm.weight"] = 1 + random(hidden) / 5
    weights["model.norm.weight"] = 1 + random(hidden) / 5
    weights["output.weight"] = random(vocab, hidden) / 3
    return weights


def write(directory: Path, settings: Settings, weights: Weights, form: str = "safetensors") -> Path:
    """Writes a checkpoint: safetensors or bin, whole or in three shards, or bin as it was before zip files."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    stem, ending = ("model", "safetensors") if "safetensors" in form else ("pytorch_model", "bin")

    def save(name: str, tensors: Weights) -> None:
        if ending == "safetensors":
            save_file(tensors, directory / name)
        else:
            torch.save(tensors, directory / name, _use_new_zipfile_serialization="old" not in form)

    if "sharded" not in form:
        save(f"{stem}.{ending}", weights)
        return directory
    weight_map = {name: f"{stem}-{i % 3 + 1:05d}-of-00003.{ending}" for i, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save(file, {name: weights[name] for name in weights if weight_map[name] == file})
    (directory / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def internlm2(settings: Settings, weights: Weights, ids: list[int]) -> Tensor:
    """Logits [N, vocab] by InternLM2's own arithmetic: norms and rotary angles in float32, all else in float64."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        single = x.float()
        scaled = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + settings["rms_norm_eps"])
        return weights[f"{name}.weight"] * scaled.double()

    def rotate(x: Tensor) -> Tensor:
        """x: [N, heads, head_dim]; the first half of a head is rotated against its second half."""
        scaling = settings["rope_scaling"] or {}
        positions = torch.arange(len(ids)).float() / (scaling["factor"] if scaling.get("type") == "linear" else 1)
        angles = positions[:, None] * (
            1.0 / settings["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        )
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    group, head_dim = heads // kv_heads, settings["hidden_size"] // heads
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)

    def attention(x: Tensor, name: str) -> Tensor:
        fused = linear(x, f"{name}.wqkv").view(len(ids), kv_heads, group + 2, head_dim)  # n (h gs d) -> n h gs d
        q = rotate(fused[:, :, :group].reshape(len(ids), heads, head_dim))
        k, v = rotate(fused[:, :, group]), fused[:, :, group + 1]
        out = []
        for head in range(heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(head_dim)
            out.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v[:, head // group])
        return linear(torch.cat(out, dim=-1), f"{name}.wo")

    x = weights["model.tok_embeddings.weight"][ids]
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        x = x + attention(norm(x, f"{prefix}.attention_norm"), f"{prefix}.attention")
        y = norm(x, f"{prefix}.ffn_norm")
        gate, up = linear(y, f"{prefix}.feed_forward.w1"), linear(y, f"{prefix}.feed_forward.w3")
        x = x + linear(F.silu(gate) * up, f"{prefix}.feed_forward.w2")
    return linear(norm(x, "model.norm"), "output")


def greedy(settings: Settings, weights: Weights, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(internlm2(settings, weights, ids)[-1].argmax()))
    return ids


def logits_of(directory: Path, ids: list[int]) -> Tensor:
    model, _, _ = load_model(directory, torch.float64, "cpu")
    with torch.no_grad():
        return forward_of(model)(torch.tensor([ids]), torch.arange(len(ids))[None])[0]
