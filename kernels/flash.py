"""Attention of many rows to keys that lie one after the other: on a CUDA device by cuDNN or torch's flash kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from specstream.kernels.attention import HALF, AttentionState, pack_query, partial_attention
from specstream.kernels.cudnn_attention import cudnn_attention, fits

SLICE_ROWS = 256
"""Rows at a time where there is no flash kernel: scores or a mask are spelt out."""


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> AttentionState:
    """Attention of rows over keys that all of them see, or causally over keys of which the last are the rows' own.

    On a CUDA device float16 and bfloat16 use cuDNN for many rows, else torch's flash kernel; float32, which they lack,
    and other devices take a few rows at a time, so that of causal scores only half are computed.

    Args:
        query: [num_heads, rows, head_dim].
        key, value: [kv_heads, keys, head_dim]; with `causal`, row i of n sees all but the last n - 1 - i.

    Returns:
        out [num_heads, rows, head_dim], a library's in the query's dtype, and lse [num_heads, rows]; all else in the
        accumulation dtype.
    """
    if fits(query, key, causal):
        return cudnn_attention(query, key, value, scale, causal)
    if query.dtype in HALF and query.device.type == "cuda":
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(query[None], key[None], value[None], 0.0, causal, False, scale=scale)
        return AttentionState(out[0], lse[0])
    heads, rows, dim = query.shape
    kv_heads, keys, _ = key.shape
    outs, lses = [], []
    for start in range(0, rows, SLICE_ROWS):
        part = query[:, start : start + SLICE_ROWS]
        count = part.shape[1]
        seen, mask = keys, None
        if causal:
            seen = keys - rows + start + count
            own = torch.arange(seen - count, seen, device=query.device)
            visible = torch.arange(seen, device=query.device) <= own[:, None]
            mask = visible.repeat(heads // kv_heads, 1)[:, None]
        packed = pack_query(part, kv_heads)
        state = partial_attention(packed, key[None, :, :seen], value[None, :, :seen], scale, mask)
        outs.append(state.out.reshape(heads, count, dim))
        lses.append(state.lse.reshape(heads, count))
    if len(outs) == 1:
        return AttentionState(outs[0], lses[0])
    return AttentionState(torch.cat(outs, 1), torch.cat(lses, 1))
