"""What the passes need to know of an FX node: its name, its example value, the module it came from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def op_name(node: fx.Node) -> str:
    """Short name of what a call node calls, a function or a method: "softmax", "to", "getitem"."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default").removesuffix(".int")


def example(node: object) -> Any:
    """The example value of a node (a fake tensor, a SymInt, ...); anything else is its own example."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def is_symbolic(size: object) -> bool:
    """True for a dimension that changes with the number of tokens."""
    return isinstance(size, torch.SymInt)


def known_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True if two dimensions are equal for every number of tokens."""
    return bool(statically_known_true(a == b))


def module_of(node: fx.Node) -> str:
    """Dotted name of the innermost module whose forward made this node ("" for the model itself)."""
    paths = [_dotted(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if len(paths) < 2 or not paths[-1].startswith(paths[0]):
        return ""
    return paths[-1][len(paths[0]) :].lstrip(".")


def _dotted(path: str) -> str:
    """Dynamo's source names ("G['m']._modules['layers'][0].attn") as dotted names."""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path)


def writes(node: fx.Node) -> bool:
    """True for a node that must stay though nobody reads it: it writes to an operand, or changes a mode.

    FX itself takes every method for pure, `x.tril_()` included.
    """
    if node.is_impure():
        return True
    name = op_name(node)
    in_place = node.op.startswith("call") and name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE_OPERATORS or "out" in node.kwargs


_IN_PLACE_OPERATORS = frozenset({"iadd", "isub", "imul", "itruediv", "iand", "ior", "setitem"})


def remove_dead(graph: fx.Graph) -> None:
    """Removes what nobody reads, but for what writes to something that is read."""
    graph.eliminate_dead_code(lambda node: writes(node) and not _writes_for_nobody(node))


_MAKERS = frozenset({"ones", "zeros", "full", "empty", "arange", "ones_like", "zeros_like", "full_like", "ge", "le"})
"""Ops whose result shares its memory with nothing."""


def _writes_for_nobody(node: fx.Node) -> bool:
    """True if `node` writes to a fresh tensor that has no readers, as masks do not once they are dropped."""
    if not node.op.startswith("call") or not node.args or not isinstance(written := node.args[0], fx.Node):
        return False
    readers = [user for user in written.users if user is not node and (user.users or not writes(user))]
    return op_name(written) in _MAKERS and not readers


def refresh_example(node: fx.Node, fallback: fx.Node) -> None:
    """Recomputes a call node's example value from those of its operands, under their fake mode.

    Copying the value of the node it replaces would be wrong: another op's strides mislead a compiler later.
    `fallback` is a node whose example is surely a fake tensor, so that its mode can be used.
    """
    value = example(fallback)
    if not isinstance(value, FakeTensor):
        raise TypeError(f"{fallback} has no fake example value")
    args = fx.map_arg(node.args, example)
    kwargs = fx.map_arg(node.kwargs, example)
    # The Python dispatcher: composite operators in C++ would fix sizes that are open.
    with value.fake_mode, enable_python_dispatcher(), torch.no_grad():
        node.meta["example_value"] = _callable(node, args)(*args, **kwargs)


def _callable(node: fx.Node, args: Any) -> Callable[..., Any]:
    if node.op == "call_method":
        return getattr(type(args[0]), str(node.target))  # type: ignore[no-any-return]
    if not callable(node.target):
        raise TypeError(f"{node} calls nothing")
    return node.target


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with a graph of its own, which may be changed; parameters are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph, type(module).__name__)
