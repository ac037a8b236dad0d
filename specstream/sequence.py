"""A request on its way: its tokens, its limits, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from specstream.kv import SequenceKV
from specstream.sampling import Sampling
from specstream.speculate import Candidates


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """It produced an end token."""
    LENGTH = "length"
    """It reached its limit of new tokens, or `max_model_len`."""
    CANCELLED = "cancelled"


@dataclass
class RequestMetrics:
    """Counters of one request, as vLLM defines them."""

    num_verify_rounds: int = 0
    """Verification rounds: those that verified candidates or could have."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the bonus token included: 1 + accepted / rounds."""
        return 1 + self.num_accepted_tokens / self.num_verify_rounds if self.num_verify_rounds else 1.0


@dataclass
class Sequence:
    """One request. `tokens` are committed; their KV is in `kv` for all but the last, once the prompt is through."""

    request_id: int
    prompt_length: int
    limit: int
    """Most tokens, prompt included."""
    end_tokens: frozenset[int]
    tokens: list[int]
    seat: int = -1
    kv: SequenceKV | None = None
    sampling: Sampling = field(default_factory=Sampling)
    candidates: Candidates = field(default_factory=Candidates)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def cut(self, produced: list[int]) -> tuple[list[int], FinishReason | None]:
        """What of newly produced tokens counts: up to the first end token or the limit, whichever is first."""
        room = self.limit - len(self.tokens)
        for index, token in enumerate(produced[:room]):
            if token in self.end_tokens:
                return produced[: index + 1], FinishReason.STOP
        if len(produced) >= room:
            return produced[:room], FinishReason.LENGTH
        return produced, None
