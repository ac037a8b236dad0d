"""From a prompt and its settings to a request that can be queued."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from specstream.errors import InvalidOption
from specstream.names import refuse_unknown
from specstream.processors import make_sampling
from specstream.prompt import token_id, token_ids
from specstream.sequence import Sequence
from specstream.settings import HONOURED, OF_REQUESTS, merge_settings
from specstream.stopping import Stopping, as_list, end_tokens
from specstream.token_scores import Kept
from specstream.values import FLAG, INTEGER, NUMBER, POSITIVE_INTEGER


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
        /,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Seq[int] | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        logits_processor: Seq[LogitsProcessor] | None = None,
        stopping_criteria: Seq[StoppingCriteria] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        **unknown: Any,
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
                state: nothing is drafted for the request, so that they see committed tokens only, in order. They see
                the request alone, [1, length] without padding, whatever else runs.
            stopping_criteria: the caller's own; they too see committed tokens of the request alone. Processors and
                criteria of a type that a setting makes take its place, as in transformers.
            prefix_allowed_tokens_fn: as in transformers; the first argument it is called with is 0.

        Raises:
            InvalidOption: the prompt is empty, has ids out of range, or leaves no room under `max_model_len`; a
                setting that is not supported.
        """
        for name, value in unknown.items():
            refuse_unknown(name, value, "submit", _OF_SUBMIT, HONOURED)
        prompt = token_ids(prompt, self.vocab_size, self.max_model_len)
        config = merge_settings(None, generation_config, "submit")
        if (config.num_return_sequences or 1) > 1:
            name, way_out = "generation_config.num_return_sequences", "Submit the prompt as often as it is asked for."
            raise InvalidOption(name, config.num_return_sequences, "1 for submit", way_out)
        most = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        POSITIVE_INTEGER.check("max_new_tokens", most)
        if seed is not None:
            INTEGER.check("seed", seed)
        FLAG.check("logprobs", logprobs)
        NUMBER.check("presence_penalty", presence_penalty)
        NUMBER.check("frequency_penalty", frequency_penalty)
        processors = _callables("logits_processor", logits_processor, "(input_ids, scores) that return scores")
        criteria = _callables("stopping_criteria", stopping_criteria, "(input_ids, scores) that return true to stop")
        allowed_tokens: Any = prefix_allowed_tokens_fn
        if not callable(allowed_tokens) and allowed_tokens is not None:
            allowed = "a callable (batch_id, input_ids) that returns token ids"
            raise InvalidOption("prefix_allowed_tokens_fn", allowed_tokens, allowed)
        if eos_token_id is not None:
            config.eos_token_id = end_tokens(eos_token_id, self.vocab_size)
        config.max_length = min(len(prompt) + int(most), self.max_model_len)
        sampling = make_sampling(
            config,
            len(prompt),
            seed,
            extra=processors,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=self._bias(logit_bias),
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        )
        self._check_ids(config)
        stopping = Stopping.of(config, criteria, tokenizer, self.max_model_len)
        return Sequence(
            request_id,
            len(prompt),
            max(len(prompt) + 1, stopping.max_length),
            stopping.end_tokens,
            prompt,
            sampling=sampling,
            stopping=stopping.criteria,
            drafts=not processors and prefix_allowed_tokens_fn is None,
            kept=Kept(logprobs, bool(config.output_scores), bool(config.output_logits)),
        )

    def _bias(self, bias: dict[int, float] | None) -> dict[int, float] | None:
        if bias is None:
            return None
        if not isinstance(bias, dict):
            raise InvalidOption("logit_bias", bias, "a dict from token ids to numbers, or None")
        for token, value in bias.items():
            token_id("logit_bias", token, self.vocab_size, " as keys")
            NUMBER.check(f"logit_bias[{token}]", value, "To forbid tokens use suppress_tokens or bad_words_ids.")
        return bias

    def _check_ids(self, config: GenerationConfig) -> None:
        """Refuses token ids that transformers' processors would stumble over in the middle of a text."""
        words = {
            "bad_words_ids": config.bad_words_ids or (),
            "sequence_bias": [entry if isinstance(entry, tuple) else entry[0] for entry in config.sequence_bias or ()],
            "forced_eos_token_id": [as_list(config.forced_eos_token_id)],
        }
        for name, sequences in words.items():
            for token in (token for sequence in sequences for token in sequence):
                token_id(name, token, self.vocab_size)


def _callables(name: str, given: object, what: str) -> list[Any]:
    """The caller's own processors or criteria."""
    if given is None:
        return []
    allowed = f"a list of callables {what}"
    if not isinstance(given, list | tuple):
        raise InvalidOption(name, given, allowed, f"Put it into a list: {name}=[...]." if callable(given) else "")
    for entry in given:
        if not callable(entry) or isinstance(entry, type):
            raise InvalidOption(name, entry, allowed, "Make an instance of it." if isinstance(entry, type) else "")
    return list(given)


_OF_SUBMIT = OF_REQUESTS | {"max_new_tokens", "eos_token_id", "generation_config", "seed"}
