"""Pass `stream_attention`: every attention becomes `specstream::stream_verify`; the spec lists them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import fx

from specstream.errors import UnsupportedModel
from specstream.graph import AttentionSpec, ModelGraph
from specstream.nodes import example, module_of, refresh_example, remove_dead
from specstream.ops import stream_verify
from specstream.passes.canonicalize import attention_calls


@dataclass(frozen=True)
class StreamAttention:
    """Rewrites canonical attentions into stream_verify(q, k, v, layer, scale), layers in execution order."""

    name: str = "stream_attention"

    def run(self, ir: ModelGraph) -> ModelGraph:
        calls = attention_calls(ir.gm)
        key = example(calls[0].args[1])
        specs = tuple(_spec(layer, node) for layer, node in enumerate(calls))
        for spec, node in zip(specs, calls, strict=True):
            _refuse_other_geometry(spec, specs[0])
            if example(node.args[1]).dtype != key.dtype or example(node.args[2]).dtype != key.dtype:
                reason = f"its keys and values are not all {key.dtype}, as others are"
                raise UnsupportedModel(spec.module, reason, "Load the model in one dtype.")
            _replace(ir.gm.graph, node, spec)
        remove_dead(ir.gm.graph)
        ir.gm.recompile()
        return ModelGraph(ir.gm, dataclasses.replace(ir.spec, attentions=specs, dtype=key.dtype))

    def check(self, ir: ModelGraph) -> None:
        layers = [node.args[3] for node in ir.gm.graph.find_nodes(op="call_function", target=stream_verify)]
        if attention_calls(ir.gm) or layers != list(range(ir.spec.num_layers)):
            raise ValueError(f"attentions are numbered {layers}; the spec lists {ir.spec.num_layers}")


def _spec(layer: int, node: fx.Node) -> AttentionSpec:
    query, key = example(node.args[0]), example(node.args[1])
    scale = node.kwargs["scale"]
    assert isinstance(scale, float), "canonicalize makes the scale a float"
    return AttentionSpec(layer, module_of(node), query.shape[1], key.shape[1], query.shape[3], scale)


def _replace(graph: fx.Graph, node: fx.Node, spec: AttentionSpec) -> None:
    query = node.args[0]
    assert isinstance(query, fx.Node)
    with graph.inserting_before(node):
        call = graph.call_function(stream_verify, (*node.args, spec.layer, spec.scale))
    call.meta = dict(node.meta)
    refresh_example(call, query)
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _refuse_other_geometry(spec: AttentionSpec, first: AttentionSpec) -> None:
    if (spec.num_kv_heads, spec.head_dim) != (first.num_kv_heads, first.head_dim):
        raise UnsupportedModel(
            spec.module,
            f"its KV has {spec.num_kv_heads} heads of {spec.head_dim}, "
            f"that of {first.module or 'the first attention'} {first.num_kv_heads} of {first.head_dim}",
            "Use a model whose attentions all have KV of one shape.",
        )
