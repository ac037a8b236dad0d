"""The eager trial of a transformers model: what its attentions and masks are, before anything is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specstream.errors import UnsupportedModel

AttentionResult = tuple[Tensor, None]
"""[1, N, Hq, D], and no attention weights, as transformers expects them."""


@dataclass
class Trial:
    """An attention and a mask, in transformers' interfaces, that refuse all but plain causal attention.

    Args:
        names: dotted names of the model's modules by id.
        limit: positions that the attention must be causal for.
        plain: the attention to compute in the end.
    """

    names: dict[int, str]
    limit: int
    plain: Callable[..., AttentionResult]
    not_causal: str = ""
    """Why a mask that the model asked for is not causal; "" while all were."""
    calls: int = 0

    def mask(self, *args: object, mask_function: Callable[..., Any], **kwargs: object) -> Tensor | None:
        """In the place of the makers of masks: asks the rule itself, up to `limit`, and builds no mask."""
        reason = why_not_causal(mask_function, self.limit)
        if reason is None:
            return None
        self.not_causal = reason
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)  # a sign for those layers that are given it

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> AttentionResult:
        self.calls += 1
        reason, way_out = self._refusal(module, attention_mask, dropout, kwargs)
        if reason:
            raise UnsupportedModel(self.names.get(id(module), type(module).__name__), reason, way_out)
        return self.plain(module, query, key, value, attention_mask, scaling)

    def _refusal(
        self, module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
    ) -> tuple[str, str]:
        """Reason and way out, or two empty strings."""
        if mask is not None and self.not_causal and not _hides(kwargs, self.limit):
            return f"its mask is not causal: {self.not_causal}", "Use a model with full causal attention."
        return refused_arguments(module, self.limit, dropout, kwargs)


def _hides(kwargs: dict[str, Any], limit: int) -> bool:
    """Whether there is a sliding window that texts of so many tokens reach beyond."""
    window = kwargs.get("sliding_window")
    return window is not None and window < limit


def refused_arguments(module: nn.Module, limit: int, dropout: float, kwargs: dict[str, Any]) -> tuple[str, str]:
    """Why attention with these arguments is none that is supported, up to `limit` tokens, and the way out; or two empty
    strings."""
    if _hides(kwargs, limit):
        window = kwargs["sliding_window"]
        return (
            f"it attends to a sliding window of {window} tokens",
            f"Set max_model_len <= {window} (now {limit}), where the window hides nothing, or use a model without it.",
        )
    if kwargs.get("softcap") is not None:
        return f"it caps attention scores (softcap {kwargs['softcap']})", "Use a model without softcap."
    if kwargs.get("s_aux") is not None:
        return "its softmax has sinks (s_aux)", "Use a model without attention sinks."
    if dropout:
        return f"its attention drops out (p={dropout})", "Call model.eval() first."
    if kwargs.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
        return "its attention is not causal (is_causal=False)", "Use a decoder."
    for name, extra in kwargs.items():
        if isinstance(extra, Tensor) and name not in ("position_ids", "cache_position"):
            return (
                f"it gives its attention a tensor {name!r}, which plain attention does not take",
                "Use a model whose attention needs queries, keys and values only.",
            )
    return "", ""


def why_not_causal(mask_function: Callable[..., Any], limit: int) -> str | None:
    """Asks a transformers mask rule about pairs of positions below `limit`.

    Args:
        mask_function: (batch, head, query, kv), int64 scalars -> true if the query sees the kv.
        limit: positions to ask about; at least 3 are.

    Returns:
        None if the rule is causal and nothing more, else a pair for which it is not.
    """
    zero, limit = torch.tensor(0), max(limit, 3)
    for query in sorted({0, 1, limit // 2, limit - 2, limit - 1}):
        distances = {-2, -1, 0, query, *(1 << power for power in range(query.bit_length()))}
        for kv in sorted(query - distance for distance in distances if 0 <= query - distance < limit):
            seen = bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(kv)))
            if seen != (kv <= query):
                return f"position {query} {'sees' if seen else 'does not see'} position {kv}"
    return None
