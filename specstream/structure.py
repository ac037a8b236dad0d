"""When two pieces are one computation on other weights, and that computation with the weights as inputs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from specstream.graph import Piece
from specstream.nodes import example


@dataclass(frozen=True)
class Structure:
    """A piece as a function of its inputs and its weights."""

    key: Hashable
    """Equal for two pieces whose graphs differ in nothing but names and the values of weights."""
    weights: tuple[Tensor, ...]
    """The parameters and buffers that the piece reads, in the order in which it first reads them."""
    weight_names: tuple[str, ...]
    """Their names in the piece's module."""


def structure_of(piece: Piece) -> Structure:
    """What the piece computes, apart from what names and weights it has."""
    weights: dict[str, Tensor] = {}
    numbers: dict[fx.Node, str] = {}
    key: list[Hashable] = []
    for node in piece.module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        target: Any = node.target
        if node.op == "placeholder":
            key.append(("input", layout_text(example(node))))
        elif node.op == "get_attr":
            value = attrgetter(target)(piece.module)
            if isinstance(value, Tensor):
                weights.setdefault(target, value.detach())
                key.append(("weight", list(weights).index(target), layout_text(value)))
            else:
                key.append(("constant", id(value)))
        else:
            # As text, for 1, 1.0 and True are equal, but are not the same constant.
            arguments = repr(fx.map_arg((node.args, node.kwargs), numbers.__getitem__))
            key.append((node.op, target, arguments))
    return Structure(tuple(key), tuple(weights.values()), tuple(weights))


def layout_text(tensor: Tensor) -> str:
    """What compiled code relies on: dtype, device, sizes and strides."""
    return f"{tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.stride()}"


def with_weight_inputs(piece: Piece, structure: Structure) -> fx.GraphModule:
    """The piece's graph as a function of its inputs, then its weights; it holds no tensor itself."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in piece.module.graph.find_nodes(op="placeholder"):
        values[node] = graph.placeholder(node.name)
    weights = {name: graph.placeholder(f"weight_{index}") for index, name in enumerate(structure.weight_names)}
    for node in piece.module.graph.nodes:
        if node.op == "get_attr" and node.target in weights:
            values[node] = weights[node.target]
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__))
        elif node not in values:
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = {}  # examples of another fake mode would mislead the compiler
    return fx.GraphModule(piece.module, graph, class_name="SharedPiece")
