"""Pass `fuse_swiglu`: silu(gate) * up of two linear maps of one input becomes one call of `specstream::swiglu`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from specstream.graph import PartitionedModel, Piece
from specstream.nodes import copied, example, known_equal, op_name
from specstream.ops import swiglu
from specstream.passes.group_linears import LinearCall


@dataclass(frozen=True)
class FuseSwiglu:
    """PartitionedModel -> PartitionedModel whose SwiGLUs, the two linear maps included, are `swiglu` calls.

    On a CUDA device such a call is one launch if there are few rows. Gate and up may be two weights, or one whose
    result is chunked, gate first. Other activations, and maps whose results something else reads too, stay as they
    are. Runs before `group_linears`, which would join the two maps.
    """

    name: str = "fuse_swiglu"

    def run(self, ir: PartitionedModel) -> PartitionedModel:
        return dataclasses.replace(ir, pieces=tuple(map(_fused, ir.pieces)))

    def check(self, ir: PartitionedModel) -> None:
        for index, piece in enumerate(ir.pieces):
            for left in _swiglus(piece.module):
                raise ValueError(f"piece {index} computes the SwiGLU {left.product.name} by itself")


@dataclass(frozen=True)
class _Swiglu:
    """A product silu(gate) * up."""

    product: fx.Node
    maps: tuple[LinearCall, ...]
    """The linear maps: gate and up, or one of both."""

    def replace(self) -> None:
        """Puts a call of `swiglu` in the place of the product; the maps are left without a reader."""
        graph, first = self.product.graph, self.maps[0]
        names = zip(*(linear.operands for linear in self.maps), strict=True)
        with graph.inserting_before(first.node):
            weights, *biases = ([graph.get_attr(name) for name in of_one] for of_one in names)
            call = graph.call_function(swiglu, (first.input, weights, biases[0] if biases else []))
        self.product.replace_all_uses_with(call)


def _fused(piece: Piece) -> Piece:
    if not any(_swiglus(piece.module)):
        return piece
    module = copied(piece.module)
    for found in list(_swiglus(module)):
        found.replace()
    module.graph.eliminate_dead_code()
    module.recompile()
    return dataclasses.replace(piece, module=module)


def _swiglus(module: fx.GraphModule) -> Iterator[_Swiglu]:
    for node in module.graph.nodes:
        if _calls(node, "mul") and len(node.all_input_nodes) == 2 and not node.kwargs:
            for silu, up in (node.args, node.args[::-1]):
                gate = _activated(silu)
                if gate is not None and _read_once(up) and (maps := _maps(gate, up, module)):
                    yield _Swiglu(node, maps)


def _activated(node: fx.Node) -> fx.Node | None:
    """The x of a silu(x), if nothing else reads either."""
    if not _calls(node, "silu") or node.kwargs.get("inplace") or not _read_once(node):
        return None
    (operand,) = node.all_input_nodes
    return operand if _read_once(operand) else None


def _maps(gate: fx.Node, up: fx.Node, module: fx.GraphModule) -> tuple[LinearCall, ...]:
    """The linear maps of one input that gate and up are the results of; none if they are anything else."""
    source = _chunked(gate, 0)
    nodes = (gate, up) if source is None else (source,) if source is _chunked(up, 1) else ()
    maps = tuple(linear for node in nodes if (linear := LinearCall.of(node, module)))
    if not maps or len(maps) < len(nodes) or len({linear.joins for linear in maps}) > 1:
        return ()
    return maps if known_equal(example(gate).shape[-1], example(up).shape[-1]) else ()


def _chunked(node: fx.Node, index: int) -> fx.Node | None:
    """The x of x.chunk(2, dim=-1)[index], if nothing else reads it."""
    if not _calls(node, "getitem") or node.args[1] != index or not _calls(node.all_input_nodes[0], "chunk"):
        return None
    (chunk,) = node.all_input_nodes
    given: dict[str, Any] = dict(zip(("input", "chunks", "dim"), chunk.args, strict=False)) | dict(chunk.kwargs)
    halved = given.get("chunks") == 2 and given.get("dim") == -1 and len(chunk.users) == 2
    (operand,) = chunk.all_input_nodes
    return operand if halved and _read_once(operand) else None


def _calls(node: fx.Node, name: str) -> bool:
    return node.op.startswith("call") and op_name(node) == name


def _read_once(node: fx.Node) -> bool:
    return len(node.users) == 1
