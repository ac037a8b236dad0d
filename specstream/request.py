"""From a prompt and its settings to a request that can be queued."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specstream.errors import InvalidOption
from specstream.processors import make_sampling
from specstream.prompt import positive, token_ids
from specstream.sequence import Sequence
from specstream.settings import merge_settings
from specstream.token_scores import Kept


@dataclass(frozen=True)
class RequestFactory:
    """Makes requests for one target."""

    vocab_size: int
    max_model_len: int

    def make(
        self,
        request_id: int,
        prompt: Seq[int],
        tokenizer: Any,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Seq[int] | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        logits_processor: Seq[LogitsProcessor] = (),
        stopping_criteria: Seq[StoppingCriteria] = (),
    ) -> Sequence:
        """Checks a prompt and its settings.

        Args:
            prompt: token ids.
            tokenizer: for stop strings; may be None.
            max_new_tokens: most tokens to produce; None for the generation_config's.
            eos_token_id: end token or tokens, instead of the generation_config's; the one produced is part of the
                output.
            generation_config: the request's settings (`specstream.settings.HONOURED`); greedy without one.
            seed: of a sampled text; None draws one from torch's global generator.
            logprobs: keep the log-probability that the model gives each token.
            presence_penalty, frequency_penalty, logit_bias: as OpenAI and vLLM define them.
            logits_processor: the caller's own, after transformers' penalties and before temperature. They may keep
                state: nothing is drafted for the request, so that they see committed tokens only, in order.
            stopping_criteria: the caller's own; they see committed tokens only.

        Raises:
            InvalidOption: the prompt is empty, has ids out of range, or leaves no room under `max_model_len`; a
                setting that is not supported.
        """
        prompt = token_ids(prompt, self.vocab_size, self.max_model_len)
        config = merge_settings(None, generation_config)
        most = positive("max_new_tokens", config.max_new_tokens if max_new_tokens is None else max_new_tokens)
        if eos_token_id is not None:
            config.eos_token_id = end_tokens(eos_token_id, self.vocab_size)
        limit = config.max_length = min(len(prompt) + most, self.max_model_len)
        sampling = make_sampling(
            config,
            len(prompt),
            seed,
            extra=logits_processor,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=self._bias(logit_bias),
        )
        stopping = StoppingCriteriaList(stopping_criteria)
        if config.stop_strings:
            stopping.append(_stop_strings(tokenizer, config.stop_strings))
        return Sequence(
            request_id,
            len(prompt),
            limit,
            frozenset(config.eos_token_id or ()),
            prompt,
            sampling=sampling,
            stopping=stopping,
            drafts=not logits_processor,
            kept=Kept(logprobs, bool(config.output_scores), bool(config.output_logits)),
        )

    def _bias(self, bias: dict[int, float] | None) -> dict[int, float] | None:
        for token in bias or ():
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidOption("logit_bias", token, f"token ids from 0 to {self.vocab_size - 1} as keys")
        return bias


def end_tokens(given: int | Seq[int], vocab_size: int) -> list[int]:
    """End tokens as a list.

    Raises:
        InvalidOption: one that the target never produces.
    """
    tokens = [given] if isinstance(given, int) else list(given)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidOption("eos_token_id", token, f"token ids from 0 to {vocab_size - 1}, or None")
    return tokens


def _stop_strings(tokenizer: Any, strings: str | list[str]) -> StopStringCriteria:
    if tokenizer is None:
        way_out = "Compile the target by name or directory, or set engine.tokenizer."
        raise InvalidOption("stop_strings", strings, "None without a tokenizer", way_out)
    return StopStringCriteria(tokenizer, strings)
