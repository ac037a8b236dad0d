"""Pass `fuse_projections`: linear maps of one input, such as q, k and v, become one on their joined weights."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from specstream.graph import PartitionedModel, Piece


@dataclass(frozen=True)
class FuseProjections:
    """PartitionedModel -> PartitionedModel with fewer, larger matrix products.

    Each column of a result is the same sum as before, up to the order in which a product of another size adds. The
    joined weights are new tensors, and the model keeps its own beside them: see `extra_bytes`. Runs before
    `compile_pieces`; Inductor joins products by itself only where weights are constants.
    """

    most_bytes: int = 64 << 20
    """Joined weights may have; larger ones keep the memory busy by themselves and stay apart."""
    name: str = "fuse_projections"

    def run(self, ir: PartitionedModel) -> PartitionedModel:
        pieces = tuple(self._fused(piece) for piece in ir.pieces)
        return dataclasses.replace(ir, pieces=pieces)

    def check(self, ir: PartitionedModel) -> None:
        for index, piece in enumerate(ir.pieces):
            if left := self._groups(piece):
                raise ValueError(f"piece {index} computes {', '.join(x.node.name for x in left[0])} apart")

    def extra_bytes(self, ir: PartitionedModel) -> int:
        """What the joined weights of a model that has not been through the pass would take."""
        groups = (group for piece in ir.pieces for group in self._groups(piece))
        return sum(tensor.nbytes for group in groups for node in group for tensor in node.tensors)

    def _groups(self, piece: Piece) -> list[list[_Linear]]:
        groups: dict[Any, list[_Linear]] = {}
        for node in piece.module.graph.find_nodes(op="call_function", target=F.linear):
            linear = _Linear.of(node, piece.module)
            if linear is not None:
                groups.setdefault(linear.joins, []).append(linear)
        return [
            group
            for group in groups.values()
            if len(group) > 1 and sum(linear.tensors[0].nbytes for linear in group) <= self.most_bytes
        ]

    def _fused(self, piece: Piece) -> Piece:
        groups = self._groups(piece)
        if not groups:
            return piece
        graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(piece.module.graph, values))
        joined: dict[str, Tensor] = {}
        for number, group in enumerate(groups):
            names = [f"joined_{kind}_{number}" for kind in ("weight", "bias")][: len(group[0].tensors)]
            for name, tensors in zip(names, zip(*(linear.tensors for linear in group), strict=True), strict=True):
                joined[name] = torch.cat(tensors).detach()
            widths = [len(linear.tensors[0]) for linear in group]
            _replace(graph, [values[linear.node] for linear in group], names, widths)
        graph.eliminate_dead_code()
        read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        root: dict[str, Any] = {name: joined[name] if name in joined else _get(piece.module, name) for name in read}
        return dataclasses.replace(piece, module=fx.GraphModule(root, graph, type(piece.module).__name__))


@dataclass(frozen=True)
class _Linear:
    """A call of F.linear on a weight, and perhaps a bias, of the model's."""

    node: fx.Node
    tensors: tuple[Tensor, ...]
    """The weight [out, in], and the bias [out] if it has one."""

    @property
    def joins(self) -> Any:
        """Equal for calls that can be joined."""
        return self.node.args[0], tuple(tensor.dtype for tensor in self.tensors)

    @staticmethod
    def of(node: fx.Node, module: fx.GraphModule) -> _Linear | None:
        """None if it is of another form."""
        given: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        operands = [given["weight"]] + ([given["bias"]] if given.get("bias") is not None else [])
        if any(operand.op != "get_attr" for operand in operands):
            return None
        tensors = tuple(_get(module, operand.target) for operand in operands)
        return _Linear(node, tensors) if tensors[0].dim() == 2 else None


def _get(module: fx.GraphModule, name: str) -> Tensor:
    tensor: Tensor = attrgetter(name)(module)
    return tensor


def _replace(graph: fx.Graph, linears: list[fx.Node], names: list[str], widths: list[int]) -> None:
    """Puts one call on the joined tensors in the place of several, and a view of its result for each of them."""
    with graph.inserting_before(linears[0]):
        joined = graph.call_function(F.linear, (linears[0].args[0], *map(graph.get_attr, names)))
        views = graph.call_function(torch.split, (joined, widths), {"dim": -1})
        parts = [graph.call_function(operator.getitem, (views, index)) for index in range(len(widths))]
    for linear, part in zip(linears, parts, strict=True):
        linear.replace_all_uses_with(part)
        graph.erase_node(linear)
    for node in graph.find_nodes(op="call_method", target="view"):
        if not isinstance(node.args[1], torch.dtype):
            node.target = "reshape"  # the rows of a part do not follow each other in memory any more
