"""When a request ends: settings and the caller's criteria, brought together as transformers does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specstream.errors import InvalidOption
from specstream.processors import warn_replaced
from specstream.prompt import token_id


@dataclass(frozen=True)
class Stopping:
    """What ends a request."""

    max_length: int
    """Most tokens, prompt included."""
    end_tokens: frozenset[int]
    criteria: StoppingCriteriaList
    """All others."""

    @classmethod
    def of(cls, config: GenerationConfig, own: Seq[StoppingCriteria], tokenizer: Any, most: int) -> Stopping:
        """The caller's criteria take the place of settings that make the same type.

        Args:
            config: `max_length` is of this request's own prompt; `eos_token_id` is a list or None.
            own: the caller's.
            tokenizer: for stop strings; may be None.
            most: tokens that fit.
        """
        max_length, ends = cast(int, config.max_length), frozenset(config.eos_token_id or ())
        lengths = [criterion for criterion in own if type(criterion) is MaxLengthCriteria]
        of_tokens = [criterion for criterion in own if type(criterion) is EosTokenCriteria]
        criteria = [criterion for criterion in own if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)]
        if lengths:
            given = min(most, *(criterion.max_length for criterion in lengths))
            if given != max_length:
                warn_replaced("stopping_criteria", lengths[0])
            max_length = given
        if of_tokens:
            tokens = frozenset(token for criterion in of_tokens for token in as_list(criterion.eos_token_id))
            if ends and ends != tokens:
                warn_replaced("stopping_criteria", of_tokens[0])
            ends = tokens
        if config.stop_strings:
            if any(type(criterion) is StopStringCriteria for criterion in criteria):
                warn_replaced("stopping_criteria", StopStringCriteria)
            else:
                criteria.insert(0, _stop_strings(tokenizer, config.stop_strings))
        return cls(max_length, ends, StoppingCriteriaList(criteria))


def as_list(tokens: Any) -> list[Any]:
    """One token or several, or None, as a list."""
    if tokens is None:
        return []
    given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(given) if isinstance(given, list | tuple | set | frozenset) else [given]


def end_tokens(given: int | Seq[int], vocab_size: int) -> list[int]:
    """End tokens as a list.

    Raises:
        InvalidOption: one that the target never produces.
    """
    return [token_id("eos_token_id", token, vocab_size, ", or None") for token in as_list(given)]


def _stop_strings(tokenizer: Any, strings: str | list[str]) -> StopStringCriteria:
    if tokenizer is None:
        way_out = "Pass tokenizer=, compile the target by name or directory, or set engine.tokenizer."
        raise InvalidOption("stop_strings", strings, "None without a tokenizer", way_out)
    return StopStringCriteria(tokenizer, strings)
