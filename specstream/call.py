"""A batch of prompts and one set of settings, as requests of an engine."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specstream.errors import InvalidOption
from specstream.outputs import StepOutput
from specstream.prompt import batch
from specstream.request import end_tokens
from specstream.sequence import Sequence
from specstream.settings import merge_settings
from specstream.values import INTEGER

if TYPE_CHECKING:
    from specstream.engine import Engine

DEFAULT_NEW_TOKENS = 20
"""As transformers has it when neither the call nor the model says."""


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

    @classmethod
    def make(
        cls,
        engine: Engine,
        input_ids: Tensor | Seq[Seq[int]],
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | None,
        seed: int | Seq[int] | None,
        settings: dict[str, Any],
        arguments: dict[str, Any],
    ) -> Call:
        """Checks everything and makes the requests.

        Args:
            settings: fields of GenerationConfig, over `generation_config`.
            arguments: of `RequestFactory.make`, for every request.
        """
        if settings.get("eos_token_id") is not None:
            settings["eos_token_id"] = end_tokens(settings["eos_token_id"], engine.vocab_size)
        config = merge_settings(engine.generation_config, generation_config, **settings)
        for name in ("output_scores", "output_logits"):
            if getattr(config, name) and not config.return_dict_in_generate:
                raise InvalidOption(
                    name, True, "False without return_dict_in_generate=True", "Pass return_dict_in_generate=True."
                )
        ends = config.eos_token_id or []
        padding = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        rows, prompts = batch(input_ids, attention_mask, padding, engine.vocab_size)
        copies, config.num_return_sequences = config.num_return_sequences or 1, None
        rows, prompts = rows.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
        seeds = _seeds(seed, len(prompts))
        config.max_new_tokens = _new_tokens(config, settings, rows.shape[1])
        config.max_length = config.max_new_tokens + rows.shape[1]
        if config.min_length:  # of the padded row; requests know their own prompts only
            config.min_new_tokens = max(config.min_new_tokens or 0, config.min_length - rows.shape[1])
            config.min_length = None
        inbox: list[StepOutput] = []
        requests = [
            engine.make_request(prompt, inbox, generation_config=config, seed=own, **arguments)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        return cls(rows, requests, inbox, config, padding)

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


def _new_tokens(config: GenerationConfig, settings: dict[str, Any], width: int) -> int:
    """Tokens to produce: max_new_tokens, or what max_length leaves; what the call says goes first."""
    by_length = settings.get("max_length") is not None and settings.get("max_new_tokens") is None
    if config.max_new_tokens is not None and not by_length:
        return int(config.max_new_tokens)
    if config.max_length is None:
        return DEFAULT_NEW_TOKENS
    if config.max_length <= width:
        raise InvalidOption("max_length", config.max_length, f"more than the {width} tokens of the prompt")
    return int(config.max_length) - width
