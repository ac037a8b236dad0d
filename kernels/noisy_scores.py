"""A draft's scores with the noise by which a coupled request chooses its token: what the target is likely to choose."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.accept import Seats
from specstream.kernels.philox import TOKEN, uniform_tile

TILE = 1024
"""Tokens of the vocabulary that a program looks at."""


def noisy_scores(seats: Seats, scores: Tensor, step: Tensor) -> Tensor:
    """float64 [seats, vocab]: scores as `propose` compares them when candidates are coupled.

    Args:
        scores: float32 [seats, vocab], the draft's processed logits.
        step: int64 [1], the candidate's index.
    """
    count, vocab = scores.shape
    out = torch.empty(count, vocab, dtype=torch.float64, device=scores.device)
    given = seats.positions, seats.seeds, seats.do_sample, step
    _noise_kernel[(triton.cdiv(vocab, TILE), count)](scores, scores.stride(0), vocab, *given, out, TILE=TILE)
    return out


@triton.jit
def _noise_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    do_sample: tl.tensor,
    step: tl.tensor,
    out: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    start, seat = tl.program_id(0) * TILE, tl.program_id(1)
    offsets = start + tl.arange(0, TILE)
    inside = offsets < vocab
    values = tl.load(scores + seat.to(tl.int64) * row_stride + offsets, mask=inside, other=0.0).to(tl.float64)
    if tl.load(do_sample + seat):
        uniform = uniform_tile(tl.load(seeds + seat), TOKEN, tl.load(positions + seat) + tl.load(step), start, TILE)
        values -= tl.log(-tl.log(tl.maximum(uniform, 2.2250738585072014e-308)))
    tl.store(out + seat.to(tl.int64) * vocab + offsets, values, mask=inside)
