"""Configurations of quantised checkpoints: what an engine would load, no configuration tells the sizes of."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer

from specstream.errors import UnsupportedModel


def quantised_note(role: str, config: Any) -> str:
    """What transformers skips of a configuration, as it would for an engine; "" for nothing.

    Args:
        role: "target" or "draft", for messages.

    Raises:
        UnsupportedModel: its weights are quantised.
        ValueError: by transformers, as for an engine: its settings are none of a quantised model.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(), "quantization_config", None)
    if settings is None:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings.get("quant_method")
    if not AutoHfQuantizer.supports_quant_method(settings):
        return f"quantization_config is skipped, as by an engine: transformers does not know {method!r}"
    reason = f"its weights are quantised ({method}), and their sizes cannot be told without them"
    way_out = "Load it and let specstream.compile plan it, or plan the checkpoint that it was made from."
    raise UnsupportedModel(role, reason, way_out + _not_here(settings))


def _not_here(settings: dict[str, Any]) -> str:
    """What an engine would be refused with on this machine, if it would."""
    try:
        AutoHfQuantizer.from_config(settings, pre_quantized=True).validate_environment(
            device_map=None, weights_only=True
        )
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]
        return f" Here loading it gives {type(error).__name__}: {reason}"
    return ""
