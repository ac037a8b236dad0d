"""Rotary embeddings of transformers models: how far they reach, and their scaling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specstream.errors import UnsupportedModel


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
def plain_rope(model: nn.Module, limit: int) -> Iterator[None]:
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


@contextmanager
def inherited_rope(draft: nn.Module, target: nn.Module, max_model_len: int) -> Iterator[None]:
    """While it lasts, a draft that covers too few positions has the rotary scaling of its target.

    That is done for a transformers model of the target's architecture and base, without scaling of its own, which
    covers as many positions as the target does without it. On exit the draft is exactly as it was.
    """
    scaling = _scaling_to_inherit(draft, target, max_model_len)
    if scaling is None:
        yield
        return
    covered = max_positions(draft)
    config: Any = transformers_parts(draft)[0].config.get_text_config()
    before = config.rope_parameters, config.max_position_embeddings
    with ExitStack() as undo:
        undo.callback(lambda: vars(config).update(rope_parameters=before[0], max_position_embeddings=before[1]))
        config.rope_parameters = before[0] | scaling
        config.max_position_embeddings = transformers_parts(target)[0].config.get_text_config().max_position_embeddings
        for parent in list(draft.modules()):
            for name, module in list(parent.named_children()):
                frequencies = module._buffers.get("inv_freq")
                if hasattr(module, "rope_type") and frequencies is not None:
                    kind: Any = type(module)
                    undo.callback(setattr, parent, name, module)
                    setattr(parent, name, kind(config=config).to(frequencies.device).eval())
        warnings.warn(
            f"the draft covers {covered} positions: it is given the target's rotary scaling, "
            f"{scaling['rope_type']} with factor {scaling.get('factor')}",
            stacklevel=4,
        )
        yield


def _scaling_to_inherit(draft: nn.Module, target: nn.Module, max_model_len: int) -> dict[str, Any] | None:
    """The target's rotary settings, without its base, if the draft is to have them."""
    ours, theirs = rope_parameters(draft), rope_parameters(target)
    covered = max_positions(draft)
    if not ours or not theirs or covered is None or covered >= max_model_len:
        return None
    family = [transformers_parts(model)[0].config.get_text_config() for model in (draft, target)]
    original = theirs.get("original_max_position_embeddings") or family[1].max_position_embeddings
    scaled = theirs.get("rope_type", "default") in ("yarn", "linear", "llama3")
    if not scaled or ours.get("rope_type", "default") != "default" or family[0].model_type != family[1].model_type:
        return None
    if covered not in (original, family[1].max_position_embeddings):
        return None
    if ours.get("rope_theta") != theirs.get("rope_theta"):
        return None
    return {name: value for name, value in theirs.items() if name not in ("rope_theta", "partial_rotary_factor")}
