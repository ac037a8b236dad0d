"""Pass `group_linears`: linear maps of one input, such as q, k and v, become one call of `specstream::linears`."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from specstream.graph import PartitionedModel, Piece
from specstream.nodes import copied
from specstream.ops import linears


@dataclass(frozen=True)
class GroupLinears:
    """PartitionedModel -> PartitionedModel whose linear maps, also those that stand alone, are `linears` calls.

    On a CUDA device such a call reads all its weights in one launch if there are few rows; the weights stay where and
    what they are. Runs before `compile_pieces`: to Inductor it is one opaque call.
    """

    name: str = "group_linears"

    def run(self, ir: PartitionedModel) -> PartitionedModel:
        return dataclasses.replace(ir, pieces=tuple(map(self._grouped, ir.pieces)))

    def check(self, ir: PartitionedModel) -> None:
        for index, piece in enumerate(ir.pieces):
            if left := _groups(piece.module):
                raise ValueError(f"piece {index} computes {', '.join(x.node.name for x in left[0])} by itself")

    def _grouped(self, piece: Piece) -> Piece:
        if not _groups(piece.module):
            return piece
        module = copied(piece.module)
        for group in _groups(module):
            _replace(module.graph, group)
        module.graph.eliminate_dead_code()
        module.recompile()
        return dataclasses.replace(piece, module=module)


@dataclass(frozen=True)
class LinearCall:
    """A call of F.linear on a weight, and perhaps a bias, of the model's."""

    node: fx.Node
    input: fx.Node
    operands: tuple[str, ...]
    """Names of the weight [out, in], and of the bias [out] if it has one."""

    @property
    def joins(self) -> Any:
        """Equal for calls that can be joined."""
        return self.input, len(self.operands)

    @staticmethod
    def of(node: fx.Node, module: fx.GraphModule) -> LinearCall | None:
        """None if it is anything else."""
        if node.target is not F.linear:
            return None
        given: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        operands = [given["weight"]] + ([given["bias"]] if given.get("bias") is not None else [])
        if not isinstance(given.get("input"), fx.Node) or any(operand.op != "get_attr" for operand in operands):
            return None
        weight: Tensor = attrgetter(operands[0].target)(module)
        one_by_one = weight.dim() == 2 and weight.stride(1) == 1
        names = tuple(operand.target for operand in operands)
        return LinearCall(node, given["input"], names) if one_by_one else None


def _groups(module: fx.GraphModule) -> list[list[LinearCall]]:
    groups: dict[Any, list[LinearCall]] = {}
    for node in module.graph.find_nodes(op="call_function", target=F.linear):
        linear = LinearCall.of(node, module)
        if linear is not None:
            groups.setdefault(linear.joins, []).append(linear)
    return list(groups.values())


def _replace(graph: fx.Graph, group: list[LinearCall]) -> None:
    """Puts one call of `linears` in the place of several F.linear."""
    with graph.inserting_before(group[0].node):
        weights, *biases = ([graph.get_attr(name) for name in names] for names in zip(*_names(group), strict=True))
        call = graph.call_function(linears, (group[0].input, weights, biases[0] if biases else []))
        parts = [graph.call_function(operator.getitem, (call, index)) for index in range(len(group))]
    for linear, part in zip(group, parts, strict=True):
        linear.node.replace_all_uses_with(part)
        graph.erase_node(linear.node)


def _names(group: list[LinearCall]) -> list[tuple[str, ...]]:
    return [linear.operands for linear in group]
