"""Acceptance of candidates against the target's own choices."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_greedy(logits: Tensor, candidates: list[int]) -> tuple[int, list[int]]:
    """Greedy verification: candidates count as long as each is the target's own best token.

    Args:
        logits: [len(candidates) + 1, vocab]; row i is the target's view after candidate i - 1.

    Returns:
        How many candidates are accepted, and the tokens produced: those and one of the target's own.
    """
    best: list[int] = torch.argmax(logits, dim=-1).tolist()
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == best[accepted]:
        accepted += 1
    return accepted, best[: accepted + 1]
