"""Proving that a mask in a graph is causal, by evaluating the part of the graph that makes it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from specstream.errors import UnsupportedModel
from specstream.nodes import writes

_WAY_OUT = "Use a model with full causal attention."
_SIZES = (2, 3, 17, 64, 1000, 4096)
"""Tokens that masks are evaluated for. What a mask made from row numbers hides only beyond the largest goes
unnoticed; masks of transformers models are not made here but asked for their rule (models/trial.py)."""

_SMALL = 1000


@dataclass(frozen=True)
class MaskProof:
    """Proves masks causal.

    Args:
        vocab_size: for the token ids that a mask may be made from.
        device: where the graph runs.
        most_tokens: tokens a mask must be right for; None for no limit.
    """

    vocab_size: int
    device: torch.device
    most_tokens: int | None

    def prove(self, gm: fx.GraphModule, mask: fx.Node, writers: list[fx.Node], module: str) -> None:
        """Raises UnsupportedModel, naming `module`, unless `mask` hides what is later and nothing else.

        Args:
            gm: the graph, of input_ids and position_ids.
            mask: bool (true where seen) or float (added to scores), broadcastable to [1, H, N, N].
            writers: nodes that write in place before the mask is read (`writers_before`).
            module: dotted name of the module whose attention reads the mask.
        """
        compute = _extract(gm, mask, writers)
        reads_positions = any(node.users for node in compute.graph.find_nodes(op="placeholder")[1:])
        limit = max(self.most_tokens or _SIZES[-1], 2)
        for size in sorted({min(size, limit) for size in _SIZES}):
            ids = torch.arange(size, device=self.device)[None] % self.vocab_size
            positions = torch.arange(size, device=self.device)[None]
            _check(compute, ids, positions, module)
            if size <= _SMALL:  # the other end of the vocabulary, where padding may be
                _check(compute, self.vocab_size - 1 - ids, positions, module)
            if reads_positions and size <= _SMALL:  # far apart they show a window in a small mask
                _check(compute, ids, positions * max(limit // size, 1), module)


def writers_before(node: fx.Node) -> list[fx.Node]:
    """Nodes that write in place, up to `node`."""
    before = itertools.takewhile(lambda other: other is not node, node.graph.nodes)
    return [other for other in before if other.op.startswith("call") and writes(other)]


def _extract(gm: fx.GraphModule, node: fx.Node, writers: list[fx.Node]) -> fx.GraphModule:
    """The part of the graph that computes `node`, as a module of (input_ids, position_ids).

    Whatever writes in place is part of it, as it may write to the mask or to what the mask is made from.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    todo = [node, *writers]
    needed = set(todo)
    while todo:
        fresh = set(todo.pop().all_input_nodes) - needed
        needed |= fresh
        todo += fresh
    for old in gm.graph.nodes:
        if old in needed or old.op == "placeholder":
            values[old] = graph.node_copy(old, values.__getitem__)
    graph.output(values[node])
    return fx.GraphModule(gm, graph)


def _check(compute: fx.GraphModule, tokens: Tensor, positions: Tensor, module: str) -> None:
    size = tokens.shape[1]
    try:
        with torch.no_grad():
            hidden, bias = _hidden_and_bias(compute(tokens, positions))
            hidden = hidden.expand(1, hidden.shape[1] if hidden.dim() > 3 else 1, size, size)
    except Exception as error:
        reason = f"its mask cannot be made for {size} tokens ({type(error).__name__}: {error})"
        raise UnsupportedModel(module, reason, f"{_WAY_OUT[:-1]}, or a smaller max_model_len.") from error
    if bias:
        raise UnsupportedModel(module, "its mask adds numbers to the scores (a bias, such as ALiBi)", _WAY_OUT)
    wrong = (hidden != torch.ones(size, size, dtype=torch.bool, device=hidden.device).triu(1)).nonzero()
    if len(wrong):
        query, kv = wrong[0, -2:].tolist()
        verb = "does not see" if kv <= query else "sees"
        reason = f"its mask is not causal: of {size} tokens, token {query} {verb} token {kv}"
        raise UnsupportedModel(module, reason, _WAY_OUT)


def _hidden_and_bias(mask: Tensor) -> tuple[Tensor, bool]:
    """Where a mask hides, and whether it adds anything but zero where it does not."""
    if mask.dtype == torch.bool:
        return ~mask, False
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return hidden, bool(mask.masked_fill(hidden, 0).any())
