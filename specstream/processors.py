"""From generation settings to transformers' logits processors, in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specstream.caller import warn_caller
from specstream.errors import InvalidOption
from specstream.sampling import Sampling


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


class Processors(LogitsProcessorList):
    """Processors in their order, which may not change the shape of what they are given."""

    def __call__(self, input_ids: Any, scores: Any, **arguments: Any) -> Any:
        for processor in self:
            given: Any = scores
            scores = LogitsProcessorList([processor])(input_ids, given, **arguments)
            if not isinstance(scores, Tensor) or scores.shape != given.shape:
                got = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
                raise InvalidOption(
                    "logits_processor",
                    f"{got} from {_name(processor)}",
                    f"scores of the shape that it is given, {list(given.shape)}: it sees one row at a time",
                )
        return scores


def make_sampling(config: GenerationConfig, prompt_length: int, seed: int | None, **penalties: Any) -> Sampling:
    """How a request with these settings chooses its tokens; see `make_processors`.

    Raises:
        InvalidOption: a value that transformers' processors do not allow, by its setting's name.
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    return Sampling(bool(config.do_sample), seed, make_processors(config, prompt_length, **penalties))


def make_processors(
    config: GenerationConfig,
    prompt_length: int,
    *,
    extra: Iterable[LogitsProcessor] = (),
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
) -> Processors:
    """What changes the logits of one request.

    Args:
        config: settings; None means that a setting is not used. `eos_token_id` is a list or None.
        prompt_length: tokens of the request's prompt.
        extra: the caller's own. One of a type that a setting makes takes its place, as in transformers.
        prefix_allowed_tokens_fn: the caller's own, for transformers' PrefixConstrainedLogitsProcessor.

    Raises:
        InvalidOption: a value that a processor does not allow, by its setting's name.
    """
    ends = config.eos_token_id

    def made(name: str, make: Callable[[Any], LogitsProcessor], neutral: object = None) -> list[LogitsProcessor]:
        value = getattr(config, name)
        if value is None or value == neutral:
            return []
        try:
            return [make(value)]
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise InvalidOption(name, value, "what transformers' logits processors allow", str(error)) from error

    def decay(value: tuple[int, float]) -> LogitsProcessor:
        if not ends:
            raise ValueError("It needs an end token: give eos_token_id.")
        return ExponentialDecayLengthPenalty(value, ends, prompt_length)

    before_prefix: list[LogitsProcessor] = [
        *made("sequence_bias", SequenceBiasLogitsProcessor),
        *made("repetition_penalty", lambda value: RepetitionPenaltyLogitsProcessor(float(value)), 1.0),
        *made("no_repeat_ngram_size", NoRepeatNGramLogitsProcessor, 0),
        *made("bad_words_ids", lambda value: NoBadWordsLogitsProcessor(value, ends)),
        *(made("min_length", lambda value: MinLengthLogitsProcessor(value, ends), 0) if ends else ()),
        *(
            made("min_new_tokens", lambda value: MinNewTokensLengthLogitsProcessor(prompt_length, value, ends), 0)
            if ends
            else ()
        ),
    ]
    prefix = [] if prefix_allowed_tokens_fn is None else [PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, 1)]
    after_prefix: list[LogitsProcessor] = [
        *made("forced_eos_token_id", lambda value: ForcedEOSTokenLogitsProcessor(cast(int, config.max_length), value)),
        *made("remove_invalid_values", lambda _: InfNanRemoveLogitsProcessor(), False),
        *made("exponential_decay_length_penalty", decay),
        *made("suppress_tokens", SuppressTokensLogitsProcessor),
        *made("begin_suppress_tokens", lambda value: SuppressTokensAtBeginLogitsProcessor(value, prompt_length)),
    ]
    if presence_penalty or frequency_penalty:
        after_prefix.append(PresencePenalty(prompt_length, presence_penalty, frequency_penalty))
    if logit_bias:
        after_prefix.append(LogitBias(logit_bias))
    merged = with_own([*before_prefix, *prefix, *after_prefix], extra)
    if config.do_sample:
        merged += [
            *made("temperature", lambda value: TemperatureLogitsWarper(float(value)), 1.0),
            *made("top_k", TopKLogitsWarper, 0),
            *made("top_p", TopPLogitsWarper, 1.0),
            *made("min_p", MinPLogitsWarper),
            *made("typical_p", TypicalLogitsWarper, 1.0),
            *made("epsilon_cutoff", EpsilonLogitsWarper, 0.0),
            *made("eta_cutoff", EtaLogitsWarper, 0.0),
        ]
    return Processors([*merged, *made("renormalize_logits", lambda _: LogitNormalization(), False)])


def with_own(made: list[LogitsProcessor], own: Iterable[LogitsProcessor]) -> list[LogitsProcessor]:
    """Those that settings make, and the caller's: the first of the same type takes the place, the others follow."""
    given, merged = list(own), list[LogitsProcessor]()
    for processor in made:
        replacing = next((other for other in given if type(other) is type(processor)), processor)
        if replacing is not processor:
            warn_replaced("logits_processor", processor)
        merged.append(replacing)
    return merged + [other for other in given if not any(other is one for one in merged)]


def warn_replaced(argument: str, replaced: object) -> None:
    warn_caller(
        f"{argument}: the given {_name(replaced)} takes the place of the one that the settings make, as it does in "
        "transformers"
    )


def _name(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
