"""The settings of sampling that a captured graph applies itself, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def process(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Logits as transformers' warpers change them: temperature, then top-k, top-p and min-p. None: used by no row.

    Args:
        logits: [rows, vocab], any float dtype.
        temperature: float32 [rows]; 1 changes nothing.
        top_k: int32 [rows]; 0 changes nothing.
        top_p: float64 [rows]; 1 changes nothing.
        min_p: float32 [rows]; 0 changes nothing.

    Returns:
        float32 [rows, vocab], with -inf for tokens that are filtered out.
    """
    scores = logits.to(torch.float32)
    if temperature is not None:
        scores = scores / temperature[:, None]
    if top_k is not None or top_p is not None:
        ascending, order = torch.sort(scores)
        if top_k is not None:
            scores, ascending = _keep_top_k(scores, ascending, top_k)
        if top_p is not None:
            scores = _keep_top_p(scores, ascending, order, top_p)
    if min_p is not None:
        probabilities = torch.softmax(scores, dim=-1)
        least = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -INF)
    return scores


def _keep_top_k(scores: Tensor, ascending: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    vocab = scores.shape[1]
    kept = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long()
    least = ascending.gather(1, (vocab - kept)[:, None])
    return scores.masked_fill(scores < least, -INF), ascending.masked_fill(ascending < least, -INF)


def _keep_top_p(scores: Tensor, ascending: Tensor, order: Tensor, top_p: Tensor) -> Tensor:
    cumulative = torch.softmax(ascending, dim=-1).cumsum(dim=-1)
    removed = (cumulative <= (1 - top_p).float()[:, None]) & (top_p < 1)[:, None]
    removed[:, -1] = False
    return scores.masked_fill(removed.scatter(1, order, removed), -INF)
