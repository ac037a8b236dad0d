"""Transformers models for the time of a capture: plain causal attention and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specstream.errors import UnsupportedModel
from specstream.models.rope import max_positions, plain_rope, transformers_parts
from specstream.models.trial import AttentionResult, Trial

_TRIAL, _CAPTURE = "specstream_trial", "specstream_capture"
_FAR_AWAY = 1 << 20
"""Positions to check masks up to when neither the caller nor the model states a limit."""


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
    with plain_rope(model, limit):
        _try_out(model, parts, limit)
        with attention_implementation(parts, _CAPTURE, _plain_attention):
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
def attention_implementation(
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
        with attention_implementation(parts, _TRIAL, trial.attention, trial.mask), torch.no_grad():
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
