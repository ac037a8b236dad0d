"""What transformers' `generate` hands to a custom decoding loop, as arguments of the engine's own `generate`.

transformers has by then merged the settings of model and call into one generation_config, and has put processors and
criteria made from it into the same lists as the caller's own.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
)

from specstream.errors import InvalidOption
from specstream.processors import make_processors
from specstream.settings import MergedSettings, merge_settings
from specstream.stopping import as_list

_WITHOUT_EFFECT = {"use_cache", "logits_to_keep"}
"""What transformers prepares for the model's own forward and changes no token."""
_KEEPS_KV = "None or an empty cache that transformers made: the engine keeps KV of its own"
_ALLOWED = {
    "streamer": "None: transformers passes none on; use engine.generate(streamer=...) or engine.stream",
    "assistant_model": "None: the draft is given to specstream.compile",
    "synced_gpus": "None or False",
}
_BEFORE_PREFIX = (
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""What transformers applies before the processor of prefix_allowed_tokens_fn."""


def from_transformers(
    model: Any,
    target: ReferenceType[Any] | None,
    input_ids: Tensor,
    /,
    *,
    generation_config: GenerationConfig,
    logits_processor: list[LogitsProcessor],
    stopping_criteria: list[StoppingCriteria],
    attention_mask: Tensor | None = None,
    **for_forward: Any,
) -> dict[str, Any]:
    """Arguments for `specstream.generate.generate`.

    Args:
        model: whose `generate` was called.
        target: what the engine was compiled from, if that is known.
        input_ids: [sequences, length], repeated for num_return_sequences already.
        generation_config: of the call, merged with the model's.
        logits_processor, stopping_criteria: those made from it, and the caller's own.
        attention_mask: None if nothing is padded.
        for_forward: what is meant for the model's forward.

    Raises:
        InvalidOption: another model than the target; an argument for the model's forward that it would not have
            without the caller.
    """
    if target is not None and target() is not model:
        way_out = "Call generate of that model, or compile this one."
        raise InvalidOption("model", type(model).__name__, "the target that the engine was compiled from", way_out)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    for name in sorted(for_forward.keys() - _WITHOUT_EFFECT):
        _check_prepared(name, for_forward[name], attention_mask)
    merged = MergedSettings.of(generation_config)
    merged.eos_token_id = as_list(merged.eos_token_id) or None
    copies = merged.num_return_sequences or 1
    own, prefix = _own_processors(merged, logits_processor, attention_mask)
    return {
        "input_ids": input_ids[::copies],
        "attention_mask": attention_mask[::copies],
        "generation_config": merge_settings(None, merged),
        "logits_processor": own,
        "stopping_criteria": list(stopping_criteria),
        "prefix_allowed_tokens_fn": prefix,
    }


def _check_prepared(name: str, value: Any, mask: Tensor) -> None:
    """Refuses what transformers would not have prepared by itself."""
    if value is None or (name in ("synced_gpus", "output_attentions", "output_hidden_states") and value is False):
        return
    if name in ("past_key_values", "cache"):
        length = getattr(value, "get_seq_length", None)
        if length is None or length() or getattr(value, "_is_user_defined", False):
            raise InvalidOption(name, type(value).__name__, _KEEPS_KV, "Leave it out, and give the whole text.")
    elif name == "position_ids":
        default = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        right = isinstance(value, Tensor) and value.shape[-1] == mask.shape[1]
        if not right or not bool((value.to(default.device) == default).all()):
            raise InvalidOption(name, value, "None, or those that follow from the attention_mask")
    else:
        raise InvalidOption(name, value, _ALLOWED.get(name, "None: the engine's model takes token ids alone"))


def _own_processors(
    config: GenerationConfig, given: list[LogitsProcessor], mask: Tensor
) -> tuple[list[LogitsProcessor], Any]:
    """The caller's own among those that transformers has brought together, and its prefix_allowed_tokens_fn.

    Those of sampling come last, none of them replaced. Of the others one is the caller's unless it is the only one of
    its type and equal to the one that the settings make.
    """
    greedy = MergedSettings.of(config)
    greedy.do_sample, greedy.renormalize_logits = False, None
    made = list(make_processors(greedy, mask.shape[1]))
    last = list(make_processors(config, mask.shape[1]))[len(made) :]
    merged, ending = given[: len(given) - len(last)], given[len(given) - len(last) :]
    if not _same(ending, last):
        names = [type(processor).__name__ for processor in ending]
        raise InvalidOption("logits_processor", names, "what transformers makes of the settings at the end of the list")
    own: list[LogitsProcessor] = []
    prefix: Any = None
    for index, processor in enumerate(merged):
        first = prefix is None and all(isinstance(before, _BEFORE_PREFIX) for before in merged[:index])
        if first and isinstance(processor, PrefixConstrainedLogitsProcessor):
            prefix = processor._prefix_allowed_tokens_fn
            continue
        alike = [other for other in merged if type(other) is type(processor)]
        if len(alike) > 1 or not any(_same_processor(processor, one, mask) for one in made):
            own.append(processor)
    return own, prefix


def _same_processor(given: Any, made: Any, mask: Tensor) -> bool:
    if type(given) is not type(made):
        return False
    if isinstance(given, RepetitionPenaltyLogitsProcessor):  # to each row of its own, padding is nothing to be ignored
        padding = (mask != 0).int().argmax(dim=1)
        ignored = given.prompt_ignore_length
        return given.penalty == made.penalty and (ignored is None or _same(ignored, padding))
    return _same(vars(given), vars(made))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with tensors and objects in them."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    if type(one) is not type(other):
        return isinstance(one, int | float) and isinstance(other, int | float) and one == other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, LogitsProcessor):
        return _same(vars(one), vars(other))
    return bool(one == other)
