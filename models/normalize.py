"""Transformers models for the time of a capture: plain causal attention and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specstream.errors import UnsupportedModel
from specstream.models.trial import AttentionResult, Trial

_TRIAL, _CAPTURE = "specstream_trial", "specstream_capture"
_FAR_AWAY = 1 << 20
"""Positions to check masks up to when neither the caller nor the model states a limit."""


def transformers_parts(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in a module, outermost first; empty for a plain nn.Module."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def rope_parameters(model: nn.Module) -> dict[str, Any] | None:
    """The rotary settings of a transformers model as one flat dict with "rope_type"; None if it has none.

    Models with settings by layer type give those of the first layer type.
    """
    parts = transformers_parts(model)
    rope = getattr(parts[0].config.get_text_config(), "rope_parameters", None) if parts else None
    if not rope:
        return None
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_type" in value]
    return dict(nested[0] if nested else rope)


def max_positions(model: nn.Module) -> int | None:
    """Positions for which a transformers model computes what it was configured for; None if it states none.

    `dynamic` and `longrope` change with the length of the text, which KV already computed cannot follow: they
    count up to their original positions. yarn and linear reach their factor beyond them.
    """
    parts = transformers_parts(model)
    if not parts:
        return None
    stated: int | None = getattr(parts[0].config.get_text_config(), "max_position_embeddings", None)
    rope = rope_parameters(model) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if stated is None:
        return None
    if kind == "longrope":
        return int(rope.get("original_max_position_embeddings") or stated)
    if kind == "yarn":
        return int((rope.get("original_max_position_embeddings") or stated) * factor)
    return int(stated * factor) if kind == "linear" else stated


@contextmanager
def normalized(model: nn.Module, max_model_len: int | None) -> Iterator[None]:
    """While it lasts, `model` calls F.scaled_dot_product_attention without masks and is traceable.

    On entry the model runs once, eagerly, on four tokens with an attention that checks what it is given.
    On exit, also by an error, the model is exactly as it was. Plain modules pass through unchanged.

    Raises:
        UnsupportedModel: naming the module whose attention is not plain causal attention.
    """
    parts = transformers_parts(model)
    if not parts:
        yield
        return
    limit = max_model_len or max_positions(model) or _FAR_AWAY
    with _plain_rope(model, limit):
        _try_out(model, parts, limit)
        with _implementation(parts, _CAPTURE, _plain_attention):
            yield


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> AttentionResult:
    """q [1, Hq, N, D], k and v [1, Hkv, N, D] -> [1, N, Hq, D].

    A mask that the model made itself is kept: the pass `canonicalize` proves it causal or refuses.
    """
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _implementation(
    parts: list[PreTrainedModel],
    name: str,
    attention: Callable[..., AttentionResult],
    mask: Callable[..., Tensor | None] | None = None,
) -> Iterator[None]:
    """Makes `attention` the attention of all `parts`; without `mask` transformers builds no masks at all."""
    modules = (module for part in parts for module in part.modules() if _configured(module))
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    with ExitStack() as undo:
        AttentionInterface.register(name, attention)
        undo.callback(AttentionInterface._global_mapping.pop, name)
        if mask is not None:
            AttentionMaskInterface.register(name, mask)
            undo.callback(AttentionMaskInterface._global_mapping.pop, name)
        for config in configs.values():
            # The internal attribute: the property of that name would also write to configurations below.
            before = config._attn_implementation_internal
            undo.callback(setattr, config, "_attn_implementation_internal", before)
            config._attn_implementation_internal = name
        yield


def _configured(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation_internal")


def _try_out(model: nn.Module, parts: list[PreTrainedModel], limit: int) -> None:
    """One eager run on four tokens with the checking attention."""
    names = {id(module): name for name, module in model.named_modules()}
    trial = Trial(names, limit, _plain_attention)
    device = next(model.parameters()).device
    positions = torch.arange(4, device=device)[None]
    try:
        with _implementation(parts, _TRIAL, trial.attention, trial.mask), torch.no_grad():
            model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            "",
            f"{type(model).__name__} does not run without a mask ({type(error).__name__}: {error})",
            "Use a model whose attention goes through transformers' AttentionInterface.",
        ) from error
    if trial.calls == 0:
        raise UnsupportedModel(
            "",
            f"{type(model).__name__} does not attend through transformers' AttentionInterface",
            "Use the model's implementation in transformers, or a plain nn.Module that calls "
            "F.scaled_dot_product_attention.",
        )


@contextmanager
def _plain_rope(model: nn.Module, limit: int) -> Iterator[None]:
    """Presents rotary embeddings that change with the text's length as what they are in short texts."""
    with ExitStack() as undo:
        for name, module in model.named_modules():
            kind = getattr(module, "rope_type", None)
            kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
            scaled = kinds & {"dynamic", "longrope"}
            if not scaled:
                continue
            covered = max_positions(model) or 0
            if isinstance(kind, dict) or limit > covered:
                raise UnsupportedModel(
                    name,
                    f"{scaled.pop()} RoPE changes with the length of the text beyond {covered} positions",
                    f"Set max_model_len <= {covered}, or rope_type 'yarn' with factor "
                    f"{math.ceil(limit / max(covered, 1))} in the model's configuration.",
                )
            undo.callback(setattr, module, "rope_type", kind)
            undo.callback(module._buffers.__setitem__, "inv_freq", module._buffers["inv_freq"])
            module.rope_type = "default"
            # The frequencies in use may be a longer text's; the original ones are never written to.
            module._buffers["inv_freq"] = module.original_inv_freq
        yield
