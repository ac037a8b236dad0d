"""`engine.generate` and `engine.stream`: transformers' call, its result at once or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specstream.call import Call, Given
from specstream.errors import InvalidOption
from specstream.outputs import RequestOutput
from specstream.sequence import FinishReason
from specstream.text_stream import TextStream

if TYPE_CHECKING:
    from specstream.engine import Engine


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: transformers' fields, and each request's own.

    sequences: int64 [batch, length], what `generate` returns without it. scores, logits: if asked for, a tensor
    float32 [batch, vocab] for each new token; zeros for rows that had ended.
    """

    requests: tuple[RequestOutput, ...] = None  # type: ignore[assignment]  # the default transformers insists on
    """For each row its tokens, why it ended, and its counters."""


@dataclass(frozen=True)
class StreamOutput:
    """What a round produced for one row of a call to `stream`."""

    index: int
    """The row."""
    token_ids: list[int]
    """Those that are new."""
    text: str | None
    """Theirs, as far as it is certain: the parts joined are the row's text. None if the engine has no tokenizer."""
    logprobs: list[float] | None
    """Theirs, if asked for (`RequestOutput.logprobs`)."""
    output: RequestOutput | None
    """The row's result, once it has ended."""

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None


def generate(
    engine: Engine,
    input_ids: Any,
    /,
    *,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Seq[int] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **arguments: Any,
) -> Tensor | GenerateOutput:
    """Completes a batch of prompts.

    Args:
        input_ids: int64 [batch, length], or token ids of different lengths. `inputs` is another name for it.
        attention_mask: [batch, length], 0 where a prompt is padded (left or right). Without one a tensor's padding
            is known by pad_token_id, if there is one that is no end token.
        generation_config: settings over the model's own, which fill what it leaves at None.
        seed: of the sampled text. An int gives the sequences of the call seed, seed + 1, ...; a list one each; None
            draws one from torch's global generator.
        tokenizer: for stop_strings, instead of the engine's.
        streamer: transformers streamer, for a batch of one.
        arguments: presence_penalty, frequency_penalty, logit_bias, logits_processor, stopping_criteria, logprobs and
            prefix_allowed_tokens_fn (for one prompt) as in `Engine.submit`: processors and criteria see one row at
            a time, [1, length] without padding. And fields of GenerationConfig, over the generation_config:
            max_new_tokens, do_sample, temperature, ... (`specstream.settings.HONOURED`). The others are refused by
            name.

    Returns:
        int64 [batch x num_return_sequences, length + most new tokens], the prompts first as they were given; a
        `GenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        InvalidOption: an argument that is unknown or cannot be honoured, by name.
    """
    given = Given(input_ids, attention_mask, generation_config, seed, tokenizer)
    call = Call.make(engine, "generate", given, arguments)
    if streamer is not None:
        if len(call.requests) > 1:
            raise InvalidOption("streamer", f"a batch of {len(call.requests)}", "a batch of one")
        if not all(callable(getattr(streamer, method, None)) for method in ("put", "end")):
            raise InvalidOption("streamer", streamer, "an object with the methods put and end, as transformers' have")
        with engine.calling_out():
            streamer.put(call.rows.cpu())
    done: dict[int, RequestOutput] = {}
    with closing(call.run(engine)) as steps:
        for index, step in steps:
            if streamer is not None:
                with engine.calling_out():
                    for token in step.new_token_ids:
                        streamer.put(torch.tensor([token]))
            if step.output is not None:
                done[index] = step.output
    if streamer is not None:
        with engine.calling_out():
            streamer.end()
    outputs = tuple(done[index] for index in range(len(call.requests)))
    sequences = _padded(call, outputs)
    if not call.config.return_dict_in_generate:
        return sequences
    typed: Any = sequences  # transformers asks for a LongTensor
    return GenerateOutput(
        sequences=typed,
        scores=_by_token([output.scores for output in outputs]) if call.config.output_scores else None,
        logits=_by_token([output.logits for output in outputs]) if call.config.output_logits else None,
        requests=outputs,
    )


def stream(
    engine: Engine,
    input_ids: Any,
    /,
    *,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Seq[int] | None = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Iterator[StreamOutput]:
    """Completes a batch of prompts piece by piece: what each round produced, for each row, as it comes.

    The arguments are those of `generate`, but for the streamer, and are checked at once; the first round runs when
    the first piece is asked for. Several streams may be read in turn. One that is left early, or closed, takes its
    requests out of the engine.
    """
    given = Given(input_ids, attention_mask, generation_config, seed, tokenizer)
    call = Call.make(engine, "stream", given, arguments)
    if call.config.return_dict_in_generate:
        raise InvalidOption("return_dict_in_generate", True, "False for stream, whose pieces have everything")
    return _pieces(engine, call)


def _pieces(engine: Engine, call: Call) -> Iterator[StreamOutput]:
    texts = [TextStream(call.tokenizer) for _ in call.requests] if call.tokenizer is not None else None
    with closing(call.run(engine)) as steps:
        for index, step in steps:
            text = None
            if texts is not None:
                text = texts[index].push(step.new_token_ids) + (texts[index].finish() if step.finished else "")
            yield StreamOutput(index, step.new_token_ids, text, step.logprobs, step.output)


def _padded(call: Call, outputs: Seq[RequestOutput]) -> Tensor:
    """Prompts and what follows, as one tensor."""
    longest = max(len(output.token_ids) for output in outputs)
    new = [output.token_ids + [call.padding] * (longest - len(output.token_ids)) for output in outputs]
    return torch.cat([call.rows, torch.tensor(new, dtype=call.rows.dtype, device=call.rows.device)], dim=1)


def _by_token(rows: list[Tensor | None]) -> tuple[Any, ...]:
    """From [tokens, vocab] for each row to [rows, vocab] for each token; zeros for rows that had ended."""
    known = [row for row in rows if row is not None]
    longest, vocab = max(len(row) for row in known), known[0].shape[1]
    out = known[0].new_zeros(longest, len(rows), vocab)
    for index, row in enumerate(known):
        out[: len(row), index] = row
    return tuple(out)
