"""Capturing a model as one FX graph over flattened tokens, with TorchDynamo."""

from __future__ import annotations

import inspect
import logging
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import OptimizedModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from specstream.errors import UnsupportedModel
from specstream.graph import ModelGraph, ModelSpec
from specstream.models.normalize import normalized
from specstream.models.rope import max_positions, transformers_parts
from specstream.nodes import module_of, remove_dead
from specstream.widths import widths_of

Forward = Callable[[Tensor, Tensor], Tensor]
"""(input_ids, position_ids), both int64 [1, N] -> logits [1, N, vocab]."""

_EXAMPLE_TOKENS = 11
"""Tokens of the example run: a prime that no head count or width is likely to equal."""
_FAR_AWAY = 1 << 20
"""Positions to capture for when neither the caller nor the model states a limit."""

_EXPERTS = 'Call model.set_experts_implementation("batched_mm") first: it works in every dtype and as one graph.'
_NO_STATE = "Use a model whose forward changes no state of its own."


def capture(model: nn.Module, *, name: str, max_model_len: int | None) -> ModelGraph:
    """Captures `model(input_ids, position_ids)`, without a cache, as one graph with N symbolic.

    Args:
        model: in eval mode, whole on one device. A transformers causal language model, or any module whose
            forward takes `input_ids` and `position_ids` and returns logits [1, N, vocab] (or an object or
            mapping with `logits`). It is left exactly as it was, also when it is refused.
        name: what to call the model in messages and dumps.
        max_model_len: positions the graph must be right for; None for as many as its configuration states.

    Returns:
        The graph; its parameters are the model's own tensors.

    Raises:
        UnsupportedModel: naming the module, the reason and the way out.
    """
    device = _check_suitable(model)
    forward = forward_of(model)
    limit = max_model_len or max_positions(model) or _FAR_AWAY
    positions = torch.arange(max(min(_EXAMPLE_TOKENS, limit - 1), 2), device=device)[None]
    ids = torch.zeros_like(positions)
    with torch.no_grad(), _buffers_kept(model):
        way_out = _EXPERTS if any("Experts" in type(module).__name__ for module in model.modules()) else ""
        _check_logits(forward, ids, positions, way_out)
        with normalized(model, max_model_len):
            versions = {key: _version(tensor) for key, tensor in _tensors(model)}
            gm, logits = _trace(forward, ids, positions, limit, dict(_tensors(model)), way_out)
            written = [key for key, tensor in _tensors(model) if versions.get(key) != _version(tensor)]
    if written:
        raise UnsupportedModel(
            written[0].rpartition(".")[0],
            f"its forward writes to {written[0]}",
            _NO_STATE,
        )
    spec = ModelSpec(
        name=name,
        vocab_size=logits.shape[-1],
        dtype=logits.dtype,
        device=device,
        max_positions=max_positions(model),
        **widths_of(model),
    )
    return ModelGraph(gm, spec)


def forward_of(model: nn.Module) -> Forward:
    """The model as a function of `input_ids` and `position_ids`, returning its logits and using no cache.

    Raises:
        UnsupportedModel: if its forward has no place for position_ids.
    """
    parameters = inspect.signature(model.forward).parameters
    is_transformers = bool(transformers_parts(model))
    takes_any = is_transformers and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    options = {"use_cache": False} if takes_any or "use_cache" in parameters else {}
    if takes_any or {"input_ids", "position_ids"} <= set(parameters):
        keys = ["input_ids", "position_ids"]
    else:
        keys = [] if is_transformers else required
    if len(keys) != 2:
        raise UnsupportedModel(
            "",
            f"{type(model).__name__}.forward takes no position_ids",
            "Give it the signature forward(input_ids, position_ids): positions of flattened tokens are data.",
        )
    first, second = keys

    def forward(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return _logits(model(**{first: input_ids, second: position_ids}, **options))

    return forward


def _logits(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = output["logits"]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(f"it returns {type(output).__name__}, not logits or an object with .logits")
    return logits


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers by dotted name; tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes when the tensor is written to, or replaced by another."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undoes what forwards do to the model's buffers, such as counting their calls."""
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    versions = [_version(buffer) for _, _, buffer, _ in kept]
    try:
        yield
    finally:
        for (module, name, buffer, values), version in zip(kept, versions, strict=True):
            module._buffers[name] = buffer
            if _version(buffer) != version:
                buffer.copy_(values)


def _check_suitable(model: nn.Module) -> torch.device:
    """Refuses what can be seen without running the model. Returns the device it is on."""
    for part in transformers_parts(model):
        if getattr(part.config, "is_encoder_decoder", False):
            raise UnsupportedModel("", "it is an encoder-decoder", "Use a decoder-only language model.")
    devices: dict[torch.device, str] = {}
    for module_name, module in model.named_modules():
        if module.training:
            raise UnsupportedModel(module_name, "it is in training mode", "Call model.eval() first.")
        if _is_compiled(module):
            raise UnsupportedModel(
                module_name,
                "it is compiled by torch.compile already",
                "Give the model as it was before: SpecStream captures it itself.",
            )
        if hasattr(module, "_hf_hook"):
            raise UnsupportedModel(
                module_name,
                "accelerate moves its weights or inputs by a hook (offloaded, or split by device_map)",
                "Load the model whole on one device, without device_map.",
            )
    for key, tensor in _tensors(model):
        devices.setdefault(tensor.device, key)
    if torch.device("meta") in devices:
        key = devices[torch.device("meta")]
        raise UnsupportedModel(key, "it is on the meta device and has no values", "Load the model's weights.")
    if len(devices) != 1:
        places = ", ".join(f"{key} on {device}" for device, key in devices.items()) or "no parameters"
        raise UnsupportedModel("", f"it is not on one device ({places})", "Move all of it to one device.")
    return next(iter(devices))


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was used on the module, its forward, or by its method `compile`."""
    forward = module.forward
    wrapped = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return wrapped or isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _check_logits(forward: Forward, ids: Tensor, positions: Tensor, way_out: str) -> None:
    """One eager run, so that an error of the model's own is told apart from one of the capture."""
    try:
        logits = forward(ids, positions)
    except Exception as error:
        raise UnsupportedModel(
            "",
            f"its forward fails on input_ids, position_ids of shape [1, {ids.shape[1]}]: {_first_line(error)}",
            way_out or "It must take flattened tokens [1, N] and return logits [1, N, vocab].",
        ) from error
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise UnsupportedModel(
            "",
            f"its logits have the shape {list(logits.shape)} for input_ids of shape {list(ids.shape)}",
            "It must return logits [1, N, vocab].",
        )


@dataclass
class _Backend:
    """A Dynamo backend that takes note of the graph it is given and lets it run as it is."""

    graphs: list[tuple[fx.GraphModule, list[Any]]] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append((gm, example_inputs))
        return gm.forward


def _trace(
    forward: Forward, ids: Tensor, positions: Tensor, limit: int, tensors: Mapping[str, Tensor], way_out: str
) -> tuple[fx.GraphModule, Tensor]:
    """Runs Dynamo once. Returns the graph, of input_ids and position_ids, and example logits."""
    # A code object of our own: Dynamo counts recompiles, and keeps what it compiled, by code object.
    fresh = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__
    )
    for tensor in (ids, positions):
        # Code that depends on the length is captured for texts below the limit, as each request is one. Masks
        # may be cut out of a buffer of just that length, which makes the length itself a special case.
        torch._dynamo.mark_dynamic(tensor, 1, min=2, max=max(limit - 1, 3))
    backend = _Backend()
    # Floats stay literals, or eps and scale become inputs; the rest guards against settings of the user's.
    settings = torch._dynamo.config.patch(specialize_float=True, suppress_errors=False, disable=False)
    try:
        with settings, _silent(logging.getLogger("torch._guards")):  # the refusal says it in one line
            torch.compile(fresh, backend=backend, fullgraph=True)(ids, positions)
    except UnsupportedModel:
        raise
    except ConstraintViolationError as error:
        *_, limits = str(error).strip().rpartition("generated guard ")
        raise UnsupportedModel(
            "",
            f"it computes the same way only for some numbers of tokens ({limits})",
            f"Set max_model_len if it is for texts of less than {limit} tokens.",
        ) from error
    except Exception as error:
        raise UnsupportedModel(
            "",
            f"TorchDynamo cannot capture it as one graph: {_first_line(error)}{_user_frame(error)}",
            way_out
            or "Remove control flow on values and calls that TorchDynamo cannot trace, or use another model class.",
        ) from error
    finally:
        graphs, backend.graphs = backend.graphs, []  # Dynamo never forgets a backend
    ((gm, example_inputs),) = graphs
    inputs = {id(ids): "input_ids", id(positions): "position_ids"}
    return _with_own_inputs(gm, example_inputs, inputs, tensors)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _with_own_inputs(
    gm: fx.GraphModule, example_inputs: list[Any], inputs: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> tuple[fx.GraphModule, Tensor]:
    """Dynamo's graph, whose placeholders are all that it read, as a graph of input_ids and position_ids."""
    names: dict[int, str] = {}
    for key, tensor in tensors.items():
        names.setdefault(id(tensor), key.replace(".", "_"))
    root = nn.Module()
    graph = fx.Graph()
    own = {name: graph.placeholder(name) for name in ("input_ids", "position_ids")}
    values: dict[fx.Node, fx.Node] = {}
    old_placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(old_placeholders, example_inputs, strict=True):
        if id(value) in inputs:
            values[node] = own[inputs[id(value)]]
            values[node].meta.update(node.meta)
    tokens = graph.call_function(torch.ops.aten.sym_size.int, (own["input_ids"], 1))
    for node, value in zip(old_placeholders, example_inputs, strict=True):
        if isinstance(value, Tensor) and node not in values:
            key = names.get(id(value), "constant")  # a tensor that is no parameter and no buffer
            while hasattr(root, key):
                key += "_"
            if isinstance(value, nn.Parameter):
                root.register_parameter(key, value)
            else:
                root.register_buffer(key, value, persistent=False)
            values[node] = graph.get_attr(key)
            values[node].meta.update(node.meta)
        elif node not in values:
            values[node] = tokens  # a SymInt: N, which both inputs have
            tokens.meta.update(node.meta)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(gm, str(node.target)))
        if node.op not in ("placeholder", "output"):
            values[node] = graph.node_copy(node, values.__getitem__)
    logits, *others = gm.graph.output_node().all_input_nodes
    if others:  # what Dynamo would assign to attributes afterwards
        raise UnsupportedModel(module_of(others[0]), f"its forward keeps a value for later ({others[0]})", _NO_STATE)
    graph.output(values[logits])
    for placeholder in own.values():
        placeholder.meta.setdefault("example_value", None)
    remove_dead(graph)
    return fx.GraphModule(root, graph, class_name="CapturedModel"), logits.meta["example_value"]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".") if lines else type(error).__name__


def _user_frame(error: BaseException) -> str:
    """The innermost line of the model's own code that Dynamo's message points at."""
    _, _, trace = str(error).partition("from user code:")
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    return " ({}:{}, in {})".format(*frames[-1]) if frames else ""
