"""The one op of the rewritten graphs: `specstream::stream_verify`, the place of an attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# define/impl rather than torch.library.custom_op: 4 us a call, not 14. The library lives as long as its op.
_LIBRARY = torch.library.Library("specstream", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA = "stream_verify(Tensor q, Tensor k, Tensor v, int layer, float scale) -> Tensor"
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    """Causal attention of the given rows alone, with no history: the graph by itself is the model itself.

    Args:
        q: [1, Hq, N, D].
        k: [1, Hkv, N, D], Hkv dividing Hq.
        v: [1, Hkv, N, D].
        layer: index of the attention in execution order; here without effect.
        scale: factor on q @ k^T.

    Returns:
        [1, Hq, N, D], contiguous, in q's dtype.
    """
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.contiguous()


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    return q.new_empty(q.shape)


_LIBRARY.impl("stream_verify", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specstream::stream_verify", _attend_fake, lib=_LIBRARY)

stream_verify = torch.ops.specstream.stream_verify.default
