"""Models without their weights: made of a configuration on the meta device, where nothing takes memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specstream.closest import did_you_mean
from specstream.errors import InvalidOption, SpecStreamError, shortened
from specstream.models.internlm2 import internlm2_config, is_internlm2
from specstream.models.load import Tokenizer, load_tokenizer
from specstream.models.presets import PRESETS, dummy_model, preset_config
from specstream.models.quantised import quantised_note
from specstream.options import SELF

CONFIG = "config.json"
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def unloaded_model(
    role: str, source: str | os.PathLike[str], max_model_len: int, dtype: torch.dtype | None
) -> tuple[nn.Module, str, str]:
    """A model of the shapes that a preset or a configuration says.

    Args:
        role: what it is asked for as, "target" or "draft", for messages.
        source: the name of a preset, the directory of a checkpoint, or a config.json.
        max_model_len: tokens that a preset's rotary embedding is to reach; a configuration's stays as it is.
        dtype: of the weights; None: of a preset bfloat16, else what the configuration states, or float32.

    Returns:
        The model, its name, and what was done to a preset's rotary embedding, or is skipped of a configuration ("" for
        nothing).

    Raises:
        InvalidOption: it is neither, or no configuration of a causal language model.
        UnsupportedModel: its weights are quantised.
    """
    name = os.fspath(source)
    if name in PRESETS:
        config, note = preset_config(name, max_model_len)
        return dummy_model(config, dtype or torch.bfloat16, "meta"), name, note
    path = Path(name).expanduser()
    allowed = f"{', '.join(PRESETS)}, a directory with a {CONFIG}, or such a file"
    try:
        file = path / CONFIG if path.is_dir() else path
        is_there = file.is_file()
    except OSError as error:  # a name that is too long, say
        raise InvalidOption(role, name, allowed, f"{error.strerror}.") from error
    if not is_there:
        meant = did_you_mean(name, [*PRESETS, SELF] if role == "draft" else PRESETS)
        way_out = f"{meant} Weights are not needed, and nothing is downloaded.".lstrip()
        raise InvalidOption(role, name, allowed, way_out)
    _check_sizes(role, file)
    try:
        config = _config(file)
        note = quantised_note(role, config)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype or _stated(config))
    except SpecStreamError:
        raise
    except Exception as error:  # what a configuration's own code makes of its values
        raise InvalidOption(
            role, name, allowed, f"{file} gave {type(error).__name__}: {shortened(str(error))}"
        ) from error
    return model.eval(), file.resolve().parent.name, note


def unloaded_tokenizer(source: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer beside a configuration; None of a preset, or if there is none."""
    path = Path(source).expanduser()
    folder = path.parent if path.name == CONFIG else path
    return None if os.fspath(source) in PRESETS or not folder.is_dir() else load_tokenizer(str(folder))


def _check_sizes(role: str, file: Path) -> None:
    """Refuses sizes that no model has, which transformers divides by, or takes."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # transformers says what is wrong with it
        return
    sizes = settings.get("text_config") or settings if isinstance(settings, dict) else {}
    for name in _SIZES:
        if isinstance(sizes.get(name), int) and sizes[name] < 1:
            raise _bad_size(role, file, name, sizes[name], "a positive number")
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise _bad_size(role, file, "num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")


def _bad_size(role: str, file: Path, name: str, given: int, allowed: str) -> InvalidOption:
    return InvalidOption(role, f"{name}: {given} in {file}", f"{name}: {allowed}", "Correct it, or use another model.")


def _config(file: Path) -> PretrainedConfig:
    if file.name == CONFIG and is_internlm2(file.parent):
        return internlm2_config(file.parent)
    config: PretrainedConfig = AutoConfig.from_pretrained(file, trust_remote_code=False)
    return config


def _stated(config: Any) -> torch.dtype:
    dtype = config.get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
