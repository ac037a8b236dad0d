"""What a caller gives as a prompt, as token ids that are known to be right."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from specstream.errors import InvalidOption


def token_ids(prompt: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """A prompt as Python ints, from a list, a tensor, or an array.

    Raises:
        InvalidOption: it is none of these, it is empty, has ids out of range, or leaves no room for output.
    """
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InvalidOption("prompt", prompt, "a sequence of token ids")
    ids = []
    for token in given:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= index(token) < vocab_size:
            raise InvalidOption("prompt", token, f"token ids from 0 to {vocab_size - 1}")
        ids.append(index(token))
    if not ids:
        raise InvalidOption("prompt", ids, "at least one token", "Start from the model's first special token.")
    if len(ids) >= max_model_len:
        allowed = f"at most {max_model_len - 1} tokens, since max_model_len is {max_model_len} and output needs room"
        way_out = "Shorten the prompt or compile with a larger max_model_len."
        raise InvalidOption("prompt", f"{len(ids)} tokens", allowed, way_out)
    return ids


def positive(name: str, value: object) -> int:
    """A count.

    Raises:
        InvalidOption: it is no integer from 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(name, value, "an integer from 1")
    return value
