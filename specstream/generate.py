"""`engine.generate`: transformers' call and result, as a loop over an engine's rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specstream.errors import InvalidOption

if TYPE_CHECKING:
    from specstream.engine import Engine, RequestOutput

DEFAULT_NEW_TOKENS = 20
"""As transformers has it when neither the call nor the model says."""


_CHANGES_TEXT: dict[str, Any] = {
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "token_healing": False,
}
_CHANGES_TEXT |= dict.fromkeys(
    (
        "bad_words_ids",
        "begin_suppress_tokens",
        "constraints",
        "dola_layers",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "max_time",
        "penalty_alpha",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "watermarking_config",
    )
)
"""Settings of a generation_config that change greedy text, and, beside None, the value at which they do not."""

_SAMPLING = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
}
_BEAMS = {"length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"}
_ENDING = {"max_length", "max_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id"}
_RUNNING = {
    "_from_model_config",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "transformers_version",
    "compile_config",
}
_ASSISTING = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
_HONOURED_OR_WITHOUT_EFFECT = _SAMPLING | _BEAMS | _ENDING | _RUNNING | _ASSISTING
_NEUTRAL = {"repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0}
_NEUTRAL |= {"min_length": 0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
"""Settings of a generation_config that change nothing."""


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
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    eos_token_id: int | Seq[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool | None = None,
    streamer: Any = None,
    return_dict_in_generate: bool = False,
    **refused: object,
) -> Tensor | GenerateOutput:
    """Completes a batch of prompts greedily.

    What is not given comes from the model's generation_config, as in transformers.

    Args:
        input_ids: int64 [batch, length], or token ids of different lengths.
        attention_mask: [batch, length], 0 where a prompt is padded (left or right).
        max_new_tokens, max_length: most tokens to produce, or of prompt and output together.
        eos_token_id: end token or tokens.
        pad_token_id: fills rows that end early; default: the first end token, else 0.
        streamer: transformers streamer, for a batch of one.

    Returns:
        int64 [batch, length + most new tokens], the prompts first as they were given; a `GenerateOutput` on request.

    Raises:
        InvalidOption: an argument that is unknown or cannot be honoured, by name.
    """
    for name, value in refused.items():
        raise InvalidOption(name, value, "an argument of specstream's generate", "Leave it out.")
    defaults = engine.generation_config
    _refuse_defaults(defaults)
    if do_sample is None:
        do_sample = bool(getattr(defaults, "do_sample", False))
    if do_sample:
        raise InvalidOption("do_sample", True, "False: decoding is greedy", "Pass do_sample=False.")
    for name, value in unsupported_settings(defaults).items():
        way_out = f"Set model.generation_config.{name} = None if that is what you want."
        raise InvalidOption(f"generation_config.{name}", value, "None: it is not supported", way_out)
    if eos_token_id is None:
        eos_token_id = getattr(defaults, "eos_token_id", None)
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    if pad_token_id is None:
        pad_token_id = getattr(defaults, "pad_token_id", None)
    if pad_token_id is None:
        pad_token_id = ends[0] if ends else 0
    rows, prompts = _prompts(input_ids, attention_mask, pad_token_id)
    if streamer is not None and len(prompts) > 1:
        raise InvalidOption("streamer", f"a batch of {len(prompts)}", "a batch of one")
    budget = _new_tokens(defaults, max_new_tokens, max_length, rows.shape[1])
    if streamer is not None:
        streamer.put(rows.cpu())
    outputs = _run(engine, prompts, budget, ends, streamer)
    if streamer is not None:
        streamer.end()
    longest = max(len(output.token_ids) for output in outputs)
    new = [output.token_ids + [pad_token_id] * (longest - len(output.token_ids)) for output in outputs]
    sequences = torch.cat([rows, torch.tensor(new, dtype=rows.dtype, device=rows.device)], dim=1)
    return GenerateOutput(sequences, tuple(outputs)) if return_dict_in_generate else sequences


def unsupported_settings(generation_config: Any) -> dict[str, object]:
    """What a model's generation_config sets that changes greedy decoding and is not supported here."""
    settings = generation_config.to_diff_dict() if hasattr(generation_config, "to_diff_dict") else {}
    return {
        name: value
        for name, value in settings.items()
        if name not in _HONOURED_OR_WITHOUT_EFFECT and value is not None and value != _NEUTRAL.get(name, False)
    }


def _prompts(
    input_ids: Tensor | Seq[Seq[int]], attention_mask: Tensor | None, pad_token_id: int
) -> tuple[Tensor, list[list[int]]]:
    """The batch as a tensor, and each prompt without its padding."""
    if not isinstance(input_ids, Tensor):
        lists = [list(row) for row in input_ids]
        width = max((len(row) for row in lists), default=0)
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in lists]
        padded = [[pad_token_id] * (width - len(row)) + row for row in lists]
        if not lists or not width:
            raise InvalidOption("input_ids", input_ids, "at least one prompt of at least one token")
        return _prompts(torch.tensor(padded), torch.tensor(mask) if attention_mask is None else attention_mask, 0)
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


def _refuse_defaults(defaults: Any) -> None:
    """What the model's own generation_config asks for is honoured or refused, too."""
    for name, neutral in _CHANGES_TEXT.items():
        value = getattr(defaults, name, None)
        if value is not None and value != neutral:
            way_out = f"Set generation_config.{name} of the model to None if that is acceptable."
            raise InvalidOption(f"generation_config.{name}", value, "None: it would change the text", way_out)


def _new_tokens(defaults: Any, max_new_tokens: int | None, max_length: int | None, width: int) -> int:
    if max_new_tokens is None and max_length is None:
        max_new_tokens = getattr(defaults, "max_new_tokens", None)
        max_length = getattr(defaults, "max_length", None)
    if max_new_tokens is not None:
        return max_new_tokens
    if max_length is None:
        return DEFAULT_NEW_TOKENS
    if max_length <= width:
        raise InvalidOption("max_length", max_length, f"more than the {width} tokens of the prompt")
    return max_length - width


def _run(engine: Engine, prompts: list[list[int]], budget: int, ends: list[int], streamer: Any) -> list[RequestOutput]:
    """Runs rounds until these prompts are done; whatever stops it takes them out of the engine."""
    ids: list[int] = []
    done: dict[int, RequestOutput] = {}
    try:
        for prompt in prompts:
            ids.append(engine.submit(prompt, max_new_tokens=budget, eos_token_id=ends))
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
