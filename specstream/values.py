"""What values settings and arguments may have: a check and its words, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from specstream.errors import InvalidOption


@dataclass(frozen=True)
class Values:
    """A set of values."""

    words: str
    """It, for a message."""
    holds: Callable[[Any], bool]

    def check(self, name: str, value: object, way_out: str = "") -> None:
        """Raises:
        InvalidOption: the value is none of these.
        """
        if not self.holds(value):
            raise InvalidOption(name, value, self.words, way_out)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _integer(least: int) -> Values:
    return Values(f"an integer from {least}", lambda value: _is_integer(value) and value >= least)


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_integer(token) for token in value)


def _are_texts(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list | tuple) and bool(texts) and all(isinstance(t, str) and t for t in texts)


FLAG = Values("True or False", lambda value: isinstance(value, bool))
INTEGER = Values("an integer", _is_integer)
NUMBER = Values("a finite number", _is_number)
POSITIVE_INTEGER, NATURAL = _integer(1), _integer(0)
_ABOVE_ZERO = Values("a number above 0", lambda value: _is_number(value) and value > 0)
_PORTION = Values("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_MASS = Values("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_CUTOFF = Values("a number from 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1)
_IDS = Values("token ids", _are_ids)

SETTINGS: dict[str, Values] = {
    "max_new_tokens": POSITIVE_INTEGER,
    "max_length": POSITIVE_INTEGER,
    "min_new_tokens": NATURAL,
    "min_length": NATURAL,
    "num_return_sequences": POSITIVE_INTEGER,
    "do_sample": FLAG,
    "temperature": _ABOVE_ZERO,
    "top_k": NATURAL,
    "top_p": _PORTION,
    "min_p": _PORTION,
    "typical_p": _MASS,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "repetition_penalty": _ABOVE_ZERO,
    "no_repeat_ngram_size": NATURAL,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "remove_invalid_values": FLAG,
    "pad_token_id": INTEGER,
    "eos_token_id": Values("a token id, or a list of them", lambda value: _is_integer(value) or _are_ids(value)),
    "stop_strings": Values("a text or a list of texts, none of them empty", _are_texts),
    "return_dict_in_generate": FLAG,
    "output_scores": FLAG,
    "output_logits": FLAG,
}
"""Fields of GenerationConfig that are honoured, where it takes no more than a glance to know; None is not set."""
