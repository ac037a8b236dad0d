"""From generation settings to transformers' logits processors, in transformers' order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specstream.errors import InvalidOption
from specstream.sampling import Sampling

DEFAULT_TOP_K = 50
"""As transformers has it when neither the call nor the model says."""


class PresencePenalty(LogitsProcessor):
    """Subtracts from tokens that were produced: `presence` once, `frequency` for each time (as OpenAI and vLLM do)."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        produced = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, produced, torch.ones_like(produced, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class LogitBias(LogitsProcessor):
    """Adds to the logits of single tokens."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores


def make_sampling(config: GenerationConfig, prompt_length: int, seed: int | None, **penalties: Any) -> Sampling:
    """How a request with these settings chooses its tokens; see `make_processors`.

    Raises:
        InvalidOption: a value that transformers' processors do not allow.
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    try:
        processors = make_processors(config, prompt_length, **penalties)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise InvalidOption("generation_config", str(error), "what transformers' logits processors allow") from error
    return Sampling(bool(config.do_sample), seed, processors)


def make_processors(
    config: GenerationConfig,
    prompt_length: int,
    *,
    extra: Iterable[LogitsProcessor] = (),
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> LogitsProcessorList:
    """What changes the logits of one request.

    Args:
        config: settings; None means that a setting is not used. `eos_token_id` is a list or None.
        prompt_length: tokens of the request's prompt.
        extra: the caller's own.
    """
    ends = config.eos_token_id
    made: list[Any] = [
        config.sequence_bias and SequenceBiasLogitsProcessor(config.sequence_bias),
        _set(config.repetition_penalty, 1.0) and RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)),
        _set(config.no_repeat_ngram_size, 0) and NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size),
        config.bad_words_ids and NoBadWordsLogitsProcessor(config.bad_words_ids, ends),
        ends and _set(config.min_length, 0) and MinLengthLogitsProcessor(config.min_length, ends),
        ends
        and _set(config.min_new_tokens, 0)
        and MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, ends),
        config.forced_eos_token_id is not None
        and ForcedEOSTokenLogitsProcessor(config.max_length, config.forced_eos_token_id),
        config.remove_invalid_values and InfNanRemoveLogitsProcessor(),
        ends
        and config.exponential_decay_length_penalty
        and ExponentialDecayLengthPenalty(config.exponential_decay_length_penalty, ends, prompt_length),
        config.suppress_tokens and SuppressTokensLogitsProcessor(config.suppress_tokens),
        config.begin_suppress_tokens
        and SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length),
        (presence_penalty or frequency_penalty) and PresencePenalty(prompt_length, presence_penalty, frequency_penalty),
        logit_bias and LogitBias(logit_bias),
        *extra,
    ]
    if config.do_sample:
        made += [
            _set(config.temperature, 1.0) and TemperatureLogitsWarper(float(config.temperature)),
            config.top_k != 0 and TopKLogitsWarper(DEFAULT_TOP_K if config.top_k is None else config.top_k),
            _set(config.top_p, 1.0) and TopPLogitsWarper(config.top_p),
            config.min_p is not None and MinPLogitsWarper(config.min_p),
            _set(config.typical_p, 1.0) and TypicalLogitsWarper(config.typical_p),
            _set(config.epsilon_cutoff, 0.0) and EpsilonLogitsWarper(config.epsilon_cutoff),
            _set(config.eta_cutoff, 0.0) and EtaLogitsWarper(config.eta_cutoff),
        ]
    return LogitsProcessorList([processor for processor in made if processor])


def _set(value: float | None, neutral: float) -> bool:
    """Whether a setting does anything."""
    return value is not None and value != neutral
