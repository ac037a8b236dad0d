"""A request on its way: its tokens, its limits, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from specstream.kv import SequenceKV
from specstream.sampling import Sampling
from specstream.speculate import ASSUMED_ACCEPTANCE, Candidates
from specstream.token_scores import Kept, TokenScores

if TYPE_CHECKING:
    from specstream.outputs import StepOutput


ASSUMED_CANDIDATES = 8
"""How many candidates the acceptance that is assumed to begin with counts for."""


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """It produced an end token or a stop string, or a stopping criterion said so."""
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
    num_refusals: int = 0
    """Verifications in which a candidate was not accepted."""

    def count_verification(self, proposed: int, accepted: int) -> None:
        self.num_verify_rounds += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        self.num_refusals += accepted < proposed

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
    inbox: list[StepOutput] = field(default_factory=list)
    """Where its outputs go, for whoever asked for it to pick up."""
    seat: int = -1
    kv: SequenceKV | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stopping: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    """transformers' criteria; they see committed tokens only, one more at a time."""
    drafts: bool = True
    """Whether candidates are proposed for it."""
    depth: int | None = None
    """How many, at most; None: as many as for any."""
    cohort: int = 0
    """Which of the two groups it is of, where requests verify by turns; see `specstream.cohorts`."""
    useless_rounds: int = 0
    """Rounds in a row in which its draft failed or none of its candidates was accepted."""
    judged_rounds: int = 0
    """Verifications of candidates since it was last asked whether they pay."""
    judged_accepted: int = 0
    """Candidates accepted in them."""
    kept: Kept = field(default_factory=Kept)
    token_scores: TokenScores = field(default_factory=TokenScores)
    candidates: Candidates = field(default_factory=Candidates)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def prompt_is_through(self) -> bool:
        """Whether its next rows are a verification."""
        return self.kv is not None and self.kv.length >= self.prompt_length

    @property
    def acceptance(self) -> float:
        """The chance that a candidate of it is right if those before it are, as far as has been seen."""
        accepted = self.metrics.num_accepted_tokens + ASSUMED_ACCEPTANCE * ASSUMED_CANDIDATES
        refused = self.metrics.num_refusals + (1 - ASSUMED_ACCEPTANCE) * ASSUMED_CANDIDATES
        return accepted / (accepted + refused)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def cut(self, produced: list[int], scores: Tensor) -> tuple[list[int], FinishReason | None]:
        """What of newly produced tokens counts: up to the first end or the limit, whichever is first.

        Args:
            scores: what they were chosen from, [at least as many, vocab]; criteria see them if the request keeps them.
        """
        room = self.limit - len(self.tokens)
        for index, token in enumerate(produced[:room]):
            if token in self.end_tokens or self._stops(produced[: index + 1], scores):
                return produced[: index + 1], FinishReason.STOP
        if len(produced) >= room:
            return produced[:room], FinishReason.LENGTH
        return produced, None

    def _stops(self, produced: list[int], scores: Tensor) -> bool:
        if not self.stopping:
            return False
        ids: Any = torch.tensor([self.tokens + produced])
        seen: Any = None
        if self.kept.scores:  # as transformers has it: one [1, vocab] for each new token
            seen = tuple(row[None] for row in (*self.token_scores.scores, *scores[: len(produced)]))
        return bool(self.stopping(ids, seen).any())
