"""Names of arguments that are not known here: what they may have been meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import NoReturn

from specstream.errors import InvalidOption
from specstream.options import Options

_OF_VLLM = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
    "stop_token_ids": "eos_token_id",
    "n": "num_return_sequences",
}
"""vLLM's names of what has transformers' name here."""
_WAYS_OUT = {
    "ignore_eos": "Pass eos_token_id=None.",
    "top_logprobs": "Pass logprobs=True, for the log-probabilities of the tokens that are produced.",
    "assistant_model": "Give it to specstream.compile as the draft.",
    "synced_gpus": "Leave it out: the engine runs on one device.",
    "past_key_values": "Leave it out: the engine keeps KV of its own.",
    "cache": "Leave it out: the engine keeps KV of its own.",
    "streamer": "Read the pieces, or pass it to generate.",
    "tokenizer": "Set engine.tokenizer.",
}
_OF_COMPILE = "It is an option of specstream.compile, for all calls of an engine."
_WAYS_OUT |= {field.name: _OF_COMPILE for field in fields(Options)}
_IN_SUBMIT = {
    "max_length": "Give max_new_tokens.",
    "n": "Submit the prompt as often as it is asked for.",
    "num_return_sequences": "Submit the prompt as often as it is asked for.",
    "ignore_eos": "Leave it out: submit ends at no token unless eos_token_id or generation_config says so.",
}


def refuse_unknown(
    name: str, value: object, caller: str, arguments: Iterable[str], settings: Iterable[str]
) -> NoReturn:
    """Refuses an argument, and says which one it may be.

    Args:
        caller: what was called.
        arguments: names it knows.
        settings: further names that it knows as fields of a generation_config.
    """
    raise InvalidOption(
        name, value, f"an argument of specstream's {caller}", _way_out(name, caller, set(arguments), set(settings))
    )


def _way_out(name: str, caller: str, arguments: set[str], settings: set[str]) -> str:
    in_submit = _IN_SUBMIT.get(name) if caller == "submit" else None
    if in_submit or name in _WAYS_OUT:
        return in_submit or _WAYS_OUT[name]
    if name in settings:
        return f"Give it in generation_config=GenerationConfig({name}=...)."
    meant, question = _OF_VLLM.get(name), "It is called {} here."
    if meant is None:
        close = difflib.get_close_matches(name, sorted(arguments | settings), n=3, cutoff=0.7)
        if not close:
            return "Leave it out."
        meant, question = close[0], f"Did you mean {' or '.join(['{}', *close[1:]])}?"
    place = "" if meant in arguments else f" Give it in generation_config=GenerationConfig({meant}=...)."
    return question.format(meant) + place
