"""The ops of the rewritten graphs: `specstream::stream_verify`, an attention's place, `linears` and `swiglu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specstream.kernels.attention import HALF

# define/impl rather than torch.library.custom_op: 4 us a call, not 14. The library lives as long as its ops.
_LIBRARY = torch.library.Library("specstream", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "stream_verify(Tensor q, Tensor k, Tensor v, int layer, float scale) -> Tensor"
)
_LIBRARY.define("linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]")  # type: ignore[no-untyped-call]
_LIBRARY.define("swiglu(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")  # type: ignore[no-untyped-call]


def token_major(like: Tensor) -> Tensor:
    """An uninitialised [1, heads, rows, head_dim] that lies in memory as [1, rows, heads, head_dim].

    So a model's reshape of an attention's output to [1, rows, hidden] is a view.
    """
    one, heads, rows, head_dim = like.shape
    return like.new_empty(one, rows, heads, head_dim).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    """Causal attention of the given rows alone, with no history: the graph by itself is the model itself.

    Args:
        q: [1, Hq, N, D].
        k: [1, Hkv, N, D], Hkv dividing Hq.
        v: [1, Hkv, N, D].
        layer: index of the attention in execution order; here without effect.
        scale: factor on q @ k^T.

    Returns:
        [1, Hq, N, D], `token_major`, in q's dtype.
    """
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return token_major(q).copy_(out)


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    return token_major(q)


_LIBRARY.impl("stream_verify", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specstream::stream_verify", _attend_fake, lib=_LIBRARY)

stream_verify = torch.ops.specstream.stream_verify.default


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def _linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """`F.linear(x, weight, bias)` for each weight; on a CUDA device, if there are few rows, in one launch.

    Args:
        x: [..., inputs].
        weights: [outputs, inputs] each, in x's dtype.
        biases: [outputs] for each weight, or none at all.

    Returns:
        [..., outputs] for each weight, contiguous.
    """
    rows = x.numel() // x.shape[-1]
    if _has_kernels(x):
        from specstream.kernels.triton_linear import few_row_linears, most_rows

        if 0 < rows <= most_rows(len(weights)):
            outs = few_row_linears(x.reshape(rows, x.shape[-1]).contiguous(), weights, biases)
            return [out.view(*x.shape[:-1], -1) for out in outs]
    operands = zip(weights, biases, strict=True) if biases else ((weight,) for weight in weights)
    return [F.linear(x, *of_one).contiguous() for of_one in operands]


def _linears_fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


_LIBRARY.impl("linears", _linears, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specstream::linears", _linears_fake, lib=_LIBRARY)

linears = torch.ops.specstream.linears.default


def _swiglu(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """`F.silu(gate) * up` of two linear maps; on a CUDA device, if there are few rows, all in one launch.

    Args:
        x: [..., inputs].
        weights: gate and up, [outputs, inputs] each, in x's dtype; or both as one, gate first.
        biases: for each weight its own, or none at all.

    Returns:
        [..., outputs], contiguous.
    """
    rows = x.numel() // x.shape[-1]
    if not _has_kernels(x):
        gate, up = _gate_and_up(_linears(x, weights, biases), -1)
        return F.silu(gate) * up

    from specstream.kernels.triton_linear import most_rows
    from specstream.kernels.triton_swiglu import few_row_swiglu, silu_and_mul

    if 0 < rows <= most_rows(2):
        x_rows = x.reshape(rows, x.shape[-1]).contiguous()
        out = few_row_swiglu(x_rows, _gate_and_up(weights, 0), _gate_and_up(biases, 0))
        return out.view(*x.shape[:-1], -1)
    return silu_and_mul(*_gate_and_up(_linears(x, weights, biases), -1))


def _gate_and_up(parts: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """Both, or none: of one tensor its halves."""
    return parts[0].chunk(2, dim) if len(parts) == 1 else parts


def _swiglu_fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights) // 2)


_LIBRARY.impl("swiglu", _swiglu, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specstream::swiglu", _swiglu_fake, lib=_LIBRARY)

swiglu = torch.ops.specstream.swiglu.default
