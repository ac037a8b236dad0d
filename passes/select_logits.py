"""Pass `select_logits`: the output head sees only the rows whose logits are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from specstream.graph import ModelGraph
from specstream.nodes import example, is_symbolic, op_name, refresh_example

_ROW_WISE = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "contiguous"}
    | {"mul", "truediv", "div", "add", "sub", "tanh", "clamp"}
)
"""Ops that may stand between the head and the output: each computes a row from that row alone."""


@dataclass(frozen=True)
class SelectLogits:
    """Adds the placeholder `logit_rows`, int64 [R], and selects those rows before the output head.

    The head is the last linear map, from which only row-wise ops lead to the output. If there is none, the
    rows are selected from the logits: as correct, only not cheaper.
    """

    name: str = "select_logits"

    def run(self, ir: ModelGraph) -> ModelGraph:
        graph = ir.gm.graph
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            rows = graph.placeholder("logit_rows")
        output = graph.output_node()
        logits = output.args[0]
        assert isinstance(logits, fx.Node)
        head = _head(logits)
        source = head.args[0] if head is not None else logits
        assert isinstance(source, fx.Node)
        rows.meta["example_value"] = _symbolic_rows(source)
        with graph.inserting_before(head if head is not None else output):
            selected = graph.call_function(torch.index_select, (source, 1, rows))
        refresh_example(selected, source)
        if head is None:
            output.args = (selected,)
        else:
            selected.meta["nn_module_stack"] = head.meta.get("nn_module_stack", {})
            head.replace_input_with(source, selected)
            _refresh_until(head, logits)
        ir.gm.recompile()
        return ir

    def check(self, ir: ModelGraph) -> None:
        rows = ir.gm.graph.find_nodes(op="placeholder")[-1]
        logits = ir.gm.graph.output_node().args[0]
        if rows.target != "logit_rows" or len(rows.users) != 1:
            raise ValueError("logit_rows is not read exactly once")
        if example(logits).shape[1] != example(rows).shape[0]:
            raise ValueError(f"the logits have {example(logits).shape[1]} rows, not {example(rows).shape[0]}")


def _head(logits: fx.Node) -> fx.Node | None:
    """The linear map [1, N, hidden] -> [1, N, vocab] that only row-wise ops separate from the output."""
    node = logits
    while len(node.users) == 1:  # another reader would want all rows
        if _is_linear(node):
            return node
        by_token = [arg for arg in node.all_input_nodes if _has_tokens(arg)]
        if op_name(node) not in _ROW_WISE or len(by_token) != 1 or node.args[0] is not by_token[0]:
            return None
        node = by_token[0]
    return None


def _is_linear(node: fx.Node) -> bool:
    if node.target is F.linear:
        return isinstance(node.args[0], fx.Node) and not _has_tokens(node.args[1])
    if op_name(node) == "matmul" and len(node.args) == 2:
        left, right = (example(arg) for arg in node.args)
        return left.dim() == 3 and right.dim() == 2 and not _has_tokens(node.args[1])
    return False


def _has_tokens(node: object) -> bool:
    """True if a node's value depends on the number of tokens by its shape."""
    value = example(node)
    return is_symbolic(value) or any(map(is_symbolic, getattr(value, "shape", ())))


def _symbolic_rows(like: fx.Node) -> torch.Tensor:
    """A fake int64 [R] with R symbolic, in the fake mode of `like`."""
    value = example(like)
    fake: torch.Tensor = value.fake_mode.from_tensor(
        torch.arange(5, device=value.device),
        source=ConstantSource("logit_rows"),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
    )
    return fake


def _refresh_until(node: fx.Node, last: fx.Node) -> None:
    """Recomputes example values along the chain of single readers from `node` to `last`."""
    refresh_example(node, node)
    while node is not last:
        (node,) = node.users
        refresh_example(node, node)
