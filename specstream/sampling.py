"""Choosing tokens from logits: processors, and random numbers that depend on request, position and purpose alone.

So a request's text depends neither on its place in a batch nor on when its rounds ran, and a round that is run again
chooses the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList


class Purpose(IntEnum):
    """What random numbers are for: each has a stream of its own."""

    TOKEN = 0
    """The token at a position, drawn from the target's distribution."""
    DRAFT = 1
    """The candidate at a position, drawn from the draft's."""
    ACCEPT = 2
    """Whether a candidate is accepted."""
    RESIDUAL = 3
    """The token in the place of a rejected candidate."""


@dataclass(frozen=True)
class Noise:
    """Random numbers keyed by (seed, position, purpose): the Philox generator, with these as key and counter."""

    seed: int

    def uniform(self, position: int, purpose: Purpose, count: int = 1) -> Tensor:
        """float64 [count] in [0, 1)."""
        key, counter = (np.array(v, np.uint64) for v in ((self.seed % 2**64, purpose), (0, 0, 0, position)))
        bits = np.random.Philox(key=key, counter=counter)
        return torch.from_numpy(np.random.Generator(bits).random(count))

    def gumbel(self, position: int, count: int) -> Tensor:
        """float64 [count], standard Gumbel: the same for draft and target, so that they tend to agree."""
        uniform = self.uniform(position, Purpose.TOKEN, count).clamp_min(torch.finfo(torch.float64).tiny)
        return -torch.log(-torch.log(uniform))

    def draw(self, probabilities: Tensor, position: int, purpose: Purpose) -> int:
        """A token from unnormalised probabilities, float64 [vocab], by one uniform number."""
        cumulative = torch.cumsum(probabilities, 0)
        target = self.uniform(position, purpose) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, target, right=True))
        if index >= len(probabilities) or probabilities[index] == 0:  # rounding at the very end
            index = int(probabilities.nonzero()[-1])
        return index


@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens."""

    do_sample: bool = False
    seed: int = 0
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    """transformers' processors, in their order; they see the tokens so far and may change the logits."""

    @property
    def noise(self) -> Noise:
        return Noise(self.seed)

    def scores(self, logits: Tensor, tokens: list[int], candidates: list[int]) -> Tensor:
        """Processed logits, in float32 as transformers has them.

        Args:
            logits: [rows, vocab]; row i comes after `tokens` and the first i candidates.
        """
        rows = logits.to(torch.float32)
        if not self.processors:
            return rows
        ids: Any = torch.tensor([tokens + candidates], device=logits.device)
        processed = []
        for index in range(len(rows)):
            seen = ids[:, : len(tokens) + index]
            processed.append(self.processors(seen, rows[index : index + 1].clone()))
        return torch.cat(processed)


def has_distribution(scores: Tensor) -> Tensor:
    """bool [...]: whether softmax makes probabilities of scores [..., vocab]: no NaN or +inf, and not all -inf."""
    return scores.amax(-1).isfinite()
