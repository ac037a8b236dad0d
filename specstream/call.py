"""A batch of prompts and one set of settings, as requests of an engine."""

from __future__ import annotations

import copy
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StopStringCriteria,
)

from specstream.errors import InvalidOption
from specstream.outputs import StepOutput
from specstream.prompt import batch
from specstream.sequence import Sequence
from specstream.settings import OF_REQUESTS, merge_settings
from specstream.stopping import end_tokens
from specstream.values import INTEGER

if TYPE_CHECKING:
    from specstream.engine import Engine

DEFAULT_NEW_TOKENS = 20
"""As transformers has it when neither the call nor the model says."""


@dataclass(frozen=True)
class Given:
    """Arguments of a call that are neither a request's nor fields of GenerationConfig."""

    input_ids: Any
    attention_mask: Any
    generation_config: GenerationConfig | None
    seed: int | Seq[int] | None
    tokenizer: Any


@dataclass(frozen=True)
class Call:
    """Prompts and settings that are known to be right; nothing is queued yet."""

    rows: Tensor
    """int64 or int32 [sequences, length]: the prompts as they were given, each as often as it is to be completed."""
    requests: list[Sequence]
    """One for each row."""
    inbox: list[StepOutput]
    config: GenerationConfig
    padding: int
    tokenizer: Any
    """The call's, or the engine's; may be None."""

    @classmethod
    def make(
        cls,
        engine: Engine,
        caller: str,
        given: Given,
        arguments: dict[str, Any],
    ) -> Call:
        """Checks everything and makes the requests.

        Args:
            caller: what was called, for messages.
            arguments: of `RequestFactory.make`, for every request; and fields of GenerationConfig.
        """
        settings = {name: value for name, value in arguments.items() if not _is_left_out(name, value)}
        own = {name: settings.pop(name) for name in sorted(settings.keys() & OF_REQUESTS)}
        input_ids = _input_ids(given.input_ids, settings.pop("inputs", None))
        if settings.get("eos_token_id") is not None:
            settings["eos_token_id"] = end_tokens(settings["eos_token_id"], engine.vocab_size)
        config = merge_settings(engine.generation_config, given.generation_config, caller, **settings)
        for name in ("output_scores", "output_logits"):
            if getattr(config, name) and not config.return_dict_in_generate:
                raise InvalidOption(
                    name, True, "False without return_dict_in_generate=True", "Pass return_dict_in_generate=True."
                )
        ends = config.eos_token_id or []
        padding = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        infer_mask = config.pad_token_id is not None and config.pad_token_id not in ends
        rows, prompts = batch(input_ids, given.attention_mask, padding, engine.vocab_size, infer_mask=infer_mask)
        copies, config.num_return_sequences = config.num_return_sequences or 1, None
        rows, prompts = rows.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
        _constrain(own, len(prompts) // copies, len(prompts))
        seeds = _seeds(given.seed, len(prompts))
        config.max_new_tokens = _new_tokens(config, rows.shape[1])
        config.max_length = config.max_new_tokens + rows.shape[1]
        if config.min_length:  # of the padded row; requests know their own prompts only
            config.min_new_tokens = max(0, config.min_length - rows.shape[1])
            config.min_length = None
        criteria = own.pop("stopping_criteria", None)
        if given.tokenizer is not None:
            criteria = _with_stop_strings(config, criteria, given.tokenizer)
        inbox: list[StepOutput] = []
        requests = [
            engine.make_request(
                prompt,
                inbox,
                generation_config=config,
                seed=seed,
                stopping_criteria=_without_padding(criteria, rows.shape[1] - len(prompt)),
                **own,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        tokenizer = given.tokenizer if given.tokenizer is not None else engine.tokenizer
        return cls(rows, requests, inbox, config, padding, tokenizer)

    def run(self, engine: Engine) -> Generator[tuple[int, StepOutput]]:
        """Runs rounds until all requests have ended; whatever stops it takes them out of the engine.

        Yields:
            The row, and what a round produced for it.

        Raises:
            Whatever went wrong for one of the requests, or in a round.
        """
        places = {request.request_id: index for index, request in enumerate(self.requests)}
        running = set(places)
        try:
            for request in self.requests:
                engine.enqueue(request)
            while running:
                if not self.inbox:
                    engine.run_round()
                while self.inbox:
                    output = self.inbox.pop(0)
                    if output.finished:
                        running.discard(output.request_id)
                    if output.error is not None:
                        raise output.error
                    yield places[output.request_id], output
        finally:
            engine.abandon(running)


def _seeds(seed: int | Seq[int] | None, count: int) -> list[int]:
    """One seed for each sequence."""
    if seed is None:
        return [int(value) for value in torch.randint(2**63 - 1, (count,))]
    allowed = f"an int, or one for each of the {count} sequences"
    if not isinstance(seed, list | tuple):
        if not INTEGER.holds(seed):
            raise InvalidOption("seed", seed, allowed)
        first: Any = seed
        return [int(first) + index for index in range(count)]
    if len(seed) != count:
        raise InvalidOption("seed", f"{len(seed)} seeds", allowed)
    for own in seed:
        INTEGER.check("seed", own)
    return list(seed)


def _new_tokens(config: GenerationConfig, width: int) -> int:
    """Tokens to produce: max_new_tokens, wherever it comes from, or what max_length leaves."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is None:
        return DEFAULT_NEW_TOKENS
    if config.max_length <= width:
        raise InvalidOption("max_length", config.max_length, f"more than the {width} tokens of the prompt")
    return int(config.max_length) - width


_OF_TRANSFORMERS = frozenset(
    {
        "assistant_model",
        "assistant_tokenizer",
        "cache",
        "custom_generate",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "past_key_values",
        "position_ids",
        "streamer",
        "synced_gpus",
        "token_type_ids",
        "trust_remote_code",
    }
)
"""Arguments of transformers' generate that may be given as None, or False, and are refused otherwise."""


def _is_left_out(name: str, value: object) -> bool:
    return name in _OF_TRANSFORMERS and (value is None or value is False)


def _input_ids(input_ids: Any, inputs: Any) -> Any:
    """The prompts, under either of transformers' names."""
    if inputs is not None and input_ids is not None:
        raise InvalidOption("inputs", inputs, "None beside input_ids, which it is another name of", "Give one of them.")
    return input_ids if input_ids is not None else inputs


def _constrain(own: dict[str, Any], prompts: int, rows: int) -> None:
    """Refuses what asks for the row of a batch, where it would get another: each request is a batch of its own."""
    if own.get("prefix_allowed_tokens_fn") is not None and prompts > 1:
        raise _of_one_prompt("prefix_allowed_tokens_fn", own["prefix_allowed_tokens_fn"], prompts)
    given = own.get("logits_processor")
    if isinstance(given, list | tuple):
        own["logits_processor"] = [_for_one_row(processor, rows) for processor in given]


def _for_one_row(processor: Any, rows: int) -> Any:
    """The processor; one that counts the rows of each prompt (its beams) as if there were one."""
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    if rows > processor._num_beams:
        raise _of_one_prompt("logits_processor", processor, rows)
    alone = copy.copy(processor)
    alone._num_beams = 1
    return alone


def _of_one_prompt(name: str, given: object, rows: int) -> InvalidOption:
    allowed = f"one prompt, not {rows} rows, since each is processed by itself as the batch's first"
    return InvalidOption(name, given, allowed, "Call once for each prompt, with prefix_allowed_tokens_fn.")


def _with_stop_strings(config: GenerationConfig, criteria: Any, tokenizer: Any) -> Any:
    """Criteria with that of the setting stop_strings, which it then replaces, unless the caller has one."""
    own = [] if criteria is None else criteria
    if not config.stop_strings or not isinstance(own, list | tuple):
        return criteria
    if any(type(criterion) is StopStringCriteria for criterion in own):
        return criteria
    made = StopStringCriteria(tokenizer, config.stop_strings)
    config.stop_strings = None
    return [made, *own]


def _without_padding(criteria: Any, padding: int) -> Any:
    """Criteria for a row without its padding: lengths that were meant with it are shorter."""
    if not padding or not isinstance(criteria, list | tuple):
        return criteria
    return [
        MaxLengthCriteria(criterion.max_length - padding) if type(criterion) is MaxLengthCriteria else criterion
        for criterion in criteria
    ]
