"""Attention of many rows on a CUDA device by torch's flash kernel, which returns the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from specstream.kernels.attention import AttentionState, reference_attention

HALF = (torch.float16, torch.bfloat16)
SLICE_ROWS = 256
"""Rows at a time where scores are spelt out."""


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> AttentionState:
    """Attention of rows over keys that all of them see, or causally over keys of which the last are the rows' own.

    float16 and bfloat16 use torch's flash kernel; float32, which it lacks, is spelt out, a few rows at a time.

    Args:
        query: [num_heads, rows, head_dim].
        key, value: [kv_heads, keys, head_dim]; with `causal`, row i of n sees all but the last n - 1 - i.

    Returns:
        out [num_heads, rows, head_dim] in the query's dtype; lse [num_heads, rows] in float32, of float64 in float64.
    """
    if query.dtype in HALF:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(query[None], key[None], value[None], 0.0, causal, False, scale=scale)
        return AttentionState(out[0], lse[0])
    heads, rows, dim = query.shape
    kv_heads, keys, _ = key.shape
    group = heads // kv_heads
    outs, lses = [], []
    for start in range(0, rows, SLICE_ROWS):
        part = query[:, start : start + SLICE_ROWS]
        count = part.shape[1]
        packed = part.reshape(kv_heads, group * count, dim)
        mask = None
        if causal:
            place = torch.arange(keys, device=query.device)
            own = torch.arange(keys - rows + start, keys - rows + start + count, device=query.device)
            mask = (place <= own[:, None]).repeat(group, 1)[:, None]
        state = reference_attention(packed, key[None], value[None], scale, mask)
        outs.append(state.out.reshape(heads, count, dim))
        lses.append(state.lse.reshape(heads, count))
    return AttentionState(torch.cat(outs, 1), torch.cat(lses, 1))
