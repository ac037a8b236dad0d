"""Generation settings as transformers names them: merged, and each honoured or refused by name."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

from specstream.errors import InvalidOption
from specstream.values import SETTINGS

SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"})
_PROCESSORS = {"sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"}
_PROCESSORS |= {"min_length", "min_new_tokens", "forced_eos_token_id", "remove_invalid_values"}
_PROCESSORS |= {"exponential_decay_length_penalty", "begin_suppress_tokens"}
_ENDING = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "stop_strings"}
_OUTPUT = {"return_dict_in_generate", "output_scores", "output_logits"}
HONOURED = SAMPLING | _PROCESSORS | _ENDING | _OUTPUT | {"do_sample", "num_return_sequences"}

_BEAMS = {"length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"}
_RUNNING = {"_from_model_config", "use_cache", "cache_implementation", "cache_config", "transformers_version"}
_RUNNING |= {"compile_config", "bos_token_id", "decoder_start_token_id"}
_ASSISTING = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
_ASSISTING |= {"assistant_lookbehind", "target_lookbehind"}
_WITHOUT_EFFECT = _BEAMS | _RUNNING | _ASSISTING
"""Change nothing about what one sequence without beams says."""
_NEUTRAL = {"num_beams": 1, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
"""Values of unsupported settings that change nothing."""


def merge_settings(
    model: GenerationConfig | None, call: GenerationConfig | None = None, **settings: Any
) -> GenerationConfig:
    """The settings of a call: its own arguments, over the generation_config it gives, or else over the model's.

    Raises:
        InvalidOption: a setting that is unknown, unsupported, or without effect as asked for.
    """
    given: Any = call if call is not None else model
    if not isinstance(given, GenerationConfig | None):
        allowed = "transformers' GenerationConfig, or None"
        raise InvalidOption("generation_config", given, allowed, "Make one: GenerationConfig(max_new_tokens=...).")
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()
    for name, value in settings.items():
        if not hasattr(merged, name):
            raise InvalidOption(name, value, "an argument of specstream's generate", "Leave it out.")
        if name in SETTINGS and value is not None:
            SETTINGS[name].check(name, value)
    try:
        merged.update(**settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidOption("generation_config", settings, "what transformers allows", str(error)) from error
    for name, value in merged.to_diff_dict().items():
        if name.startswith("_"):  # what transformers notes down for itself
            continue
        if name not in HONOURED | _WITHOUT_EFFECT and value is not None and value != _NEUTRAL.get(name, False):
            where = "" if name in settings else "generation_config."
            raise InvalidOption(f"{where}{name}", value, "None: it is not supported", f"Set {where}{name} to None.")
        if name in SETTINGS and value is not None and (merged.do_sample or name not in SAMPLING):
            SETTINGS[name].check(f"generation_config.{name}", value)
    for name in sorted(SAMPLING & settings.keys()):
        if settings[name] is not None and not merged.do_sample:
            raise InvalidOption(name, settings[name], "None without do_sample=True", "Pass do_sample=True.")
    if isinstance(merged.eos_token_id, int):
        merged.eos_token_id = [merged.eos_token_id]
    return merged
