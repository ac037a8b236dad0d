"""Pass `partition`: the graph is cut at its attentions into pieces that hand each other named values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from specstream.graph import AttentionSite, ModelGraph, PartitionedModel, Piece
from specstream.nodes import example, is_symbolic, known_equal
from specstream.ops import stream_verify


@dataclass(frozen=True)
class Partition:
    """ModelGraph -> PartitionedModel.

    Parameters go into each piece that reads them, and sizes are read off a tensor that the piece has anyway,
    so that only tensors pass between pieces. A value is freed after the last piece that reads it.
    """

    name: str = "partition"

    def run(self, ir: ModelGraph) -> PartitionedModel:
        return _Cut(ir).partitioned()

    def check(self, ir: PartitionedModel) -> None:
        if len(ir.sites) != ir.spec.num_layers:
            raise ValueError(f"{len(ir.sites)} sites for {ir.spec.num_layers} attentions")
        for piece in ir.pieces:
            if any(node.target is stream_verify for node in piece.module.graph.nodes):
                raise ValueError("a piece holds an attention")
            symbols = [name for name, node in _placeholders(piece) if is_symbolic(example(node))]
            if symbols:
                raise ValueError(f"a piece takes the sizes {symbols}")


def _placeholders(piece: Piece) -> Iterable[tuple[str, fx.Node]]:
    return zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)


@dataclass
class _Draft:
    """A piece while it is being cut."""

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: dict[str, fx.Node] = field(default_factory=dict)


class _Cut:
    """One run of the pass: where each node lives, and what each piece reads and hands on."""

    def __init__(self, ir: ModelGraph) -> None:
        self.ir = ir
        nodes = list(ir.gm.graph.nodes)
        self.attentions = [node for node in nodes if node.target is stream_verify]
        self.graph_inputs = [node for node in nodes if node.op == "placeholder"]
        (self.logits,) = ir.gm.graph.output_node().all_input_nodes
        self.drafts = [_Draft() for _ in range(len(self.attentions) + 1)]
        self.home: dict[fx.Node, int] = {}
        index = 0
        for node in nodes:
            if node in self.attentions:
                index += 1
            elif node.op.startswith("call") and not is_symbolic(example(node)):
                self.home[node] = index
                self.drafts[index].nodes.append(node)

    def partitioned(self) -> PartitionedModel:
        sites = tuple(self._site(layer, node) for layer, node in enumerate(self.attentions))
        for index, draft in enumerate(self.drafts):
            for node in draft.nodes:
                for operand in node.all_input_nodes:
                    self._read(operand, index)
        self._read(self.logits, len(self.drafts) - 1)
        last_read = {node: index for index, draft in enumerate(self.drafts) for node in draft.inputs}
        pieces = []
        for index, draft in enumerate(self.drafts):
            frees = [node.name for node in draft.inputs if last_read[node] == index]
            if index == 0:
                frees += [node.name for node in self.graph_inputs if node not in last_read]
            inputs = tuple(node.name for node in draft.inputs)
            pieces.append(Piece(self._module(index), inputs, tuple(draft.outputs), tuple(frees)))
        names = tuple(node.name for node in self.graph_inputs)
        return PartitionedModel(tuple(pieces), sites, names, self.logits.name, self.ir.spec)

    def _site(self, layer: int, node: fx.Node) -> AttentionSite:
        """An attention consumes its operands: one that others read too is handed on under a second name."""
        names = []
        for role, operand in zip("qkv", node.args[:3], strict=True):
            assert isinstance(operand, fx.Node)
            shared = operand not in self.home or len(operand.users) > 1 or node.args[:3].count(operand) > 1
            name = f"{operand.name}_{role}{layer}" if shared else operand.name
            self.drafts[self.home.get(operand, layer)].outputs[name] = operand
            if operand not in self.home:
                self._read(operand, layer)
            names.append(name)
        query, key, value = names
        return AttentionSite(self.ir.spec.attentions[layer], query, key, value, node.name)

    def _read(self, node: fx.Node, index: int) -> None:
        """Notes that piece `index` needs the value of `node`."""
        if node.op == "get_attr" or self.home.get(node) == index:
            if node is self.logits:
                self.drafts[index].outputs[node.name] = node
        elif is_symbolic(example(node)):
            for operand in [self._sized(index)] if self._is_tokens(node) else node.all_input_nodes:
                self._read(operand, index)
        elif node not in self.drafts[index].inputs:
            self.drafts[index].inputs.append(node)
            if node in self.home:
                self.drafts[self.home[node]].outputs[node.name] = node

    def _is_tokens(self, node: fx.Node) -> bool:
        return known_equal(example(node), example(self.graph_inputs[0]).shape[1])

    def _sized(self, index: int) -> fx.Node:
        """A tensor that piece `index` has anyway, and whose size tells N."""
        tensors: list[fx.Node] = [self.graph_inputs[0], *self.attentions]
        return tensors[index]

    def _module(self, index: int) -> fx.GraphModule:
        draft = self.drafts[index]
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in draft.inputs}
        for node, placeholder in values.items():
            placeholder.meta = dict(node.meta)

        def value(node: fx.Node) -> fx.Node:
            if node not in values and is_symbolic(example(node)) and self._is_tokens(node):
                size = (values[self._sized(index)], 2 if index else 1)
                values[node] = graph.call_function(torch.ops.aten.sym_size.int, size)
                values[node].meta = dict(node.meta)
            elif node not in values:
                values[node] = graph.node_copy(node, value)
            return values[node]

        for node in draft.nodes:
            value(node)
        graph.output(tuple(values[node] for node in draft.outputs.values()))
        return fx.GraphModule(self.ir.gm, graph, class_name=f"Piece{index}")
