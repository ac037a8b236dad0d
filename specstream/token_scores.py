"""What a request keeps beside its tokens: log-probabilities, scores and logits, one for each token produced."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Which of them a request asked for."""

    logprobs: bool = False
    scores: bool = False
    logits: bool = False


@dataclass
class TokenScores:
    """For each token produced so far, what was asked for; the others stay empty."""

    logprobs: list[float] = field(default_factory=list)
    """Natural log of the probability that the model gives the token, before processors and temperature."""
    scores: list[Tensor] = field(default_factory=list)
    """float32 [vocab]: the processed logits the token was chosen from."""
    logits: list[Tensor] = field(default_factory=list)
    """float32 [vocab]: the model's own."""

    @classmethod
    def of(cls, kept: Kept, logits: Tensor, scores: Tensor, produced: list[int]) -> TokenScores:
        """Those of the tokens of one round, from its rows [rows, vocab], of which the first ones were produced."""
        if kept == Kept():
            return cls()
        count = len(produced)
        own = logits[:count].float()
        logprobs: list[float] = []
        if kept.logprobs:
            chosen = torch.tensor(produced, device=own.device)[:, None]
            logprobs = torch.log_softmax(own.double(), dim=-1).gather(1, chosen)[:, 0].tolist()
        return cls(
            logprobs,
            list(scores[:count].clone()) if kept.scores else [],
            list(own.clone()) if kept.logits else [],
        )

    def add(self, later: TokenScores) -> None:
        """Adds those of the tokens that follow."""
        self.logprobs += later.logprobs
        self.scores += later.scores
        self.logits += later.logits
