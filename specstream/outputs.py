"""What requests give back, round by round and at their end."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.sequence import FinishReason, RequestMetrics


@dataclass(frozen=True)
class RequestOutput:
    """A request that ended."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """What was produced, without the prompt."""
    finish_reason: FinishReason
    metrics: RequestMetrics


@dataclass(frozen=True)
class StepOutput:
    """What one step produced for one request."""

    request_id: int
    new_token_ids: list[int]
    output: RequestOutput | None
    """The whole result, once the request has ended."""

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None
