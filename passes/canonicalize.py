"""Pass `canonicalize`: every attention in one form, or a refusal that names its module.

The form is F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=float, enable_gqa=bool), with
q [1, Hq, N, D], k and v [1, Hkv, N, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from specstream.errors import UnsupportedModel
from specstream.graph import ModelGraph
from specstream.masks import MaskProof, writers_before
from specstream.nodes import (
    example,
    is_symbolic,
    known_equal,
    module_of,
    op_name,
    refresh_example,
    remove_dead,
)

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_CANONICAL = ("is_causal", "scale", "enable_gqa")
_USE_SDPA = "Call F.scaled_dot_product_attention(q, k, v, is_causal=True) there."


def attention_calls(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls of F.scaled_dot_product_attention, in execution order."""
    return gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


@dataclass(frozen=True)
class Canonicalize:
    """Strips repeated KV heads, proves masks causal by evaluating them and drops them, refuses the rest."""

    max_model_len: int | None = None
    """Tokens that masks must be causal for; None for what the model's configuration states."""
    name: str = "canonicalize"

    def run(self, ir: ModelGraph) -> ModelGraph:
        _refuse_handwritten(ir.gm)
        calls = attention_calls(ir.gm)
        if not calls:
            raise UnsupportedModel("", "it calls no F.scaled_dot_product_attention", _USE_SDPA)
        proof = MaskProof(ir.spec.vocab_size, ir.spec.device, self.max_model_len or ir.spec.max_positions)
        proven: set[tuple[fx.Node, int]] = set()
        for node in calls:
            given: dict[str, Any] = dict(zip(_PARAMETERS, node.args, strict=False)) | dict(node.kwargs)
            _refuse_not_causal(node, given)
            mask, writers = given.get("attn_mask"), writers_before(node)
            if mask is not None and (mask, len(writers)) not in proven:  # layers share masks
                proof.prove(ir.gm, mask, writers, module_of(node))
                proven.add((mask, len(writers)))
            _rewrite(node, given)
        remove_dead(ir.gm.graph)
        _refuse_row_numbers(ir.gm)
        ir.gm.recompile()
        return ir

    def check(self, ir: ModelGraph) -> None:
        for node in attention_calls(ir.gm):
            canonical = len(node.args) == 3 and tuple(node.kwargs) == _CANONICAL
            if not canonical or node.kwargs["is_causal"] is not True:
                raise ValueError(f"{node.format_node()} is not canonical")


def _refuse_not_causal(node: fx.Node, given: dict[str, Any]) -> None:
    module = module_of(node)
    if given.get("dropout_p"):
        raise UnsupportedModel(
            module, f"its attention drops out (dropout_p={given['dropout_p']})", "Make it 0 in eval mode."
        )
    if given.get("attn_mask") is None and not given.get("is_causal"):
        raise UnsupportedModel(module, "its attention is not causal (is_causal=False, no mask)", _USE_SDPA)


def _rewrite(node: fx.Node, given: dict[str, Any]) -> None:
    query, key, value = given["query"], given["key"], given["value"]
    with node.graph.inserting_before(node):
        narrow_key, narrow_value = strip_repeat(key), strip_repeat(value)
    if example(narrow_key).shape[1] == example(narrow_value).shape[1]:  # both or neither
        key, value = narrow_key, narrow_value
    _check_shapes(module_of(node), *(example(operand).shape for operand in (query, key, value)))
    scale = given.get("scale")
    node.args = (query, key, value)
    node.kwargs = {
        "is_causal": True,
        "scale": float(scale) if scale is not None else 1.0 / math.sqrt(example(query).shape[-1]),
        "enable_gqa": example(query).shape[1] != example(key).shape[1],
    }
    operand = example(query)
    with operand.fake_mode:  # the attention's own fake may fix the number of tokens; `stream_attention` replaces it
        node.meta["example_value"] = operand.new_empty((*operand.shape[:-1], example(value).shape[-1]))


def strip_repeat(node: fx.Node) -> fx.Node:
    """The KV heads before they were repeated to as many as the query's; `node` itself if they were not.

    Knows expand + reshape and repeat_interleave, over heads in dimension 1, or in dimension 2 before a
    transpose of both (then a new transpose is inserted at the graph's insertion point).
    """
    while op_name(node) == "contiguous":
        (node,) = node.all_input_nodes
    if (source := _before_repeat(node, 1)) is not None:
        return source
    if op_name(node) == "transpose" and {dim % 4 for dim in node.args[1:] if isinstance(dim, int)} == {1, 2}:
        (repeated,) = node.all_input_nodes
        if (source := _before_repeat(repeated, 2)) is not None:
            transposed = node.graph.call_method("transpose", (source, 1, 2))
            transposed.meta = dict(node.meta)
            refresh_example(transposed, source)
            return transposed
    return node


def _before_repeat(node: fx.Node, dim: int) -> fx.Node | None:
    """x if `node` is x with each head, along `dim` of its four, repeated in place, else None."""
    if op_name(node) == "repeat_interleave":
        repeats = node.kwargs.get("repeats", node.args[1] if len(node.args) > 1 else None)
        over = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        in_place = isinstance(repeats, int) and isinstance(over, int) and over % 4 == dim
        return node.all_input_nodes[0] if in_place else None
    chain = [node]
    for kinds in (("reshape", "view", "flatten"), ("expand", "broadcast_to"), ("getitem", "unsqueeze")):
        if op_name(chain[-1]) not in kinds:
            return None
        chain.append(chain[-1].all_input_nodes[0])
    merged, wide, single, before = (example(link).shape for link in chain)
    if (len(merged), len(wide), len(single), len(before)) != (4, 5, 5, 4):
        return None
    # The shapes of the three steps prove the rest.
    head, tail, group = before[: dim + 1], before[dim + 1 :], wide[dim + 1]
    expected = [(single, (*head, 1, *tail)), (wide, (*head, group, *tail))]
    expected += [(merged, (*head[:dim], head[dim] * group, *tail))]
    same = all(known_equal(a, b) for pair in expected for a, b in zip(*pair, strict=True))
    return chain[-1] if same else None


def _check_shapes(module: str, query: Any, key: Any, value: Any) -> None:
    for shape in (query, key, value):
        if len(shape) != 4 or not known_equal(shape[0], 1) or is_symbolic(shape[1]) or is_symbolic(shape[3]):
            reason = f"its attention has an operand of shape [{', '.join(map(str, shape))}]"
            raise UnsupportedModel(module, reason, "Operands must be [1, heads, N, head_dim].")
    if not (is_symbolic(query[2]) and known_equal(query[2], key[2]) and known_equal(query[2], value[2])):
        reason = f"its attention is of {query[2]} queries over {key[2]} keys, not of tokens over themselves"
        raise UnsupportedModel(module, reason, "Use a decoder without cross-attention or a cache of its own.")
    if key[3] != value[3] or key[3] != query[3]:
        reason = f"its keys and values differ in head_dim ({key[3]} and {value[3]}, as in MLA)"
        raise UnsupportedModel(module, reason, "Use a model whose keys and values have one head_dim.")
    if key[1] != value[1] or query[1] % key[1]:
        reason = f"its {query[1]} query, {key[1]} key and {value[1]} value heads do not go together"
        raise UnsupportedModel(module, reason, "Use as many key as value heads, a divisor of the query heads.")


def _refuse_handwritten(gm: fx.GraphModule) -> None:
    """A softmax over tokens is an attention that this graph does not show as one call."""
    for node in gm.graph.nodes:
        if not node.op.startswith("call") or op_name(node) not in ("softmax", "log_softmax", "_softmax"):
            continue
        operand = node.args[0] if node.args else node.kwargs.get("input")
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
        if isinstance(dim, int) and is_symbolic(example(operand).shape[dim]):
            reason = "it has a hand-written attention (a softmax over tokens)"
            raise UnsupportedModel(module_of(node), reason, _USE_SDPA)


def _refuse_row_numbers(gm: fx.GraphModule) -> None:
    """Row numbers that are calculated with are meant as positions, which they are not in flattened tokens.

    The probe sees that too, but only if it matters near the start of a text. As indices, for grouping tokens
    by expert say, row numbers are right.
    """
    numbers: set[fx.Node] = set()
    for node in gm.graph.nodes:
        value = example(node)
        if not isinstance(value, Tensor) or value.dtype == torch.bool:
            continue
        counts = op_name(node) == "arange" and any(map(is_symbolic, value.shape))
        calculates = not numbers.isdisjoint(_calculated_with(node))
        if (counts or calculates) and value.dtype.is_floating_point:
            raise UnsupportedModel(
                module_of(node),
                "it calculates with torch.arange over the tokens, as if that were their positions",
                "Calculate with position_ids: flattened tokens belong to several requests.",
            )
        if counts or calculates:
            numbers.add(node)


def _calculated_with(node: fx.Node) -> list[fx.Node]:
    """The operands of a node whose values, not only as indices, reach its result."""
    if op_name(node) == "embedding":
        return []
    operands = node.args[:1] if op_name(node) in _INDEXING else node.all_input_nodes
    return [operand for operand in operands if isinstance(operand, fx.Node)]


_INDEXING = frozenset(
    {"getitem", "setitem", "gather", "take_along_dim", "index_select", "index_copy"}
    | {"index_put", "index_put_", "index_add", "index_add_"}
    | {"scatter", "scatter_", "scatter_add", "scatter_add_"}
)
