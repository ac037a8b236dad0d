"""`engine.generate`: transformers' call and result, as a loop over an engine's rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from specstream.errors import InvalidOption
from specstream.outputs import RequestOutput
from specstream.settings import merge_settings

if TYPE_CHECKING:
    from specstream.engine import Engine

DEFAULT_NEW_TOKENS = 20
"""As transformers has it when neither the call nor the model says."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns with `return_dict_in_generate=True`."""

    sequences: Tensor
    """int64 [batch, length]: what `generate` returns without it."""
    requests: tuple[RequestOutput, ...]
    """For each row, its tokens, why it ended, and its counters."""


def generate(
    engine: Engine,
    input_ids: Tensor | Seq[Seq[int]],
    *,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Seq[int] | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    logits_processor: Seq[LogitsProcessor] = (),
    stopping_criteria: Seq[StoppingCriteria] = (),
    streamer: Any = None,
    return_dict_in_generate: bool = False,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """Completes a batch of prompts.

    Args:
        input_ids: int64 [batch, length], or token ids of different lengths.
        attention_mask: [batch, length], 0 where a prompt is padded (left or right).
        generation_config: settings instead of the model's own.
        seed: of the sampled text. An int gives the sequences of the call seed, seed + 1, ...; a list one each; None
            draws one from torch's global generator.
        presence_penalty, frequency_penalty, logit_bias, logits_processor, stopping_criteria: as in `Engine.submit`.
        streamer: transformers streamer, for a batch of one.
        settings: fields of GenerationConfig, over the generation_config: max_new_tokens, do_sample, temperature, ...
            (`specstream.settings.HONOURED`); the others are refused by name.

    Returns:
        int64 [batch x num_return_sequences, length + most new tokens], the prompts first as they were given; a
        `GenerateOutput` on request.

    Raises:
        InvalidOption: an argument that is unknown or cannot be honoured, by name.
    """
    config = merge_settings(engine.generation_config, generation_config, **settings)
    ends = config.eos_token_id or []
    padding = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
    rows, prompts = _prompts(input_ids, attention_mask, padding)
    copies = config.num_return_sequences or 1
    rows, prompts = rows.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
    if streamer is not None and len(prompts) > 1:
        raise InvalidOption("streamer", f"a batch of {len(prompts)}", "a batch of one")
    seeds = _seeds(seed, len(prompts))
    config.max_new_tokens = _new_tokens(config, settings, rows.shape[1])
    config.max_length = config.max_new_tokens + rows.shape[1]
    if config.min_length:  # of the padded row; requests know their own prompts only
        config.min_new_tokens = max(config.min_new_tokens or 0, config.min_length - rows.shape[1])
        config.min_length = None
    arguments = {
        "generation_config": config,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": logit_bias,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
    }
    if streamer is not None:
        streamer.put(rows.cpu())
    requests = [(prompt, arguments | {"seed": own}) for prompt, own in zip(prompts, seeds, strict=True)]
    outputs = _run(engine, requests, streamer)
    if streamer is not None:
        streamer.end()
    longest = max(len(output.token_ids) for output in outputs)
    new = [output.token_ids + [padding] * (longest - len(output.token_ids)) for output in outputs]
    sequences = torch.cat([rows, torch.tensor(new, dtype=rows.dtype, device=rows.device)], dim=1)
    return GenerateOutput(sequences, tuple(outputs)) if return_dict_in_generate else sequences


def _seeds(seed: int | Seq[int] | None, count: int) -> list[int]:
    """One seed for each sequence."""
    if seed is None:
        return [int(value) for value in torch.randint(2**63 - 1, (count,))]
    if isinstance(seed, int):
        return [seed + index for index in range(count)]
    if len(seed) != count:
        raise InvalidOption("seed", f"{len(seed)} seeds", f"an int, or one for each of the {count} sequences")
    return list(seed)


def _prompts(
    input_ids: Tensor | Seq[Seq[int]], attention_mask: Tensor | None, pad_token_id: int
) -> tuple[Tensor, list[list[int]]]:
    """The batch as a tensor, and each prompt without its padding."""
    if not isinstance(input_ids, Tensor):
        rows = isinstance(input_ids, Seq) and not isinstance(input_ids, str)
        if not rows or not all(isinstance(row, Seq) and not isinstance(row, str) for row in input_ids):
            raise InvalidOption("input_ids", input_ids, "a tensor [batch, length], or a list of lists of token ids")
        lists = [list(row) for row in input_ids]
        width = max((len(row) for row in lists), default=0)
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in lists]
        padded = [[pad_token_id] * (width - len(row)) + row for row in lists]
        if not lists or not width:
            raise InvalidOption("input_ids", input_ids, "at least one prompt of at least one token")
        try:
            ids = torch.tensor(padded)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidOption("input_ids", input_ids, "token ids, which are ints") from error
        return _prompts(ids, torch.tensor(mask) if attention_mask is None else attention_mask, pad_token_id)
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InvalidOption("input_ids", f"shape {tuple(input_ids.shape)}", "shape [batch, length], neither of them 0")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidOption("input_ids", input_ids.dtype, "int64 or int32 token ids")
    if attention_mask is None:
        return input_ids, [row.tolist() for row in input_ids]
    if attention_mask.shape != input_ids.shape:
        shape = f"shape {tuple(attention_mask.shape)}"
        raise InvalidOption("attention_mask", shape, f"the shape of input_ids, {tuple(input_ids.shape)}")
    return input_ids, [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]


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


def _run(engine: Engine, requests: list[tuple[list[int], dict[str, Any]]], streamer: Any) -> list[RequestOutput]:
    """Runs rounds until these prompts are done; whatever stops it takes them out of the engine."""
    ids: list[int] = []
    done: dict[int, RequestOutput] = {}
    try:
        for prompt, arguments in requests:
            ids.append(engine.submit(prompt, **arguments))
        while len(done) < len(ids):
            outputs = engine.run_round()
            engine.hand_over([output for output in outputs if output.request_id not in ids])
            for output in outputs:
                if output.request_id in ids:
                    if streamer is not None:
                        for token in output.new_token_ids:
                            streamer.put(torch.tensor([token]))
                    if output.output is not None:
                        done[output.request_id] = output.output
    except BaseException:
        for request_id in ids:
            engine.cancel(request_id)
        raise
    return [done[request_id] for request_id in ids]
