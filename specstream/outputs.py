"""What requests give back, round by round and at their end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specstream.sequence import FinishReason, RequestMetrics, Sequence


@dataclass(frozen=True)
class RequestOutput:
    """A request that ended."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """What was produced, without the prompt."""
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: list[float] | None = None
    """For each token the natural log of the probability that the model gives it, before processors and temperature."""
    scores: Tensor | None = None
    """float32 [tokens, vocab]: the processed logits that each was chosen from."""
    logits: Tensor | None = None
    """float32 [tokens, vocab]: the model's own."""
    synthetic: bool = False
    """Whether acceptance was made up to measure costs: then these are not the target's tokens."""


@dataclass(frozen=True)
class StepOutput:
    """What one step produced for one request."""

    request_id: int
    new_token_ids: list[int]
    output: RequestOutput | None
    """The whole result, once the request has ended."""
    logprobs: list[float] | None = None
    """Of the new tokens, as in `RequestOutput`."""
    error: Exception | None = None
    """Why the request was cancelled; raised to whoever reads its outputs, so that no step returns it."""

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None


def request_output(sequence: Sequence, reason: FinishReason, *, synthetic: bool) -> RequestOutput:
    """What a request gives back at its end."""
    kept, own = sequence.kept, sequence.token_scores
    return RequestOutput(
        sequence.request_id,
        sequence.tokens[: sequence.prompt_length],
        sequence.new_tokens,
        reason,
        sequence.metrics,
        own.logprobs if kept.logprobs else None,
        torch.stack(own.scores) if kept.scores and own.scores else None,
        torch.stack(own.logits) if kept.logits and own.logits else None,
        synthetic,
    )
