"""InternLM2 and InternLM2.5 as the Llama they are, without running the code that comes with their checkpoints.

transformers has no InternLM2 of its own. The architecture is Llama's under other names, with q, k and v of each KV
head side by side in one projection: `wqkv` viewed as [kv_heads, group + 2, head_dim, hidden] holds the `group` query
heads of a KV head, then its k, then its v. The names and that layout are from memory and from other readers of the
format; no published checkpoint was at hand. A checkpoint that differs is refused by name, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specstream.errors import InvalidOption

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bias",
)
"""Settings without which the model would be a guess; a base of the rotary embedding is needed too."""
_OPTIONAL = ("num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn")
"""The first three are InternLM2's own; yarn is the way beyond what dynamic covers."""

_Names = dict[str, tuple[str, ...]]
"""Names in a checkpoint, each with the names in Llama of what it holds."""

_MODULES: _Names = {
    "model.tok_embeddings": ("model.embed_tokens",),
    "model.norm": ("model.norm",),
    "output": ("lm_head",),
}
_LAYER_MODULES: _Names = {
    "attention_norm": ("input_layernorm",),
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
}


def is_internlm2(directory: Path) -> bool:
    """Whether there is a checkpoint in the directory that calls itself InternLM2."""
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("model_type") == "internlm2"


def load_internlm2(directory: Path, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Loads an InternLM2 checkpoint as a Llama model in eval mode, on the CPU.

    Beside the model, no more than one tensor of the checkpoint is in memory at a time.

    Args:
        directory: with config.json and model.safetensors or pytorch_model.bin, whole or in shards with an index.
        dtype: of the weights; None for what config.json states, else that of the checkpoint.

    Raises:
        InvalidOption: naming the setting or the tensors that are not InternLM2's.
    """
    config = internlm2_config(directory)
    config.dtype = dtype or config.dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are in no checkpoint
    _load_tensors(model, directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.eval()
    return model


def internlm2_config(directory: Path) -> LlamaConfig:
    """Llama's configuration for what a directory's config.json says.

    Raises:
        InvalidOption: naming the setting that is not InternLM2's.
    """
    source = directory / "config.json"
    return _llama_config(json.loads(source.read_text(encoding="utf-8")), str(source))


def load_internlm2_tokenizer(directory: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer in tokenizer.json; None if there is none.

    A lone tokenizer.model belongs to code in the checkpoint; what others make of it may be other tokens.
    """
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer


def _llama_config(settings: dict[str, Any], source: str) -> LlamaConfig:
    """Llama's configuration for the settings of InternLM2, which are those of the file `source`."""

    def refused(name: str, allowed: str) -> InvalidOption:
        return InvalidOption(f"{source}: {name}", settings.get(name), allowed)

    for name in _REQUIRED:
        if settings.get(name) is None:
            raise refused(name, "a value; without it the model is not known")
    if "InternLM2ForCausalLM" not in (settings.get("architectures") or ["InternLM2ForCausalLM"]):
        raise refused("architectures", "InternLM2ForCausalLM, the language model")
    if settings.get("quantization_config") is not None:
        raise refused("quantization_config", "none: weights that are not quantised")
    activation = settings.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise refused("hidden_act", "an activation that transformers has, such as silu")
    given = {name: settings[name] for name in _OPTIONAL if settings.get(name) is not None}
    try:
        config = LlamaConfig(
            **{name: settings[name] for name in _REQUIRED if name != "bias"},
            **given,
            hidden_act=activation,
            attention_bias=settings["bias"],
            rope_parameters=_rope_parameters(settings, source),
            dtype=settings.get("dtype") or settings.get("torch_dtype"),
        )
    except (StrictDataclassError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise InvalidOption("model", source, "settings of an InternLM2 model", reason) from error
    if not config.num_key_value_heads or config.num_attention_heads % config.num_key_value_heads:
        raise refused("num_key_value_heads", f"a divisor of the {config.num_attention_heads} attention heads")
    return config


def _rope_parameters(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """rope_theta and rope_scaling, or the rope_parameters that newer transformers write in their place."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = {"rope_type": scaling.get("type", "default"), "rope_theta": settings.get("rope_theta")} | scaling
    rope.pop("type", None)
    if rope["rope_type"] not in _ROPE_TYPES:
        raise InvalidOption(f"{source}: rope_scaling", scaling, f"a type among {', '.join(_ROPE_TYPES)}")
    if rope["rope_theta"] is None:
        raise InvalidOption(f"{source}: rope_theta", None, "a value; without it the model is not known")
    return rope


def _load_tensors(model: LlamaForCausalLM, directory: Path) -> None:
    """Gives a model on the meta device the values of a checkpoint.

    Raises:
        InvalidOption: naming all tensors that are missing, unexpected or of another shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = _sources(model.config.num_hidden_layers, parameters)
    waiting, unexpected, wrong = dict(sources), [], []
    for name, tensor in _stored_tensors(directory):
        if name not in sources:
            unexpected.append(name)
            continue
        waiting.pop(name, None)
        targets = sources[name]
        rows = sum(parameters[target].shape[0] for target in targets)
        shape = [rows, *parameters[targets[0]].shape[1:]]
        if list(tensor.shape) != shape or not tensor.is_floating_point():
            wrong.append(f"{name} ({tensor.dtype} {list(tensor.shape)}, not floating-point {shape})")
            continue
        parts = (tensor,) if len(targets) == 1 else _split(tensor, model.config)
        dtype = model.config.dtype or tensor.dtype
        # Copied, for the file's tensors lie in the file: it may change, and reading it again is slow.
        values = {t: part.to(dtype, copy=True) for t, part in zip(targets, parts, strict=True)}
        model.load_state_dict(values, strict=False, assign=True)
    tied, head_stored = model.config.tie_word_embeddings, "output.weight" not in waiting
    if tied:
        waiting.pop("output.weight", None)
    problems = {"missing": waiting, "unexpected": unexpected, "of the wrong shape or type": wrong}
    if text := "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names):
        raise _refused(directory, f"Its tensors do not fit config.json; {text}.")
    if tied:
        if head_stored and not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight):
            raise _refused(directory, "Its output.weight differs from the embeddings it is tied to in config.json.")
        model.tie_weights()


def _sources(layers: int, parameters: Iterable[str]) -> _Names:
    """The tensors of a checkpoint and the parameters that each of them holds."""
    modules = dict(_MODULES)
    for layer in (f"model.layers.{index}" for index in range(layers)):
        for stored, targets in _LAYER_MODULES.items():
            modules[f"{layer}.{stored}"] = tuple(f"{layer}.{target}" for target in targets)
    return {
        f"{stored}.{kind}": tuple(f"{target}.{kind}" for target in targets)
        for stored, targets in modules.items()
        for kind in ("weight", "bias")
        if f"{targets[0]}.{kind}" in parameters
    }


def _split(wqkv: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a fused weight or bias, each with its heads in order."""
    assert config.num_key_value_heads is not None  # LlamaConfig fills it in
    group = config.num_attention_heads // config.num_key_value_heads
    fused = wqkv.reshape(config.num_key_value_heads, group + 2, -1, *wqkv.shape[1:])
    return fused[:, :-2].flatten(0, 2), fused[:, -2].flatten(0, 1), fused[:, -1].flatten(0, 1)


def _stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and values, one after the other: a checkpoint need not fit in memory beside the model."""
    for file in _files(directory):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as stored:
                    for name in stored.keys():  # noqa: SIM118 (it is no dict)
                        yield name, stored.get_tensor(name)
            else:  # weights_only: a pickle could run code
                yield from torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True).items()
        except (OSError, RuntimeError, EOFError, AttributeError, SafetensorError, UnpicklingError) as error:
            reason = str(error).splitlines()[0][:160] if str(error) else "it is not whole"
            raise _refused(directory, f"{file.name} cannot be read: {type(error).__name__}: {reason}") from error


def _files(directory: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if absent := [shard for shard in shards if not (directory / shard).is_file()]:
                raise _refused(directory, f"{index.name} names files that are not there: {_listed(absent)}.")
            return [directory / shard for shard in shards]
    raise _refused(directory, "It has neither model.safetensors nor pytorch_model.bin, whole or with an index.")


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _refused(directory: Path, problem: str) -> InvalidOption:
    return InvalidOption("model", str(directory), "a directory with a complete InternLM2 checkpoint", problem)
