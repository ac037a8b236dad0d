"""What transformers' `generate` hands to a custom decoding loop, as arguments of the engine's own `generate`.

transformers has by then merged the settings of model and call into one generation_config, and has put processors and
criteria made from it into the same lists as the caller's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
)

from specstream.errors import InvalidOption
from specstream.processors import make_processors
from specstream.settings import merge_settings

_OF_FORWARD = {"use_cache", "past_key_values", "cache", "position_ids", "logits_to_keep", "token_type_ids"}
"""What transformers prepares for the model's own forward; the engine has its own."""


def from_transformers(
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    logits_processor: list[LogitsProcessor],
    stopping_criteria: list[StoppingCriteria],
    attention_mask: Tensor | None = None,
    **for_forward: Any,
) -> dict[str, Any]:
    """Arguments for `specstream.generate.generate`.

    Args:
        input_ids: [sequences, length], repeated for num_return_sequences already.
        generation_config: of the call, merged with the model's.
        logits_processor, stopping_criteria: those made from it, and the caller's own.
        attention_mask: None if nothing is padded.
        for_forward: what is meant for the model's forward.

    Raises:
        InvalidOption: a processor of the caller's in the place of one that the settings ask for; an argument for
            the model's forward that it would not have without the caller.
    """
    for name in for_forward.keys() - _OF_FORWARD:
        if for_forward[name] is not None:
            raise InvalidOption(name, for_forward[name], "None: the engine's model takes token ids alone")
    config = merge_settings(generation_config)
    made = {type(processor): processor for processor in make_processors(config, input_ids.shape[1])}
    own: list[LogitsProcessor] = []
    for processor in logits_processor:
        ours = made.get(type(processor))
        if ours is None:
            own.append(processor)
        elif _settings_of(ours) != _settings_of(processor):
            name = type(processor).__name__
            raise InvalidOption(
                "logits_processor",
                name,
                f"no {name} beside the setting of generation_config that makes another one",
                "Give one of the two.",
            )
    config.num_return_sequences = None
    ending = (MaxLengthCriteria, EosTokenCriteria)
    return {
        "attention_mask": attention_mask,
        "generation_config": config,
        "logits_processor": own,
        "stopping_criteria": [criterion for criterion in stopping_criteria if not isinstance(criterion, ending)],
    }


def _settings_of(processor: LogitsProcessor) -> dict[str, Any]:
    """The numbers a processor was made with."""
    return {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str | list)}
