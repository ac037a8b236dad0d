"""Models by name: a local directory, a name on the hub, or a module as it is."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from specstream.errors import InvalidOption
from specstream.models.internlm2 import is_internlm2, load_internlm2, load_internlm2_tokenizer
from specstream.models.rope import transformers_parts

Tokenizer = PreTrainedTokenizerBase


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[nn.Module, Tokenizer | None, str]:
    """Loads a causal language model in eval mode, whole on one device. Code in a checkpoint is never run.

    Args:
        model: a directory with a checkpoint, a name on the hub, or a module, passed through untouched (of one that
            torch.compile returned, the model it was made from).
        dtype: of the weights; None for the checkpoint's own, on a CPU float32.
        device: None for the first CUDA device if there is one, else the CPU.

    Returns:
        The model, its tokenizer (None for a module, or if there is none with the checkpoint) and its name.

    Raises:
        InvalidOption: in one line, if there is no such model or it cannot be loaded.
    """
    if isinstance(model, OptimizedModule):  # what torch.compile returns; its own compilation is of no use here
        model = model._orig_mod
    if isinstance(model, nn.Module):
        return model, None, _name_of(model)
    source = os.fspath(model)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    weights = dtype or (torch.float32 if place.type == "cpu" else None)
    try:
        loaded = _load(source, weights)
    except InvalidOption:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _not_loaded(source, error) from error
    return loaded.to(place).eval(), load_tokenizer(source), Path(source).name


def _load(source: str, dtype: torch.dtype | None) -> nn.Module:
    if is_internlm2(Path(source)):
        return load_internlm2(Path(source), dtype)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", trust_remote_code=False)
    return model


def load_tokenizer(source: str) -> Tokenizer | None:
    """The tokenizer of a directory with a checkpoint or a name on the hub; None if there is none."""
    try:
        if is_internlm2(Path(source)):
            return load_internlm2_tokenizer(Path(source))
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):
        return None  # a checkpoint without one: the caller works with token ids
    return tokenizer


def _name_of(model: nn.Module) -> str:
    parts = transformers_parts(model)
    path = str(getattr(parts[0].config, "_name_or_path", "")) if parts else ""
    return Path(path).name or type(model).__name__


def _not_loaded(source: str, error: Exception) -> InvalidOption:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]
    if Path(source).is_dir():
        way_out = f"The directory was tried and gave {type(error).__name__}: {reason}"
    else:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        way_out = (
            f"There is no directory of that name, and the hub{offline} gave {type(error).__name__}: {reason} "
            "Give the path of a directory made by save_pretrained, or download the model first."
        )
    allowed = "a directory with a causal language model, its name on the hub, or an nn.Module"
    return InvalidOption("model", source, allowed, way_out)
