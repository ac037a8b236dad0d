"""Generation settings as transformers names them: merged, and each honoured or refused by name."""

from __future__ import annotations

import copy
import re
from typing import Any

from transformers import GenerationConfig

from specstream.errors import InvalidOption
from specstream.names import refuse_unknown
from specstream.values import SETTINGS

SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"})
_PROCESSORS = {"sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"}
_PROCESSORS |= {"min_length", "min_new_tokens", "forced_eos_token_id", "remove_invalid_values", "renormalize_logits"}
_PROCESSORS |= {"exponential_decay_length_penalty", "begin_suppress_tokens"}
_ENDING = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "stop_strings"}
_OUTPUT = {"return_dict_in_generate", "output_scores", "output_logits"}
HONOURED = SAMPLING | _PROCESSORS | _ENDING | _OUTPUT | {"do_sample", "num_return_sequences"}
OF_REQUESTS = frozenset(
    {
        "logprobs",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
    }
)
"""Arguments of requests that are no fields of GenerationConfig."""
OF_GENERATE = OF_REQUESTS | {"input_ids", "attention_mask", "generation_config", "seed", "streamer", "tokenizer"}

_BEAMS = {"length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"}
_RUNNING = {"_from_model_config", "use_cache", "cache_implementation", "cache_config", "transformers_version"}
_RUNNING |= {"compile_config", "disable_compile", "max_cache_len", "bos_token_id", "decoder_start_token_id"}
_ASSISTING = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
_ASSISTING |= {"assistant_lookbehind", "target_lookbehind"}
_WITHOUT_EFFECT = _BEAMS | _RUNNING | _ASSISTING
"""Change nothing about what one sequence without beams says."""
_NEUTRAL = {
    "num_beams": 1,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
}
"""Values of unsupported settings that change nothing."""
_FLAGS = {"output_attentions", "output_hidden_states", "token_healing", "use_mtp", "is_assistant", "low_memory"}
"""Unsupported settings that change nothing if they are False."""
_UNUSED = {
    "temperature": (1,),
    "top_k": (0, 50),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""Values of sampling settings that say nothing: they may stand beside do_sample=False."""
_DEFAULT_TOP_K = 50
"""As transformers has it when neither the call nor the model says; a call that says None turns it off."""


class MergedSettings(GenerationConfig):
    """Settings that have been merged: None means that a setting is not used, whatever the model's own are."""

    @classmethod
    def of(cls, config: GenerationConfig) -> MergedSettings:
        """A copy of settings that were merged elsewhere."""
        merged = cls()
        vars(merged).update(copy.deepcopy(vars(config)))
        return merged


def merge_settings(
    model: GenerationConfig | None,
    call: GenerationConfig | None = None,
    caller: str = "generate",
    /,
    **settings: Any,
) -> MergedSettings:
    """The settings of a call, as transformers merges them: its arguments, over the generation_config it gives, over
    the model's; what the first says, None included, holds, and what the second leaves at None is the third's.

    Args:
        caller: what was called, for messages.

    Raises:
        InvalidOption: a setting that is unknown, unsupported, or without effect as asked for.
    """
    configs: list[Any] = [call, model]
    for config in configs:
        if not isinstance(config, GenerationConfig | None):
            allowed = "transformers' GenerationConfig, or None"
            raise InvalidOption("generation_config", config, allowed, "Make one: GenerationConfig(max_new_tokens=...).")
    known = {name for name in vars(call or model or GenerationConfig()) if not name.startswith("_")}
    for name, value in settings.items():
        if name not in known:
            refuse_unknown(name, value, caller, HONOURED | OF_GENERATE, ())
        if name in SETTINGS and value is not None:
            SETTINGS[name].check(name, value)
    try:
        merged = _filled(model, call)
        _update(merged, **settings)
    except (ValueError, TypeError, AttributeError) as error:
        name, value = _named(str(error), settings)
        raise InvalidOption(name, value, "what transformers allows", str(error)) from error
    for name, value in merged.to_diff_dict().items():
        if name.startswith("_"):  # what transformers notes down for itself
            continue
        if name not in HONOURED | _WITHOUT_EFFECT and not _changes_nothing(name, value):
            where = "" if name in settings else "generation_config."
            raise InvalidOption(f"{where}{name}", value, "None: it is not supported", f"Set {where}{name} to None.")
        if name in SETTINGS and value is not None and (merged.do_sample or name not in SAMPLING):
            SETTINGS[name].check(f"generation_config.{name}", value)
    for name in sorted(SAMPLING & settings.keys()):
        if settings[name] is not None and settings[name] not in _UNUSED[name] and not merged.do_sample:
            raise InvalidOption(name, settings[name], "None without do_sample=True", "Pass do_sample=True.")
    if isinstance(merged.eos_token_id, int):
        merged.eos_token_id = [merged.eos_token_id]
    if merged.min_new_tokens is not None:  # goes before min_length, wherever either comes from
        merged.min_length = None
    return merged


def _filled(model: GenerationConfig | None, call: GenerationConfig | None) -> MergedSettings:
    """The generation_config of a call, its unset fields filled from the model's."""
    if isinstance(call, MergedSettings):
        return MergedSettings.of(call)
    merged = MergedSettings.of(call or model or GenerationConfig())
    if call is not None and model is not None:
        _update(merged, **copy.deepcopy(model.to_dict()), defaults_only=True, allow_custom_entries=True)
    if merged.top_k is None:
        merged.top_k = _DEFAULT_TOP_K
    return merged


def _update(config: Any, **settings: Any) -> None:
    config.update(**settings)


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether a setting that is not supported is at a value that does nothing."""
    if value is None or (name in _FLAGS and value is False):
        return True
    return name in _NEUTRAL and not isinstance(value, bool) and bool(value == _NEUTRAL[name])


def _named(message: str, settings: dict[str, Any]) -> tuple[str, Any]:
    """Which setting transformers complains about, as far as its message says."""
    for name in re.findall(r"`(\w+)`", message):
        if name in settings:
            return name, settings[name]
    return "generation_config", settings
