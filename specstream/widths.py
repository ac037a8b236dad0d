"""How wide a model is, by its modules and weights: what the work memory of a row depends on."""

from __future__ import annotations

from typing import TypedDict

from torch import nn


class Widths(TypedDict):
    """Fields of `ModelSpec`."""

    hidden_size: int
    intermediate_size: int


def widths_of(model: nn.Module) -> Widths:
    """Values of a row between layers, as its embedding has, and the most that a weight takes, as an MLP's last does."""
    taken = [weight.shape[-1] for weight in model.parameters() if weight.dim() >= 2]
    embedded = [module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)]
    widest = max(taken, default=0)
    return {"hidden_size": embedded[0] if embedded else widest, "intermediate_size": widest}
