"""Partial attention over a set of KV chunks, and the merge of partial results.

A partial result is a *state*: the normalised output over the keys seen so far and the log-sum-exp of their
scores. Two states over disjoint keys merge into the state over their union (online softmax, Milakov and
Gimelshein 2018), so exact attention can be computed over chunks in any order. Logarithms are natural.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""What the libraries and the kernels of few rows compute in."""


@dataclass
class AttentionState:
    """Attention over the keys seen so far.

    out: [kv_heads, rows, head_dim], normalised; lse: [kv_heads, rows], -inf for rows that saw no key.
    Both in the accumulation dtype: float64 for float64 models, else float32.
    """

    out: Tensor
    lse: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax and merges are done for KV of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> AttentionState:
    """Attention of packed query rows over a run of chunks, by torch's own CPU kernel, which returns the log-sum-exp.

    On other devices it is spelt out.

    Args:
        query: [kv_heads, rows, head_dim]; rows packs the query heads of a KV head and all queries of a request.
        key, value: [chunks, kv_heads, tokens, head_dim], any strides.
        scale: factor on the scores.
        mask: bool, broadcastable to [rows, chunks, tokens]; True where the row may see the key.
    """
    if query.device.type != "cpu":
        return reference_attention(query, key, value, scale, mask)
    dtype = accumulation_dtype(query.dtype)
    chunks, heads, tokens, dim = key.shape
    rows = query.shape[1]
    keys, values = (x.to(dtype).transpose(0, 1).reshape(1, heads, chunks * tokens, dim) for x in (key, value))
    bias = None
    if mask is not None:
        mask = mask.expand(rows, chunks, tokens).reshape(1, 1, rows, chunks * tokens)
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(query.to(dtype).unsqueeze(0), keys, values, attn_mask=bias, scale=scale)
    if mask is not None:  # the kernel gives 0 for a row that sees no key
        lse = lse.masked_fill(~mask.any(-1), float("-inf"))
    return AttentionState(out[0], lse[0])


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> AttentionState:
    """`partial_attention` spelt out, on any device: what it and other kernels are tested against."""
    dtype = accumulation_dtype(query.dtype)
    chunks, _, tokens, _ = key.shape
    q = (query.to(dtype) * scale).unsqueeze(0)
    scores = torch.matmul(q, key.to(dtype).transpose(-1, -2))  # [chunks, heads, rows, tokens]
    if mask is not None:
        visible = mask.expand(query.shape[1], chunks, tokens).permute(1, 0, 2).unsqueeze(1)
        scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.amax(dim=(0, 3))  # [heads, rows]
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top[None, :, :, None])
    total = weights.sum(dim=(0, 3))
    out = torch.matmul(weights, value.to(dtype)).sum(dim=0)
    out = out / total.clamp_min(torch.finfo(dtype).tiny).unsqueeze(-1)
    return AttentionState(out, top + torch.log(total))


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the keys of both. Two empty states give (0, -inf)."""
    top = torch.maximum(a.lse, b.lse)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = weight_a + weight_b
    norm = total.clamp_min(torch.finfo(total.dtype).tiny)
    out = a.out * (weight_a / norm).unsqueeze(-1) + b.out * (weight_b / norm).unsqueeze(-1)
    return AttentionState(out, top + torch.log(total))


def pack_query(query: Tensor, num_kv_heads: int) -> Tensor:
    """[num_heads, rows, head_dim] -> [num_kv_heads, group * rows, head_dim], the heads of a group together."""
    heads, rows, dim = query.shape
    return query.reshape(num_kv_heads, heads // num_kv_heads * rows, dim)


def unpack_output(out: Tensor, num_heads: int) -> Tensor:
    """[num_kv_heads, group * rows, head_dim] -> [num_heads, rows, head_dim]; the inverse of `pack_query`."""
    kv_heads, packed, dim = out.shape
    return out.reshape(num_heads, packed * kv_heads // num_heads, dim)
