"""Attention of many rows by cuDNN, in the shapes that it has plans for: about twice as fast as torch's flash kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specstream.kernels.attention import HALF, AttentionState

PLANNED = 1024
"""Rows and keys come in multiples of it. cuDNN plans for each shape apart, which took it 40 ms on an H200."""
MAX_HEAD_DIM = 128

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], AttentionState]
"""Of query, key, value, scale and whether it is causal, as `in_planned_shapes` takes them."""


def fits(query: Tensor, key: Tensor, causal: bool) -> bool:
    """Whether cuDNN had better be asked: half precision on a device, and most of a planned shape would be used."""
    rows, keys, dim = query.shape[1], key.shape[1], query.shape[2]
    cudnn: Any = torch.backends.cudnn
    return (
        query.is_cuda
        and query.dtype in HALF
        and cudnn.is_available()
        and dim <= MAX_HEAD_DIM
        and dim % 8 == 0
        and rows >= PLANNED
        and (rows == keys if causal else keys % PLANNED == 0)
    )


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> AttentionState:
    """As `specstream.kernels.flash.flash_attention`, for what `fits`."""
    return in_planned_shapes(_cudnn, query, key, value, scale, causal)


def in_planned_shapes(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> AttentionState:
    """What `attend` makes of the rows, to which others are added that no one looks at.

    Args:
        query: [num_heads, rows, head_dim].
        key, value: [kv_heads, keys, head_dim]; as many keys as rows with `causal`, else a multiple of `PLANNED`.
    """
    rows = query.shape[1]
    query = _padded(query)
    if causal:  # no row sees a key after its own
        key, value = _padded(key), _padded(value)
    state = attend(query, key, value, scale, causal)
    return AttentionState(state.out[:, :rows], state.lse[:, :rows])


def _padded(rows: Tensor) -> Tensor:
    """Zeros after the rows [heads, rows, dim], if they are no multiple: what is masked still must not be NaN."""
    heads, count, dim = rows.shape
    whole = -(-count // PLANNED) * PLANNED
    if whole == count:
        return rows
    padded = rows.new_zeros(whole, heads, dim).transpose(0, 1)  # in the order of a model's queries
    padded[:, :count] = rows
    return padded


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> AttentionState:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(query[None], key[None], value[None], None, True, 0.0, causal, False, scale=scale)
    return AttentionState(out[0], lse[0].view(out.shape[1:3]))
